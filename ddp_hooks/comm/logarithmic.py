"""Dense collectives in ceil(log2 P) rounds, for any number of ranks: few messages, where latency is what costs.

A reduce-scatter along the bags of SparDL's Spar-Reduce-Scatter, without its selection (zhao2024spardl, section III-B),
and Bruck's all-gather (Fig. 3b there). Both send as many bytes as a ring. DeAR (sections III-A and VII-A) allows any
all-reduce that splits in two.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_hooks.comm.bags import reduce_scatter_steps
from ddp_hooks.comm.bruck import all_gather_steps
from ddp_hooks.comm.collectives import Partition
from ddp_hooks.comm.exchange import Algorithm, Recv, Send, round_of


def log_reduce_scatter(partition: Partition, rank: int, scratch: Tensor, divisor: int = 1) -> Algorithm:
    """Sum this rank's range over all ranks, and divide the sum, in place.

    Args:
        partition: the other ranges end as partial sums and mean nothing.
        rank: the rank that runs this generator.
        scratch: at least :func:`scratch_numel` long; overwritten.
        divisor: number of ranks for a mean.
    """
    world_size = len(partition.bounds) - 1
    for target, outgoing, source, incoming in reduce_scatter_steps(rank, world_size):
        partials = _runs(partition, incoming)
        arriving = _cut(scratch, partials)
        receives = [Recv(source, part) for part in arriving]
        yield round_of(*receives, *(Send(target, part) for part in _runs(partition, outgoing)))
        for partial, part in zip(partials, arriving, strict=True):
            partial.add_(part)
    mine = partition.flat[partition.bounds[rank] : partition.bounds[rank + 1]]
    if divisor > 1 and mine.numel():
        mine.div_(divisor)


def log_all_gather(partition: Partition, rank: int) -> Algorithm:
    """Copy every rank's range of ``partition`` to all ranks, in place.

    Args:
        partition: this rank's range is read, the others are overwritten.
        rank: the rank that runs this generator.
    """
    world_size = len(partition.bounds) - 1
    for target, outgoing, source, incoming in all_gather_steps(rank, world_size):
        receives = [Recv(source, part) for part in _runs(partition, incoming)]
        yield round_of(*receives, *(Send(target, part) for part in _runs(partition, outgoing)))


def scratch_numel(partition: Partition, rank: int) -> int:
    """The most elements that :func:`log_reduce_scatter` receives in a round."""
    steps = reduce_scatter_steps(rank, len(partition.bounds) - 1)
    return max((sum(part.numel() for part in _runs(partition, step.incoming)) for step in steps), default=0)


def _runs(partition: Partition, ranks: Sequence[int]) -> list[Tensor]:
    """The ranges of ranks that follow each other on the circle: in one piece, or in two around its end."""
    flat, bounds = partition
    if not ranks:
        return []
    first, last, end = ranks[0], ranks[-1], len(bounds) - 1
    pieces = [(first, last + 1)] if first <= last else [(first, end), (0, last + 1)]
    return [flat[bounds[begin] : bounds[stop]] for begin, stop in pieces if bounds[stop] > bounds[begin]]


def _cut(scratch: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    sizes = [part.numel() for part in like]
    return list(scratch[: sum(sizes)].split(sizes)) if sizes else []
