"""Several tensors in one message."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from ddp_hooks.comm import Round, pairwise_exchange

_ALIGNMENT = 16  # bytes, so that every part can be viewed in its own dtype


def new_message(nbytes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Allocate a message for parts of these sizes; return the message, 1-D uint8, and views of its parts."""
    message = torch.empty(message_bytes(nbytes), dtype=torch.uint8, device=device)
    return message, parts_of(message, nbytes)


def message_bytes(nbytes: Sequence[int]) -> int:
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in nbytes)


def parts_of(message: Tensor, nbytes: Sequence[int]) -> list[Tensor]:
    starts = [message_bytes(nbytes[:position]) for position in range(len(nbytes))]
    return [message[start : start + size] for start, size in zip(starts, nbytes, strict=True)]


def as_rows(part: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """View a part of a message as (num_rows, num_columns)."""
    return part.view(dtype).view(num_rows, num_columns)


def exchange_parts(
    rank: int,
    world_size: int,
    device: torch.device,
    nbytes: Callable[[int, int], Sequence[int]],
    write: Callable[[int, list[Tensor]], None],
) -> Generator[Round, None, list[list[Tensor]]]:
    """Send every rank a message of several parts; return the parts that each rank has sent.

    ``nbytes(sender, receiver)`` are the sizes of the parts, and ``write(receiver, parts)`` fills them.
    """
    outgoing, incoming, received = [], [], []
    for peer in range(world_size):
        message, parts = new_message(nbytes(rank, peer), device)
        write(peer, parts)
        outgoing.append(message)
        if peer != rank:
            message, parts = new_message(nbytes(peer, rank), device)
        incoming.append(message)
        received.append(parts)
    yield from pairwise_exchange(outgoing, incoming, rank)
    return received
