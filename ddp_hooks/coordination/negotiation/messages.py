"""Messages whose length only the sender knows: from all ranks to rank 0, and from rank 0 to all ranks."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from typing import TypeAlias

import torch

from ddp_hooks.comm import Algorithm, Recv, Round, Send

Receiving: TypeAlias = Generator[Round, None, list[bytes]]

_LENGTH = struct.Struct("<Q")


def gather(data: bytes, rank: int, world_size: int, fan_out: int | None = None) -> Receiving:
    """Return the messages of all ranks, in their order, on rank 0, and nothing elsewhere; lengths travel first.

    With a ``fan_out`` messages travel along a tree: a rank receives from at most ``fan_out`` children, and sends their
    messages and its own as one to its parent. None: all ranks send to rank 0.
    """
    width = fan_out if fan_out is not None else max(1, world_size - 1)
    children = children_of(rank, world_size, width)
    messages = (yield from _receive(children)) if children else []
    subtree = b"".join([_LENGTH.pack(len(data)), data, *messages])
    if rank:
        yield from _send((rank - 1) // width, subtree)
        return []
    # A rank's message is followed by the messages of its children's subtrees, one subtree after the other.
    ranks, parts = _in_order_of_trees(world_size, width), _parts(subtree)
    by_rank = dict(zip(ranks, parts, strict=True))
    return [by_rank[each] for each in range(world_size)]


def children_of(rank: int, world_size: int, width: int) -> range:
    """Return the children of a rank in a tree of ``width`` children per rank, laid out as a heap."""
    first = rank * width + 1
    return range(min(first, world_size), min(first + width, world_size))


def broadcast(data: bytes, rank: int, world_size: int) -> Generator[Round, None, bytes]:
    """Return rank 0's message on all ranks, along a binomial tree; ``data`` of other ranks is ignored."""
    lowest = rank & -rank if rank else 1 << (world_size - 1).bit_length()
    if rank:
        (data,) = yield from _receive([rank - lowest])
    distance = lowest >> 1
    while distance:
        if rank + distance < world_size:
            yield from _send(rank + distance, data)
        distance >>= 1
    return data


def _send(peer: int, data: bytes) -> Algorithm:
    yield [Send(peer, torch.tensor([len(data)]))]
    yield [Send(peer, torch.frombuffer(bytearray(data), dtype=torch.uint8))]


def _receive(peers: Sequence[int]) -> Receiving:
    lengths = [torch.empty(1, dtype=torch.int64) for _ in peers]
    yield [Recv(peer, length) for peer, length in zip(peers, lengths, strict=True)]
    messages = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    yield [Recv(peer, message) for peer, message in zip(peers, messages, strict=True)]
    return [message.numpy().tobytes() for message in messages]


def _in_order_of_trees(world_size: int, width: int) -> Iterator[int]:
    """Yield each rank before its children, one subtree after the other."""
    waiting: list[int] = [0]
    while waiting:
        rank = waiting.pop()
        yield rank
        waiting += reversed(children_of(rank, world_size, width))


def _parts(subtree: bytes) -> Sequence[bytes]:
    parts, place = [], 0
    while place < len(subtree):
        (length,) = _LENGTH.unpack_from(subtree, place)
        place += _LENGTH.size
        parts.append(subtree[place : place + length])
        place += length
    return parts
