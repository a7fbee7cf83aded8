"""Sparse vectors: sums of them, and their largest entries, the same on every rank that computes them.

Every operation is deterministic: sums are formed in the order of the arguments, and of entries of equal magnitude the
one with the lowest index is the larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_hooks.topk.primitives import first_of, kth_largest, positions_of, stable_order


@dataclass(frozen=True)
class SparseVector:
    """Some entries of a vector; the others are zero.

    Args:
        indices: (k,), int64, ascending, each at most once.
        values: (k,).
    """

    indices: Tensor
    values: Tensor

    def __len__(self) -> int:
        return self.indices.numel()

    def at(self, positions: Tensor | slice) -> SparseVector:
        """The entries at some positions (or where a mask is set), in the order given."""
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
        """The same entries of a vector in which this one begins at ``offset``."""
        return SparseVector(self.indices + offset, self.values)


def empty_like(values: Tensor) -> SparseVector:
    """No entries, in the type and on the device of ``values``."""
    return SparseVector(torch.empty(0, dtype=torch.int64, device=values.device), values.new_empty(0))


def concatenated(vectors: Sequence[SparseVector]) -> SparseVector:
    """The entries of several vectors, one after the other: a sparse vector, if their ranges follow each other."""
    return SparseVector(torch.cat([v.indices for v in vectors]), torch.cat([v.values for v in vectors]))


def add(first: SparseVector, second: SparseVector) -> SparseVector:
    """The sum; entries that cancel stay, as zeros."""
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
    """The sum of several vectors, formed from left to right."""
    result = vectors[0]
    for vector in vectors[1:]:
        result = add(result, vector)
    return result


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """A mask of the ``k`` largest of non-negative numbers, (n,) bool; ties go to the lowest position.

    What is not a number counts as the largest, so that it is not overlooked.
    """
    numel = magnitudes.numel()
    if k >= numel:
        return torch.ones(numel, dtype=torch.bool, device=magnitudes.device)
    if k <= 0:
        return torch.zeros(numel, dtype=torch.bool, device=magnitudes.device)
    boundary = kth_largest(magnitudes, k)
    if math.isnan(boundary):
        return first_of(magnitudes.isnan(), k)
    mask = ~(magnitudes < boundary)
    return mask if int(mask.count_nonzero()) == k else above_and_ties(magnitudes, boundary, k)


def above_and_ties(magnitudes: Tensor, threshold: float, k: int) -> Tensor:
    """A mask of what is above a threshold, or no number; if that is less than ``k``, with the first that equal it."""
    mask = ~(magnitudes <= threshold)
    missing = k - int(mask.count_nonzero())
    if missing > 0:
        mask |= first_of(magnitudes == threshold, missing)
    return mask


def split_largest(vector: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """The ``k`` largest entries by magnitude, and the others."""
    mask = largest(vector.values.abs(), k)
    return vector.at(mask), vector.at(~mask)
