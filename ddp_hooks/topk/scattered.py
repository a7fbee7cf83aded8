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

    def sample(self, places: Tensor) -> Tensor:
        """Return the elements at ``places``, (n,) ascending."""
        if len(self.parts) == 1:
            return self.parts[0].index_select(0, places)
        offsets, parts = zip(*self.placed(), strict=True)
        cuts = torch.searchsorted(places, torch.tensor(offsets[1:], device=places.device)).tolist()
        found = places.tensor_split(cuts)
        return torch.cat([p.index_select(0, f - o) for o, p, f in zip(offsets, parts, found, strict=True)])

    def add_to(self, vector: Tensor) -> None:
        """Add all of it to (n,), in place."""
        for offset, part in self.placed():
            vector[offset : offset + part.numel()] += part

    def placed(self) -> Iterator[tuple[int, Tensor]]:
        """Where each part begins, and the part."""
        offsets = itertools.accumulate((part.numel() for part in self.parts), initial=0)
        return zip(offsets, self.parts, strict=False)
