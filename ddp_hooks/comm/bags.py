"""Who sends which blocks to whom: the bags of Spar-Reduce-Scatter.

Pure functions of the number of workers. Workers and blocks of one team are numbered from 0 and lie on a circle
(zhao2024spardl, section III-B; the paper counts from 1).
"""

from __future__ import annotations

from functools import lru_cache

from ddp_hooks.comm.algorithms.bruck import Step, num_rounds


@lru_cache(maxsize=1024)
def bags(worker: int, size: int) -> tuple[tuple[int, ...], ...]:
    """The blocks of a worker's preservation bag, then those of its sending bags 1, 2, … (Example 1 and Fig. 5).

    Sending bag i holds the 2^(i - 1) blocks that begin 2^(i - 1) behind the worker's own; the last one what is left.
    """
    result: list[tuple[int, ...]] = [(worker,)]
    for i in range(num_rounds(size)):
        distance = 1 << i
        result.append(tuple((worker + distance + x) % size for x in range(min(distance, size - distance))))
    return tuple(result)


@lru_cache(maxsize=1024)
def reduce_scatter_steps(worker: int, size: int) -> tuple[Step, ...]:
    """The rounds of Spar-Reduce-Scatter: the last bag first, each to the worker that it begins with (section III-B2).

    In every round the blocks that come in are blocks that the worker still holds (Theorem 1).
    """
    steps = []
    for i in reversed(range(num_rounds(size))):
        distance = 1 << i
        source = (worker - distance) % size
        steps.append(
            Step((worker + distance) % size, bags(worker, size)[i + 1], source, bags(source, size)[i + 1])
        )
    return tuple(steps)
