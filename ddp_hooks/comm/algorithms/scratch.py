"""Scratch memory of an algorithm, handed out piece by piece."""

from __future__ import annotations

import torch
from torch import Tensor


def room_for(nbytes: int) -> int:
    """Return the bytes of scratch memory that a piece takes; pieces begin where any dtype may."""
    return -(-nbytes // 8) * 8


class Scratch:
    """Memory of a lane, uint8, from its beginning on."""

    def __init__(self, memory: Tensor) -> None:
        self._rest = memory

    def take(self, nbytes: int) -> Tensor:
        taken, self._rest = self._rest[:nbytes], self._rest[room_for(nbytes) :]
        return taken

    def like(self, values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for as many numbers, of their type or another."""
        dtype = dtype or values.dtype
        return self.take(values.numel() * dtype.itemsize).view(dtype)
