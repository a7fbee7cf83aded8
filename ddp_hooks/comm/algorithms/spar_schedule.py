"""Schedule of Spar-Reduce-Scatter: which blocks each worker sends to whom, in the paper's bags.

Workers and blocks of one team are numbered from 0 and lie on a circle (zhao2024spardl, section III-B; the paper counts
from 1). Sending bag i of a worker holds ``2^(i - 1)`` blocks, beginning ``2^(i - 1)`` after its own; the last bag the
rest (Example 1 and Fig. 5). These are the blocks that a worker receives in round i of Bruck's all-gather.
"""

from __future__ import annotations

from functools import lru_cache

from ddp_hooks.comm.algorithms.bruck import Step, all_gather_steps


@lru_cache(maxsize=1024)
def reduce_scatter_steps(worker: int, size: int) -> tuple[Step, ...]:
    """Return the rounds: the last bag first, each to the worker of its first block (section III-B2).

    In every round the worker still holds the blocks that it receives (Theorem 1).
    """
    gathers = reversed(all_gather_steps(worker, size))
    return tuple(Step(gather.source, gather.incoming, gather.target, gather.outgoing) for gather in gathers)
