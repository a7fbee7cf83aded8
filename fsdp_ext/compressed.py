"""FSDP2's memory as a partition, the codec of its gathers, and Spar-Reduce-Scatter of its gradients.

Spar-Reduce-Scatter is SparDL's (section III-B); FSDP2 gathers parameters anyway, so the paper's other half, which
completes a sparse all-reduce, falls away.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.comm import Algorithm, Partition
from ddp_hooks.comm.wire.codecs import Codec, codec_of
from ddp_hooks.sparse import BlockSelector, ChunkedGradient
from ddp_hooks.sparse.codec import EntryCodec, Format
from ddp_hooks.sparse.common import Plan
from ddp_hooks.sparse.error_feedback import ErrorFeedback
from ddp_hooks.sparse.spardl import spar_reduce_scatter
from fsdp_ext import compat
from fsdp_ext.config import ExtConfig


def even_partition(flat: Tensor, world_size: int) -> Partition:
    """Cut FSDP2's memory into one range per rank; FSDP2 pads, so that all have the same length."""
    return Partition(flat, tuple(flat.numel() // world_size * rank for rank in range(world_size + 1)))


def gather_codec(config: ExtConfig, module: FSDPModule, dtype: torch.dtype, world_size: int) -> Codec | None:
    """Return the codec of a gather of ``module``'s parameters; None: they travel as they are.

    With ``reshard_after_forward=n`` the backward gathers what the forward has rounded, among fewer ranks.
    """
    codec = codec_of(config.all_gather, config.block, dtype)
    return codec if world_size == compat.num_shards(module) else None


def sparse_reduce_scatter(
    partition: Partition, residual: Tensor, rank: int, density: float, wire: Format, divisor: int = 1
) -> Algorithm:
    """Sum the largest elements of a partition's gradients and residuals over all ranks, and divide the sum.

    This rank's range becomes its part, 0 where no entry was sent; other ranges are undefined then. ``residual``, of the
    partition's length, float32, or float64 for such gradients, becomes the values that are left out here. ``density``
    is the share of its range's elements that each rank gets.
    """
    numel, world_size = residual.numel(), len(partition.ranges)
    plan = Plan(numel, max(world_size, round(density * numel)), world_size, 1, rank)
    selector = BlockSelector(residual, plan.bounds, plan.counts, ChunkedGradient((partition.flat,)))
    held = yield from spar_reduce_scatter(ErrorFeedback(residual), selector, plan, EntryCodec(wire, residual.dtype))
    own = partition.ranges[rank]
    mean = held.values / divisor if divisor > 1 else held.values
    own.zero_().index_copy_(0, held.indices, mean.to(own.dtype))
