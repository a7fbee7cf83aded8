"""Messages whose length only the sender knows: to the first rank, and from it to all others."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm import Recv, Round, Send

Receiving: TypeAlias = Generator[Round, None, list[bytes]]


def gather(data: bytes, rank: int, world_size: int) -> Receiving:
    """Everybody's message on rank 0, in the order of ranks; elsewhere nothing. Lengths travel first."""
    if rank > 0:
        yield [Send(0, _length(data))]
        yield [Send(0, _tensor(data))]
        return []
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(1, world_size)]
    yield [Recv(peer, length) for peer, length in enumerate(lengths, 1)]
    messages = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    yield [Recv(peer, message) for peer, message in enumerate(messages, 1)]
    return [data, *(bytes(message.tolist()) for message in messages)]


def broadcast(data: bytes, rank: int, world_size: int) -> Generator[Round, None, bytes]:
    """Rank 0's message on all ranks, along a binomial tree; what others give is left aside."""
    lowest = rank & -rank if rank else 1 << (world_size - 1).bit_length()
    if rank:
        parent, length = rank - lowest, torch.empty(1, dtype=torch.int64)
        yield [Recv(parent, length)]
        message = torch.empty(int(length), dtype=torch.uint8)
        yield [Recv(parent, message)]
        data = bytes(message.tolist())
    distance = lowest >> 1
    while distance:
        if rank + distance < world_size:
            yield [Send(rank + distance, _length(data))]
            yield [Send(rank + distance, _tensor(data))]
        distance >>= 1
    return data


def _length(data: bytes) -> Tensor:
    return torch.tensor([len(data)])


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
