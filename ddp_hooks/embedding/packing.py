"""Several tensors in one message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes, so that every part may be viewed in its own type


def packed(nbytes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A message with room for parts of these sizes.

    Returns:
        The message, 1-D, uint8, and views of its parts, likewise; a part may be followed by a few unused bytes.
    """
    message = torch.empty(packed_length(nbytes), dtype=torch.uint8, device=device)
    return message, parts_of(message, nbytes)


def packed_length(nbytes: Sequence[int]) -> int:
    """Bytes of a message with such parts."""
    return sum(_padded(size) for size in nbytes)


def parts_of(message: Tensor, nbytes: Sequence[int]) -> list[Tensor]:
    """Views of the parts of a message."""
    starts = [0, *itertools.accumulate(_padded(size) for size in nbytes)]
    return [message[start : start + size] for start, size in zip(starts, nbytes, strict=False)]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def as_rows(part: Tensor, num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A part of a message as (num_rows, columns)."""
    return part.view(dtype).view(num_rows, columns)
