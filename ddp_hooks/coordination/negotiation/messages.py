"""Messages in JSON whose length only the sender knows: from all ranks to rank 0, and from rank 0 to all ranks."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import torch

from ddp_hooks.comm import Algorithm, Recv, Round, Send

Receiving: TypeAlias = Generator[Round, None, list[Any]]


def gather(message: object, rank: int, world_size: int, fan_out: int | None = None) -> Receiving:
    """Return the messages of all ranks, in their order, on rank 0, and nothing elsewhere; along a tree."""
    # A rank receives from at most ``fan_out`` children, and sends their messages and its own as one to its parent.
    width = fan_out if fan_out is not None else max(1, world_size - 1)
    subtree: list[list[Any]] = [[rank, message]]
    if children := children_of(rank, world_size, width):
        for part in (yield from _receive(children)):
            subtree += part
    if rank:
        yield from _send((rank - 1) // width, subtree)
        return []
    return [each for _, each in sorted(subtree, key=lambda pair: pair[0])]


def children_of(rank: int, world_size: int, width: int) -> range:
    """Return the children of a rank in a tree of ``width`` children per rank, laid out as a heap."""
    first = rank * width + 1
    return range(min(first, world_size), min(first + width, world_size))


def broadcast(message: Any, rank: int, world_size: int) -> Generator[Round, None, Any]:
    """Return rank 0's message on all ranks, along a binomial tree; ``message`` of other ranks is ignored."""
    lowest = rank & -rank if rank else 1 << (world_size - 1).bit_length()
    if rank:
        (message,) = yield from _receive([rank - lowest])
    distance = lowest >> 1
    while distance:
        if rank + distance < world_size:
            yield from _send(rank + distance, message)
        distance >>= 1
    return message


def _send(peer: int, message: object) -> Algorithm:
    data = json.dumps(message, separators=(",", ":")).encode()
    yield [Send(peer, torch.tensor([len(data)]))]
    yield [Send(peer, torch.frombuffer(bytearray(data), dtype=torch.uint8))]


def _receive(peers: Sequence[int]) -> Receiving:
    lengths = [torch.empty(1, dtype=torch.int64) for _ in peers]
    yield [Recv(peer, length) for peer, length in zip(peers, lengths, strict=True)]
    messages = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    yield [Recv(peer, message) for peer, message in zip(peers, messages, strict=True)]
    return [json.loads(message.numpy().tobytes()) for message in messages]
