"""A gradient that lies in several of DDP's buckets, brought in by the pass that selects, as if it lay in one place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_hooks.topk.primitives import reaching


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
        for offset, part in self._placed():
            first, last = max(start - offset, 0), min(end - offset, part.numel())
            if first < last:
                found.append(part[first:last])
        return Scattered(tuple(found))

    def sample(self, stride: int) -> Tensor:
        """Every ``stride``-th element, the first one included."""
        samples = [part[-offset % stride :: stride] for offset, part in self._placed()]
        return samples[0] if len(samples) == 1 else torch.cat(samples)

    def add_to(self, vector: Tensor) -> None:
        """Add all of it to (n,), in place."""
        for offset, part in self._placed():
            vector[offset : offset + part.numel()] += part

    def add_and_find(self, values: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
        """Add all of it to (n,), in place, and find what reaches ``threshold``, in one pass; see :func:`reaching`."""
        found = []
        for offset, part in self._placed():
            positions, kept = reaching(values[offset : offset + part.numel()], threshold, part)
            found.append((positions + offset if offset else positions, kept))
        if len(found) == 1:
            return found[0]
        all_positions, all_kept = zip(*found, strict=True)
        return torch.cat(all_positions), torch.cat(all_kept)

    def _placed(self) -> Iterator[tuple[int, Tensor]]:
        offsets = itertools.accumulate((part.numel() for part in self.parts), initial=0)
        return zip(offsets, self.parts, strict=False)
