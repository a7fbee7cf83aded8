"""Dense collectives in fewer bits: every number is rounded once, by the rank that sends it.

In a reduce-scatter every rank sends its ranges straight to their owners, as ZeRO++ does (Wang et al., 2023, section
3.3), and sums are formed in float32 at least, in the order of ranks. ``members[position]`` runs a generator; the 1-D
``chunks`` are one per member and have the same lengths everywhere. Scratch memory is uint8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.collectives import reduce_scatter_among
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Send, round_of
from ddp_hooks.comm.algorithms.scratch import Scratch, room_for
from ddp_hooks.comm.algorithms.two_level import levels_of, two_level_all_gather, two_level_scratch_numel
from ddp_hooks.comm.wire.codecs import Codec
from ddp_hooks.comm.wire.rounded import DifferenceWire


def encoded_reduce_scatter(
    members: Sequence[int],
    position: int,
    chunks: Sequence[Tensor],
    codec: Codec,
    residuals: Sequence[Tensor] | None,
    scratch: Tensor,
    divisor: int = 1,
) -> Algorithm:
    """Sum ``chunks[position]`` over the members, and divide the sum, in place; other chunks stay.

    ``residuals``, one per chunk, are added before encoding, and become its loss. This rank's own range is not encoded:
    its residual, which only another layout leaves, is added and becomes 0. ``scratch`` has at least
    :func:`encoded_scatter_bytes`.
    """
    size, own, space = len(members), chunks[position], Scratch(scratch)
    payloads: dict[int, Tensor] = {}
    exchanges: list[Recv | Send] = []
    for step in range(1, size):
        source, to = (position - step) % size, (position + step) % size
        payloads[source] = space.take(codec.nbytes(own.numel()))
        sent = space.take(codec.nbytes(chunks[to].numel()))
        if residuals is None:
            codec.encode(chunks[to], sent)
        else:
            codec.encode_with_residual(chunks[to], residuals[to], sent)
        exchanges += [Recv(members[source], payloads[source]), Send(members[to], sent)]
    if size > 1:
        yield round_of(*exchanges)
    residual = None if residuals is None else residuals[position]
    add_encoded(own, position, payloads, codec, residual, space, divisor)


def encoded_scatter_bytes(chunks: Sequence[Tensor], position: int, codec: Codec) -> int:
    """Return how much scratch memory :func:`encoded_reduce_scatter` takes at most, in bytes."""
    own = chunks[position].numel()
    payloads = sum(room_for(codec.nbytes(each.numel())) + room_for(codec.nbytes(own)) for each in chunks)
    return payloads + 2 * room_for(8 * own)


def add_encoded(
    own: Tensor,
    position: int,
    payloads: dict[int, Tensor],
    codec: Codec,
    residual: Tensor | None,
    space: Scratch,
    divisor: int = 1,
) -> None:
    """Make ``own`` the sum of lower members' payloads, itself with ``residual``, and higher members' ones, divided."""
    if not own.numel():
        return
    wide = torch.promote_types(own.dtype, torch.float32)
    total = own if own.dtype == wide else space.like(own, wide).copy_(own)
    if residual is not None and (residual.device.type != "cpu" or residual.any()):  # to ask an accelerator is to wait
        total.add_(residual)
        residual.zero_()
    lower = None
    for source in range(position):
        if lower is None:
            lower = space.like(own, wide)
            codec.decode(payloads[source], lower)
        else:
            codec.add(payloads[source], lower)
    if lower is not None:
        total.add_(lower)
    for source in range(position + 1, len(payloads) + 1):
        codec.add(payloads[source], total)
    if divisor > 1:
        total.div_(divisor)
    if total is not own:
        own.copy_(total)


def difference_all_gather(
    chunks: Sequence[Tensor], rank: int, wire: DifferenceWire, scratch: Tensor, node_size: int = 1
) -> Algorithm:
    """Add to every chunk, the own one too, what its owner's precise numbers exceed it by, rounded, in place.

    ``chunks``, one per rank, have the same bits on all ranks, before and after. ``wire`` is that of ``chunks[rank]``.
    ``scratch`` has at least :func:`difference_gather_bytes`.
    """
    space, codec, own = Scratch(scratch), wire.codec, chunks[rank]
    payloads = [space.take(codec.nbytes(chunk.numel())) for chunk in chunks]
    difference = torch.sub(wire.precise, own, out=space.like(own, wire.precise.dtype))
    codec.encode(difference, payloads[rank])
    yield from two_level_all_gather(payloads, rank, node_size)
    for payload, chunk in zip(payloads, chunks, strict=True):
        codec.add(payload, chunk)
    wire.shown.copy_(own)


def difference_gather_bytes(chunks: Sequence[Tensor], wire: DifferenceWire) -> int:
    """Return how much scratch memory :func:`difference_all_gather` takes, in bytes."""
    return sum(room_for(wire.codec.nbytes(chunk.numel())) for chunk in chunks) + room_for(wire.precise.nbytes)


def two_level_encoded_reduce_scatter(
    chunks: Sequence[Tensor],
    rank: int,
    node_size: int,
    codec: Codec,
    residuals: Sequence[Tensor],
    scratch: Tensor,
    divisor: int = 1,
) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks: as it is within nodes, encoded between them, and divide the sum, in place.

    Chunks of equal local ranks end as their node's sums. ``residuals`` are those of the node's sums: only chunks of
    equal local ranks have some.
    """
    (members, local_rank, within), (peers, node, between) = levels_of(chunks, rank, node_size)
    own = chunks[rank]
    yield from reduce_scatter_among(members, local_rank, within, scratch.view(own.dtype))
    chunks_between = [chunk for (chunk,) in between]
    yield from encoded_reduce_scatter(
        peers, node, chunks_between, codec, [residuals[peer] for peer in peers], scratch, divisor
    )


def two_level_encoded_scatter_bytes(chunks: Sequence[Tensor], rank: int, node_size: int, codec: Codec) -> int:
    within = two_level_scratch_numel(chunks, rank, node_size) * chunks[rank].element_size()
    peers = [chunks[peer] for peer in range(rank % node_size, len(chunks), node_size)]
    return max(room_for(within), encoded_scatter_bytes(peers, rank // node_size, codec))
