"""Collectives in fewer bits, as generators: an all-gather of encoded shards, an exchange of encoded gradients.

Every rank sends its gradients straight to their owner, encoded once, as ZeRO++ does (Wang et al., 2023, section 3.3),
and sums are formed in float32. A ring would round every partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, pairwise_exchange, ring_all_gather
from fsdp_ext.codecs import Codec


def compressed_all_gather(chunks: Sequence[Tensor], rank: int, codec: Codec) -> Algorithm:
    """Copy ``chunks[r]`` of every rank r to all ranks, as its code says it: the same everywhere, also on r.

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
    """Sum ``chunks[rank]`` over all ranks, and divide the sum, in place; what ranks send each other is encoded.

    Args:
        chunks: one 1-D tensor per rank; ``chunks[c]`` has the same length on every rank. ``chunks[rank]`` ends as the
            mean, of this rank's own part, which is exact, and of all others' encoded ones; the rest means nothing.
        rank: the rank that runs this generator.
        codec: see :mod:`fsdp_ext.codecs`.
        divisor: number of ranks for a mean.
        residuals: error feedback: of every chunk what earlier encodings have lost, float32; it is added before this
            one, and overwritten with what this one loses, which is nothing of ``chunks[rank]``.
    """
    payloads = encoded_for_others(chunks, rank, codec, residuals)
    incoming = [torch.empty_like(payload) for payload in payloads]
    yield from pairwise_exchange(payloads, incoming, rank)
    add_up(chunks[rank], rank, incoming, codec, divisor, None if residuals is None else residuals[rank])


def encoded_for_others(
    chunks: Sequence[Tensor], rank: int, codec: Codec, residuals: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """One uint8 tensor per rank, that of ``rank`` itself empty of meaning; residuals as above are changed."""
    payloads = [chunk.new_empty(codec.nbytes(chunk.numel()), dtype=torch.uint8) for chunk in chunks]
    for peer, chunk in enumerate(chunks):
        if peer != rank and residuals is None:
            codec.encode(chunk, payloads[peer])
        elif peer != rank and residuals is not None:
            codec.encode_with_residual(chunk, residuals[peer], payloads[peer])
    return payloads


def add_up(
    own: Tensor, rank: int, payloads: Sequence[Tensor], codec: Codec, divisor: int = 1, residual: Tensor | None = None
) -> None:
    """Make the mean of this rank's chunk, with what is left of it, and what others have sent for it; in float32.

    Args:
        own: (numel,), of this rank; becomes the mean.
        rank: whose payload is left aside.
        payloads: (nbytes,) of every rank.
        codec: of the payloads.
        divisor: number of ranks.
        residual: (numel,), float32, of this rank's own chunk; becomes zero.
    """
    total = own if own.dtype == torch.float32 else own.float()
    # It is zero but for what a checkpoint has brought; to ask an accelerator is to wait for it.
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


def sliced(
    ranges: Sequence[Tensor], slice_numel: int, start: Callable[[list[Tensor], slice], Algorithm]
) -> list[Callable[[], Algorithm]]:
    """Of ranges of one length the slices, each ready to start: ``start(chunks, where)`` makes the generator."""
    numel = ranges[0].numel()
    places = [slice(begin, min(begin + slice_numel, numel)) for begin in range(0, numel, slice_numel)]
    return [_starter(ranges, where, start) for where in places]


def _starter(
    ranges: Sequence[Tensor], where: slice, start: Callable[[list[Tensor], slice], Algorithm]
) -> Callable[[], Algorithm]:
    return lambda: start([each[where] for each in ranges], where)
