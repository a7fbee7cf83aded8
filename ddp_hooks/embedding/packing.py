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
        The message, 1-D, uint8, and views of its parts, likewise; between them may lie a few unused bytes.
    """
    ends = list(itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in nbytes))
    starts = [0, *ends[:-1]]
    length = starts[-1] + nbytes[-1] if nbytes else 0
    message = torch.empty(length, dtype=torch.uint8, device=device)
    return message, [message[start : start + size] for start, size in zip(starts, nbytes, strict=True)]


def as_rows(part: Tensor, num_rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A part of a message as (num_rows, columns)."""
    return part.view(dtype).view(num_rows, columns)
