"""Several tensors in one message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, so that every part can be viewed in its own dtype


def new_message(nbytes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Allocate a message for parts of these sizes; return the message, 1-D uint8, and views of its parts."""
    message = torch.empty(message_bytes(nbytes), dtype=torch.uint8, device=device)
    return message, parts_of(message, nbytes)


def message_bytes(nbytes: Sequence[int]) -> int:
    """Return the bytes of a message with parts of these sizes."""
    return sum(_padded(size) for size in nbytes)


def parts_of(message: Tensor, nbytes: Sequence[int]) -> list[Tensor]:
    """Return views of the parts of a message."""
    starts = itertools.accumulate((_padded(size) for size in nbytes), initial=0)
    return [message[start : start + size] for start, size in zip(starts, nbytes, strict=False)]


def as_rows(part: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """View a part of a message as (num_rows, num_columns)."""
    return part.view(dtype).view(num_rows, num_columns)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
