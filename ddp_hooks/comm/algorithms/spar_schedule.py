"""Schedule of Spar-Reduce-Scatter: which blocks each worker sends to whom, in the paper's bags.

Pure functions of the number of workers. Workers and blocks of one team are numbered from 0 and lie on a circle
(zhao2024spardl, section III-B; the paper counts from 1).
"""

from __future__ import annotations

from functools import lru_cache

from ddp_hooks.comm.algorithms.bruck import Step, num_rounds


@lru_cache(maxsize=1024)
def bags(worker: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the blocks of a worker's preservation bag, then of its sending bags 1, 2, … (Example 1 and Fig. 5).

    Sending bag i holds ``2^(i - 1)`` blocks, beginning ``2^(i - 1)`` after the worker's own; the last bag the rest.
    """
    result: list[tuple[int, ...]] = [(worker,)]
    for i in range(num_rounds(size)):
        distance = 1 << i
        result.append(tuple((worker + distance + x) % size for x in range(min(distance, size - distance))))
    return tuple(result)


@lru_cache(maxsize=1024)
def reduce_scatter_steps(worker: int, size: int) -> tuple[Step, ...]:
    """Return the rounds: the last bag first, each to the worker of its first block (section III-B2).

    In every round the worker still holds the blocks that it receives (Theorem 1).
    """
    steps = []
    for i in reversed(range(num_rounds(size))):
        distance = 1 << i
        source = (worker - distance) % size
        steps.append(Step((worker + distance) % size, bags(worker, size)[i + 1], source, bags(source, size)[i + 1]))
    return tuple(steps)
