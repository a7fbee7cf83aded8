"""Messages whose length only the sender knows: to the first rank, and from it to all others."""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm import Recv, Round, Send

Receiving: TypeAlias = Generator[Round, None, list[bytes]]

_LENGTH = struct.Struct("<Q")


def gather(data: bytes, rank: int, world_size: int, fan_out: int | None = None) -> Receiving:
    """Everybody's message on rank 0, in the order of ranks; elsewhere nothing. Lengths travel first.

    With a ``fan_out`` along a tree, in which every rank hears from at most so many others, and passes on what it has
    heard with its own as one message; None: rank 0 hears from all others itself.
    """
    width = fan_out if fan_out is not None else max(1, world_size - 1)
    children = children_of(rank, world_size, width)
    lengths = [torch.empty(1, dtype=torch.int64) for _ in children]
    if children:
        yield [Recv(child, length) for child, length in zip(children, lengths, strict=True)]
    messages = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    if children:
        yield [Recv(child, message) for child, message in zip(children, messages, strict=True)]
    subtree = b"".join([_LENGTH.pack(len(data)), data, *(message.numpy().tobytes() for message in messages)])
    if rank:
        parent = (rank - 1) // width
        yield [Send(parent, _length(subtree))]
        yield [Send(parent, _tensor(subtree))]
        return []
    # Each rank's own message is followed by those of its children's subtrees, one after the other.
    ranks, parts = _in_order_of_trees(world_size, width), _parts(subtree)
    by_rank = dict(zip(ranks, parts, strict=True))
    return [by_rank[each] for each in range(world_size)]


def children_of(rank: int, world_size: int, width: int) -> range:
    """From whom a rank hears in a tree in which no rank hears from more than ``width``: as in a heap."""
    first = rank * width + 1
    return range(min(first, world_size), min(first + width, world_size))


def broadcast(data: bytes, rank: int, world_size: int) -> Generator[Round, None, bytes]:
    """Rank 0's message on all ranks, along a binomial tree; what others give is left aside."""
    lowest = rank & -rank if rank else 1 << (world_size - 1).bit_length()
    if rank:
        parent, length = rank - lowest, torch.empty(1, dtype=torch.int64)
        yield [Recv(parent, length)]
        message = torch.empty(int(length), dtype=torch.uint8)
        yield [Recv(parent, message)]
        data = message.numpy().tobytes()
    distance = lowest >> 1
    while distance:
        if rank + distance < world_size:
            yield [Send(rank + distance, _length(data))]
            yield [Send(rank + distance, _tensor(data))]
        distance >>= 1
    return data


def _in_order_of_trees(world_size: int, width: int) -> Iterator[int]:
    """Ranks from the root on, each before its children, and their subtrees one after the other."""
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


def _length(data: bytes) -> Tensor:
    return torch.tensor([len(data)])


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
