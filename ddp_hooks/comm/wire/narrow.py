"""Gathers in 16 bits: numbers of some ranges travel rounded, all others with all their bits.

A message has the float32 numbers of its range that travel whole, then the rounded ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_hooks.comm.torch_compat.overrides import copy_all

_WIDE_BYTES = 4  # float32


@dataclass(frozen=True)
class NarrowGather:
    """Ranges of a float32 partition whose numbers are gathered in ``dtype``; owners keep all bits of theirs."""

    ranges: tuple[tuple[int, int], ...]  # [start, end) in the flat tensor: ascending, apart, not empty
    dtype: torch.dtype = torch.bfloat16

    def nbytes(self, start: int, end: int) -> int:
        """Return the length of the message with elements ``[start, end)``."""
        num_rounded = sum(last - first for first, last in self._split(start, end)[1])
        return _WIDE_BYTES * (end - start - num_rounded) + self.dtype.itemsize * num_rounded

    def encode(self, flat: Tensor, start: int, end: int, message: Tensor) -> None:
        """Write elements ``[start, end)`` to ``message``, uint8, (nbytes,), aligned for float32."""
        values, travelling = self._views(flat, start, end, message)
        if values:
            copy_all(travelling, values)

    def decode(self, message: Tensor, flat: Tensor, start: int, end: int) -> None:
        """Write a message to elements ``[start, end)``; the low bits of rounded ones become 0."""
        values, travelling = self._views(flat, start, end, message)
        if values:
            copy_all(values, travelling)

    def _views(self, flat: Tensor, start: int, end: int, message: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the elements, and of the same numbers in the message."""
        parts = self._split(start, end)
        lengths = [[last - first for first, last in part] for part in parts]
        wide, narrow = message.split([_WIDE_BYTES * sum(lengths[0]), self.dtype.itemsize * sum(lengths[1])])
        values = [flat[first:last] for part in parts for first, last in part]
        return values, [*wide.view(torch.float32).split(lengths[0]), *narrow.view(self.dtype).split(lengths[1])]

    def _split(self, start: int, end: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the ranges of ``[start, end)`` that travel whole, and those that travel rounded."""
        whole, rounded, position = [], [], start
        for first, last in self.ranges:
            first, last = max(first, start), min(last, end)
            if first < last:
                if position < first:
                    whole.append((position, first))
                rounded.append((first, last))
                position = last
        if position < end:
            whole.append((position, end))
        return whole, rounded
