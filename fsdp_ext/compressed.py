"""Collectives in fewer bits, as generators: encoded all-gather and reduce-scatter, and sparse reduce-scatter.

In an encoded reduce-scatter every rank sends its gradients straight to their owner, encoded once, as ZeRO++ does (Wang
et al., 2023, section 3.3), and sums are formed in float32. The sparse one is Spar-Reduce-Scatter (SparDL, section
III-B); FSDP2 gathers parameters anyway, so the paper's other half, which completes a sparse all-reduce, falls away.

``rank`` runs the generator. ``chunks`` are one 1-D tensor per rank; ``chunks[c]`` has the same length on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.comm import Algorithm, Partition, pairwise_exchange, ring_all_gather
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


def sliced(numel: int, slice_numel: int, start: Callable[[slice], Algorithm]) -> list[Callable[[], Algorithm]]:
    """Cut ranges of ``numel`` elements into slices; return the functions that start them."""
    return [partial(start, slice(begin, begin + slice_numel)) for begin in range(0, numel, slice_numel)]


def gather_codec(config: ExtConfig, module: FSDPModule, dtype: torch.dtype, world_size: int) -> Codec | None:
    """Return the codec of a gather of ``module``'s parameters; None: they travel as they are.

    With ``reshard_after_forward=n`` the backward gathers what the forward has rounded, among fewer ranks.
    """
    codec = codec_of(config.all_gather, config.block_numel, dtype)
    return codec if world_size == compat.num_shards(module) else None


def compressed_all_gather(chunks: Sequence[Tensor], rank: int, codec: Codec) -> Algorithm:
    """Copy ``chunks[r]`` of every rank r to all ranks, rounded by its code: the same everywhere, also on r."""
    payloads = [torch.empty(codec.nbytes(chunk.numel()), dtype=torch.uint8) for chunk in chunks]
    codec.encode(chunks[rank], payloads[rank])
    yield from ring_all_gather(payloads, rank)
    for payload, chunk in zip(payloads, chunks, strict=True):
        codec.decode(payload, chunk)


def compressed_reduce_scatter(
    chunks: Sequence[Tensor], rank: int, codec: Codec, divisor: int = 1, residuals: Sequence[Tensor] | None = None
) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks, and divide the sum, in place; other chunks are undefined then.

    ``residuals``, float32, one per chunk, are added before encoding, and become its loss.
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
    """Add the own residual, which becomes 0, and other ranks' payloads to ``own``, in float32, and divide."""
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
