"""Collectives in fewer bits, as generators: encoded all-gather and reduce-scatter, and sparse reduce-scatter.

In an encoded reduce-scatter every rank sends its gradients straight to their owner, encoded once, as ZeRO++ does (Wang
et al., 2023, section 3.3), and sums are formed in float32. The sparse one is Spar-Reduce-Scatter (SparDL, section
III-B); FSDP2 gathers parameters anyway, so the paper's other half, which completes a sparse all-reduce, falls away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.comm import Algorithm, Partition, pairwise_exchange, ring_all_gather
from ddp_hooks.topk.algorithms.codec import EntryCodec, Format
from ddp_hooks.topk.algorithms.common import Plan
from ddp_hooks.topk.algorithms.error_feedback import ErrorFeedback
from ddp_hooks.topk.algorithms.spardl import spar_reduce_scatter
from ddp_hooks.topk.selection import BlockSelector, ChunkedGradient
from fsdp_ext import compat
from fsdp_ext.codecs import Codec, codec_of
from fsdp_ext.config import ExtConfig

# -- how memory is cut -------------------------------------------------------------------------------------------------


def even_partition(flat: Tensor, world_size: int) -> Partition:
    """Cut FSDP2's memory into one range per rank; FSDP2 pads, so that all have the same length."""
    return Partition(flat, tuple(flat.numel() // world_size * rank for rank in range(world_size + 1)))


def sliced(
    ranges: Sequence[Tensor], slice_numel: int, start: Callable[[list[Tensor], slice], Algorithm]
) -> list[Callable[[], Algorithm]]:
    """Cut ranges of one length into slices, each with the function that starts it: ``start(chunks, where)``."""
    numel = ranges[0].numel()
    places = [slice(begin, min(begin + slice_numel, numel)) for begin in range(0, numel, slice_numel)]
    return [partial(_start, ranges, where, start) for where in places]


def _start(ranges: Sequence[Tensor], where: slice, start: Callable[[list[Tensor], slice], Algorithm]) -> Algorithm:
    return start([each[where] for each in ranges], where)


# -- encoded -----------------------------------------------------------------------------------------------------------


def gather_codec(config: ExtConfig, module: FSDPModule, dtype: torch.dtype, world_size: int) -> Codec | None:
    """Return the codec of a gather of ``module``'s parameters; None: they travel as they are.

    With ``reshard_after_forward=n`` the backward gathers what the forward has rounded, among fewer ranks.
    """
    codec = codec_of(config.all_gather, config.block_numel, dtype)
    return codec if world_size == compat.num_shards(module) else None


def compressed_all_gather(chunks: Sequence[Tensor], rank: int, codec: Codec) -> Algorithm:
    """Copy ``chunks[r]`` of every rank r to all ranks, rounded by its code: the same everywhere, also on r.

    Args:
        chunks: one 1-D tensor per rank, of one length. ``chunks[rank]`` is read; all are overwritten.
        rank: the rank that runs this generator.
        codec: see :mod:`fsdp_ext.codecs`.
    """
    payloads = [torch.empty(codec.nbytes(chunk.numel()), dtype=torch.uint8) for chunk in chunks]
    codec.encode(chunks[rank], payloads[rank])
    yield from ring_all_gather(payloads, rank)
    for payload, chunk in zip(payloads, chunks, strict=True):
        codec.decode(payload, chunk)


def compressed_reduce_scatter(
    chunks: Sequence[Tensor], rank: int, codec: Codec, divisor: int = 1, residuals: Sequence[Tensor] | None = None
) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks, and divide the sum, in place; messages are encoded.

    Args:
        chunks: one 1-D tensor per rank; ``chunks[c]`` has the same length on every rank. ``chunks[rank]`` ends as the
            mean of this rank's own values, which are exact, and all encoded ones; the others are undefined.
        rank: the rank that runs this generator.
        codec: see :mod:`fsdp_ext.codecs`.
        divisor: number of ranks for a mean.
        residuals: error feedback, float32, one per chunk: added before encoding, and overwritten with the loss of this
            encoding, which is 0 for ``chunks[rank]``.
    """
    payloads = encode_for_peers(chunks, rank, codec, residuals)
    incoming = [torch.empty_like(payload) for payload in payloads]
    yield from pairwise_exchange(payloads, incoming, rank)
    add_payloads(chunks[rank], rank, incoming, codec, divisor, None if residuals is None else residuals[rank])


def encode_for_peers(
    chunks: Sequence[Tensor], rank: int, codec: Codec, residuals: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Return one uint8 tensor per rank, undefined for ``rank`` itself; update residuals as above."""
    payloads = [chunk.new_empty(codec.nbytes(chunk.numel()), dtype=torch.uint8) for chunk in chunks]
    for peer, chunk in enumerate(chunks):
        if peer != rank and residuals is None:
            codec.encode(chunk, payloads[peer])
        elif peer != rank and residuals is not None:
            codec.encode_with_residual(chunk, residuals[peer], payloads[peer])
    return payloads


def add_payloads(
    own: Tensor, rank: int, payloads: Sequence[Tensor], codec: Codec, divisor: int = 1, residual: Tensor | None = None
) -> None:
    """Make ``own`` the mean of itself, its residual and other ranks' payloads; summed in float32.

    Args:
        own: (numel,), chunk of this rank; becomes the mean.
        rank: its payload is ignored.
        payloads: (nbytes,) of every rank.
        codec: of the payloads.
        divisor: number of ranks.
        residual: (numel,), float32, of this rank's own chunk; becomes 0.
    """
    total = own if own.dtype == torch.float32 else own.float()
    # Only a checkpoint brings values here; to ask an accelerator is to wait for it.
    if residual is not None and (residual.device.type != "cpu" or residual.any()):
        total += residual
        residual.zero_()
    for peer, payload in enumerate(payloads):
        if peer != rank:
            codec.add(payload, total)
    if divisor > 1:
        total /= divisor
    if total is not own:
        own.copy_(total)


# -- sparse ------------------------------------------------------------------------------------------------------------


def sparse_reduce_scatter(
    partition: Partition, residual: Tensor, rank: int, density: float, wire: Format, divisor: int = 1
) -> Algorithm:
    """Sum the largest elements of a partition's gradients and residuals over all ranks, and divide the sum.

    Args:
        partition: gradients, in ranges of one length. This rank's range ends as its part of the mean, 0 where no entry
            was sent; the others are undefined.
        residual: same length; float32, or float64 for such gradients. Overwritten with the values left out here.
        rank: the rank that runs this generator.
        density: share of its range's elements that each rank gets.
        wire: format of entries.
        divisor: number of ranks for a mean.
    """
    numel, world_size = residual.numel(), len(partition.ranges)
    plan = Plan(numel, max(world_size, round(density * numel)), world_size, 1, rank)
    selector = BlockSelector(residual, plan.bounds, plan.counts, ChunkedGradient((partition.flat,)))
    held = yield from spar_reduce_scatter(ErrorFeedback(residual), selector, plan, EntryCodec(wire, residual.dtype))
    own = partition.ranges[rank]
    mean = held.values / divisor if divisor > 1 else held.values
    own.zero_().index_copy_(0, held.indices, mean.to(own.dtype))
