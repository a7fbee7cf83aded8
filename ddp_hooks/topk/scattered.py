"""A gradient that lies in several of DDP's buckets, brought in by the pass that selects, as if it lay in one place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scattered:
    """A vector in parts.

    Args:
        parts: (n_i,) each, one after the other.
    """

    parts: tuple[Tensor, ...]

    def cut(self, start: int, end: int) -> Scattered:
        """The elements from ``start`` to ``end``, views."""
        found = []
        for offset, part in self.placed():
            first, last = max(start - offset, 0), min(end - offset, part.numel())
            if first < last:
                found.append(part[first:last])
        return Scattered(tuple(found))

    def sample(self, stride: int) -> Tensor:
        """Every ``stride``-th element, the first one included."""
        samples = [part[-offset % stride :: stride] for offset, part in self.placed()]
        return samples[0] if len(samples) == 1 else torch.cat(samples)

    def add_to(self, vector: Tensor) -> None:
        """Add all of it to (n,), in place."""
        for offset, part in self.placed():
            vector[offset : offset + part.numel()] += part

    def placed(self) -> Iterator[tuple[int, Tensor]]:
        """Where each part begins, and the part."""
        offsets = itertools.accumulate((part.numel() for part in self.parts), initial=0)
        return zip(offsets, self.parts, strict=False)
