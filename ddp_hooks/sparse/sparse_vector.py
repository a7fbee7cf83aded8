"""Sparse vectors: their sums and their largest entries, the same on every rank that computes them.

Every operation is deterministic: sums are formed in the order of the arguments; of entries of equal magnitude the one
with the lowest index is the larger; NaN is the largest magnitude, so that it is not overlooked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_hooks.sparse.primitives import kth_largest, positions_of, stable_order


@dataclass(frozen=True)
class SparseVector:
    """Some entries of a vector; the others are zero."""

    indices: Tensor  # (k,), int64, ascending, each at most once
    values: Tensor  # (k,)

    def __len__(self) -> int:
        return self.indices.numel()

    def at(self, positions: Tensor | slice) -> SparseVector:
        """Return the entries at some positions, or where a mask is set, in the order given."""
        if isinstance(positions, slice):
            return SparseVector(self.indices[positions], self.values[positions])
        if positions.dtype == torch.bool:
            positions = positions_of(positions)
        return SparseVector(self.indices.index_select(0, positions), self.values.index_select(0, positions))

    def sample(self, places: Tensor) -> SparseVector:
        """Return the entries at ``places`` of the vector, (n,) ascending, as a vector of these places."""
        if not len(self):
            return self
        found = torch.searchsorted(self.indices, places).clamp_(max=len(self) - 1)
        there = positions_of(self.indices.index_select(0, found) == places)
        return SparseVector(there, self.values.index_select(0, found.index_select(0, there)))

    def shifted(self, offset: int) -> SparseVector:
        """Return the same entries of a vector in which this one begins at ``offset``."""
        return SparseVector(self.indices + offset, self.values)


def empty_like(values: Tensor) -> SparseVector:
    """Return a vector without entries, in the type and on the device of ``values``."""
    return SparseVector(torch.empty(0, dtype=torch.int64, device=values.device), values.new_empty(0))


def concatenated(vectors: Sequence[SparseVector]) -> SparseVector:
    """Join the entries of vectors; a sparse vector if their ranges follow each other."""
    return SparseVector(torch.cat([v.indices for v in vectors]), torch.cat([v.values for v in vectors]))


def add(first: SparseVector, second: SparseVector) -> SparseVector:
    """Return the sum; entries that cancel stay, as zeros."""
    both = concatenated([first, second])
    both = both.at(stable_order(both.indices))
    if not len(both):
        return both
    is_new = torch.ones_like(both.indices, dtype=torch.bool)
    torch.ne(both.indices[1:], both.indices[:-1], out=is_new[1:])
    repeated = positions_of(~is_new)  # each follows the entry that it belongs to
    sums = both.values.clone()
    sums.index_add_(0, repeated - 1, both.values.index_select(0, repeated))
    return SparseVector(both.indices, sums).at(is_new)


def total(vectors: Sequence[SparseVector]) -> SparseVector:
    return functools.reduce(add, vectors)


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """Return a mask of the ``k`` largest of non-negative numbers, (n,) bool."""
    numel = magnitudes.numel()
    if not 0 < k < numel:
        return torch.full((numel,), k > 0, dtype=torch.bool, device=magnitudes.device)
    boundary = kth_largest(magnitudes, k)
    is_nan = math.isnan(boundary)
    mask = torch.zeros_like(magnitudes, dtype=torch.bool) if is_nan else ~(magnitudes <= boundary)
    ties = positions_of(magnitudes.isnan() if is_nan else magnitudes == boundary)
    return mask.index_fill_(0, ties[: k - int(mask.count_nonzero())], True)


def split_largest(vector: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Return the ``k`` largest entries by magnitude, and the others."""
    mask = largest(vector.values.abs(), k)
    return vector.at(mask), vector.at(~mask)
