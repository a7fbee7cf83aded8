"""Dense collectives in fewer bits: every number is rounded once, by the rank that sends it.

In a reduce-scatter every rank sends its ranges straight to their owners, as ZeRO++ does (Wang et al., 2023, section
3.3), and sums are formed in float32 at least, in the order of ranks. ``members[position]`` runs a generator; the 1-D
``chunks`` are one per member and have the same lengths everywhere. Scratch memory is uint8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.collectives import reduce_scatter_among, sum_in_order
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Send, round_of
from ddp_hooks.comm.algorithms.scratch import Scratch, room_for
from ddp_hooks.comm.algorithms.two_level import levels_of, two_level_all_gather, two_level_scratch_numel
from ddp_hooks.comm.wire.codecs import Codec
from ddp_hooks.comm.wire.rounded import DifferenceWire, RoundedWire


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

    ``residuals``, one per chunk, get error feedback by the codec. This rank's own range is not encoded: its residual,
    which only another layout leaves, is added and becomes 0. ``scratch`` has at least :func:`encoded_scatter_bytes`.
    """
    size, own, space = len(members), chunks[position], Scratch(scratch)
    none = scratch[:0]
    outgoing = [none if i == position else space.take(codec.nbytes(each.numel())) for i, each in enumerate(chunks)]
    incoming = [none if i == position else space.take(codec.nbytes(own.numel())) for i in range(size)]
    encode_for_peers(chunks, position, codec, outgoing, residuals)
    exchanges: list[Recv | Send] = []
    for step in range(1, size):
        source, to = (position - step) % size, (position + step) % size
        exchanges += [Recv(members[source], incoming[source]), Send(members[to], outgoing[to])]
    if size > 1:
        yield round_of(*exchanges)
    add_encoded(own, position, incoming, codec, None if residuals is None else residuals[position], space, divisor)


def encoded_scatter_bytes(chunks: Sequence[Tensor], position: int, codec: Codec) -> int:
    """Return how much scratch memory :func:`encoded_reduce_scatter` takes at most, in bytes."""
    own = chunks[position]
    payloads = sum(room_for(codec.nbytes(each.numel())) + room_for(codec.nbytes(own.numel())) for each in chunks)
    return payloads + sum_bytes(own)


def encode_for_peers(
    chunks: Sequence[Tensor],
    position: int,
    codec: Codec,
    payloads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
) -> None:
    """Write every chunk but the own one to its payload; ``residuals`` get error feedback."""
    for peer, (chunk, payload) in enumerate(zip(chunks, payloads, strict=True)):
        if peer != position and residuals is None:
            codec.encode(chunk, payload)
        elif peer != position and residuals is not None:
            codec.encode_with_residual(chunk, residuals[peer], payload)


def add_encoded(
    own: Tensor,
    position: int,
    payloads: Sequence[Tensor],
    codec: Codec,
    residual: Tensor | None,
    space: Scratch,
    divisor: int = 1,
) -> None:
    """Make ``own`` the sum of lower members' payloads, itself with ``residual``, and higher members' ones, divided.

    ``space`` has at least :func:`sum_bytes`.
    """
    if not own.numel():
        return
    wide = torch.promote_types(own.dtype, torch.float32)
    total = own if own.dtype == wide else space.like(own, wide).copy_(own)
    if residual is not None and (residual.device.type != "cpu" or residual.any()):  # to ask an accelerator is to wait
        total.add_(residual)
        residual.zero_()

    def read(source: int) -> Tensor:
        values = space.like(own, wide)
        codec.decode(payloads[source], values)
        return values

    sum_in_order(total, position, len(payloads), read, lambda source, to: codec.add(payloads[source], to), divisor)
    if total is not own:
        own.copy_(total)


def sum_bytes(own: Tensor) -> int:
    """Return how much scratch memory :func:`add_encoded` takes at most, in bytes."""
    return 2 * room_for(8 * own.numel())


def encoded_all_gather(
    chunks: Sequence[Tensor], rank: int, wire: RoundedWire | DifferenceWire, scratch: Tensor, node_size: int = 1
) -> Algorithm:
    """Bring every owner's rounded numbers to all ranks, in place, the same bits everywhere, also on the owner.

    ``chunks`` are one per rank. ``wire`` is that of ``chunks[rank]``. With a :class:`RoundedWire` every chunk becomes a
    copy of its owner's, rounded. With a :class:`DifferenceWire` chunks have the same bits on all ranks before; what its
    owner's precise numbers exceed a chunk by is rounded and added, so what that took is in the next difference.
    ``scratch`` has at least :func:`encoded_gather_bytes`.
    """
    space, own = Scratch(scratch), chunks[rank]
    payloads = [space.take(wire.codec.nbytes(chunk.numel())) for chunk in chunks]
    room = space.like(own, wire.precise.dtype) if isinstance(wire, DifferenceWire) else None
    encode_own(own, wire, payloads[rank], room)
    yield from two_level_all_gather(payloads, rank, node_size)
    read_gathered(chunks, rank, wire, payloads)


def encoded_gather_bytes(chunks: Sequence[Tensor], wire: RoundedWire | DifferenceWire) -> int:
    """Return how much scratch memory :func:`encoded_all_gather` takes, in bytes."""
    difference = room_for(wire.precise.nbytes) if isinstance(wire, DifferenceWire) else 0
    return sum(room_for(wire.codec.nbytes(chunk.numel())) for chunk in chunks) + difference


def encode_own(
    own: Tensor, wire: RoundedWire | DifferenceWire, payload: Tensor, room: Tensor | None = None
) -> None:
    """Write the own chunk of an all-gather to ``payload``; ``room``: memory for a difference, None: new memory."""
    if isinstance(wire, DifferenceWire):
        wire.codec.encode(torch.sub(wire.precise, own, out=room), payload)
    else:
        wire.codec.encode(own, payload)


def read_gathered(
    chunks: Sequence[Tensor], rank: int, wire: RoundedWire | DifferenceWire, payloads: Sequence[Tensor]
) -> None:
    """Change chunks by the payloads of an all-gather."""
    for payload, chunk in zip(payloads, chunks, strict=True):
        if isinstance(wire, DifferenceWire):
            wire.codec.add(payload, chunk)
        else:
            wire.codec.decode(payload, chunk)
    if isinstance(wire, DifferenceWire):
        wire.shown.copy_(chunks[rank])


def two_level_encoded_reduce_scatter(
    chunks: Sequence[Tensor],
    rank: int,
    node_size: int,
    codec: Codec,
    residuals: Sequence[Tensor] | None,
    scratch: Tensor,
    divisor: int = 1,
    hands_over: bool = False,
) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks: as it is within nodes, encoded between them, and divide the sum, in place.

    Chunks of equal local ranks end as their node's sums. ``residuals`` are those of the node's sums: only chunks of
    equal local ranks have some. Other chunks may have some that another partition has left; with ``hands_over`` these
    become part of the node's sums.
    """
    (members, local_rank, within), (peers, node, between) = levels_of(chunks, rank, node_size)
    own = chunks[rank]
    if hands_over and residuals is not None:
        for owner, (chunk, residual) in enumerate(zip(chunks, residuals, strict=True)):
            if owner not in peers:
                chunk.add_(residual)
                residual.zero_()
    yield from reduce_scatter_among(members, local_rank, within, scratch.view(own.dtype))
    chunks_between = [chunk for (chunk,) in between]
    kept = None if residuals is None else [residuals[peer] for peer in peers]
    yield from encoded_reduce_scatter(peers, node, chunks_between, codec, kept, scratch, divisor)


def two_level_encoded_scatter_bytes(chunks: Sequence[Tensor], rank: int, node_size: int, codec: Codec) -> int:
    within = two_level_scratch_numel(chunks, rank, node_size) * chunks[rank].element_size()
    peers = [chunks[peer] for peer in range(rank % node_size, len(chunks), node_size)]
    return max(room_for(within), encoded_scatter_bytes(peers, rank // node_size, codec))
