"""Reduce-scatter in exact 16 bits: every range goes straight to its owner, in the fewest bits that lose nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.collectives import sum_in_order
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Send, round_of
from ddp_hooks.comm.algorithms.scratch import Scratch, room_for
from ddp_hooks.comm.wire.exact import Arrived, ExactWire, encode, message_bytes


def exact_reduce_scatter(
    chunks: Sequence[Tensor], rank: int, wire: ExactWire, index: int, scratch: Tensor, divisor: int = 1
) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks, ``((g0 + g1) + g2) + ...``, and divide the sum, in place.

    As :func:`~.collectives.direct_reduce_scatter` of float32, with the same bits. ``index`` is the slice's number in
    the partition that ``wire`` belongs to. ``scratch``: uint8, of :func:`exact_scratch_bytes`.
    """
    size, own = len(chunks), chunks[rank]
    space = Scratch(scratch)
    first: list[Recv | Send] = []
    second: list[Recv | Send] = []
    arriving: dict[int, Tensor] = {}  # numbers as they are, or messages
    for step in range(1, size):
        source, to = (rank - step) % size, (rank + step) % size
        numel, memory = own.numel(), wire.pair(index, source, sends=False)
        if memory.is_whole(numel):
            arriving[source] = space.like(own)
        else:
            arriving[source] = space.take(message_bytes(numel, memory))
        numel, memory = chunks[to].numel(), wire.pair(index, to, sends=True)
        first.append(Recv(source, arriving[source]))
        if memory.is_whole(numel):
            first.append(Send(to, chunks[to]))
        else:
            message = space.take(message_bytes(numel, memory))
            second.append(Send(to, encode(chunks[to], memory, message)))
            first.append(Send(to, message))
    if first:
        yield round_of(*first)
    decoded: dict[int, Arrived] = {}
    for source, message in arriving.items():
        if message.dtype == torch.uint8:
            decoded[source] = Arrived.of(message, own.numel(), wire.pair(index, source, sends=False))
            second.append(Recv(source, decoded[source].low_of_late))
    late = round_of(*second)
    if late:
        yield late
    if own.numel():
        lower, other = space.like(own), space.like(own)

        def read(source: int, room: Tensor) -> Tensor:
            if source not in decoded:
                return arriving[source]
            decoded[source].decode(room)
            return room

        sum_in_order(
            own, rank, size, lambda each: read(each, lower), lambda each, to: to.add_(read(each, other)), divisor
        )


def exact_scratch_bytes(chunks: Sequence[Tensor], rank: int) -> int:
    """Return how much scratch memory :func:`exact_reduce_scatter` takes at most, in bytes."""
    # A message of n numbers has at most 4 n bytes, because it has low bits of at most half of the blocks. Ranges go to
    # P - 1 ranks, P - 1 messages come, and two ranges are for adding.
    own = room_for(4 * chunks[rank].numel())
    return sum(room_for(4 * chunk.numel()) for chunk in chunks) + len(chunks) * own
