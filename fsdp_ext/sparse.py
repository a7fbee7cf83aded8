"""Spar-Reduce-Scatter of FSDP2's gradients: each rank gets the largest elements of its shards (SparDL, section III-B).

FSDP2 gathers parameters anyway, so the paper's other half, which completes a sparse all-reduce, falls away.
"""

from __future__ import annotations

from torch import Tensor

from ddp_hooks.comm import Algorithm, Partition
from ddp_hooks.topk.ledger import Ledger
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.selection import BlockSelector
from ddp_hooks.topk.spardl import Plan, spar_reduce_scatter
from ddp_hooks.topk.wire import Format, Wire


def sparse_reduce_scatter(
    partition: Partition, residual: Tensor, rank: int, density: float, wire: Format, divisor: int = 1
) -> Algorithm:
    """Sum the largest elements of a partition's gradients and residuals over all ranks, and divide the sum.

    Args:
        partition: of the gradients, ranges of one length. This rank's range ends as its part of the mean, which is 0
            where nothing was sent; the rest means nothing.
        residual: as long; float32, or float64 for such gradients. Overwritten with what is left out of the sum here.
        rank: the rank that runs this generator.
        density: part of the elements that each rank gets of its range.
        wire: how they travel.
        divisor: number of ranks for a mean.
    """
    numel, world_size = residual.numel(), len(partition.ranges)
    plan = Plan(numel, max(world_size, round(density * numel)), world_size, 1, rank)
    selector = BlockSelector(residual, plan.bounds, plan.counts, Scattered((partition.flat,)))
    held = yield from spar_reduce_scatter(Ledger(residual), selector, plan, Wire(wire, residual.dtype))
    own = partition.ranges[rank]
    mean = held.values / divisor if divisor > 1 else held.values
    own.zero_().index_copy_(0, held.indices, mean.to(own.dtype))
