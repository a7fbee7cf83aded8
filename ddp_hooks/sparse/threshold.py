"""Pass over a long vector: add the gradient to it, and list its large entries, while it is in the cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.sparse.primitives import numpy_knows, positions_of
from ddp_hooks.sparse.sparse_vector import SparseVector, empty_like, largest

_CHUNK = 1 << 17  # elements that are handled at a time: they stay in the cache
_SLACK = 1 << 16  # entries that a list may have beyond three times as many as are wanted, before it is shortened


@dataclass(frozen=True)
class ChunkedGradient:
    """A gradient in several of DDP's buckets, read as if it lay in one place."""

    parts: tuple[Tensor, ...]  # (n_i,) each, one after the other

    def cut(self, start: int, end: int) -> ChunkedGradient:
        """Return the elements from ``start`` to ``end``, views."""
        found = []
        for offset, part in self.placed():
            first, last = max(start - offset, 0), min(end - offset, part.numel())
            if first < last:
                found.append(part[first:last])
        return ChunkedGradient(tuple(found))

    def sample(self, places: Tensor) -> Tensor:
        """Return the elements at ``places``, (n,) ascending."""
        if len(self.parts) == 1:
            return self.parts[0].index_select(0, places)
        offsets, parts = zip(*self.placed(), strict=True)
        cuts = torch.searchsorted(places, torch.tensor(offsets[1:], device=places.device)).tolist()
        found = places.tensor_split(cuts)
        return torch.cat([p.index_select(0, f - o) for o, p, f in zip(offsets, parts, found, strict=True)])

    def add_to(self, vector: Tensor) -> None:
        for offset, part in self.placed():
            vector[offset : offset + part.numel()] += part

    def placed(self) -> Iterator[tuple[int, Tensor]]:
        offsets = itertools.accumulate((part.numel() for part in self.parts), initial=0)
        return zip(offsets, self.parts, strict=False)


def add_and_threshold(
    values: Tensor,
    threshold: float,
    most: int,
    gradient: ChunkedGradient | None = None,
    received: Sequence[SparseVector] = (),
) -> SparseVector:
    """Return the ``most`` largest entries that reach a threshold by magnitude, or are NaN; of equals, the first ones.

    Adds ``gradient``, (n,), to ``values``, (n,), in place. ``received`` is added, in this order, only to what is
    compared and returned.
    """
    if not numpy_knows(values):
        if gradient is not None:
            gradient.add_to(values)
        sums = values.clone() if received else values
        for vector in received:
            sums.index_add_(0, vector.indices, vector.values)
        positions = positions_of(~(sums.abs() < threshold))
        return _largest_of(SparseVector(positions, sums.index_select(0, positions)), most)
    shortlist = _Shortlist(threshold, most, min(_CHUNK, values.numel()), values.numpy().dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # error feedback finds infinities and NaN, on all ranks
        for first, part in _in_chunks(values, gradient, received):
            shortlist.extend(first, part)
    return shortlist.largest() if shortlist.numel else empty_like(values)


class _Shortlist:
    """Largest entries of the chunks seen so far, from left to right, and a few others.

    Where the threshold is too low, or many entries equal it, the list is shortened to ``most`` entries now and then.
    From then on only larger magnitudes than the smallest of the list are taken: of equals the first ones count.
    """

    def __init__(self, threshold: float, most: int, room: int, dtype: np.dtype) -> None:
        self._threshold = threshold
        self._is_too_small: np.ufunc = np.less
        self._most = most
        self._magnitudes, self._mask = np.empty(room, dtype), np.empty(room, bool)  # of the longest chunk
        self._positions: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self.numel = 0

    def extend(self, first: int, part: np.ndarray) -> None:
        """List the large entries of the next chunk, (m,), which begins at ``first``."""
        if math.isnan(self._threshold):  # all entries of the list are NaN, and none is larger
            return
        mask, magnitudes = self._mask[: len(part)], self._magnitudes[: len(part)]
        self._is_too_small(np.abs(part, out=magnitudes), self._threshold, out=mask)
        positions = np.logical_not(mask, out=mask).nonzero()[0]  # NaN is never too small
        if len(positions):
            self._append(positions + first, part[positions])
        if self.numel > 3 * self._most + _SLACK:
            self._shorten()

    def largest(self) -> SparseVector:
        """Return the ``most`` largest entries; the list has at least one."""
        positions, values = (torch.from_numpy(np.concatenate(parts)) for parts in (self._positions, self._values))
        return _largest_of(SparseVector(positions, values), self._most)

    def _append(self, positions: np.ndarray, values: np.ndarray) -> None:
        self._positions.append(positions)
        self._values.append(values)
        self.numel += len(positions)

    def _shorten(self) -> None:
        entries = self.largest()
        self._threshold = float(entries.values.abs().min()) if self._most else math.nan
        self._is_too_small = np.less_equal
        self._positions, self._values, self.numel = [], [], 0
        self._append(entries.indices.numpy(), entries.values.numpy())


def _largest_of(listed: SparseVector, most: int) -> SparseVector:
    return listed if len(listed) <= most else listed.at(largest(listed.values.abs(), most))


def _in_chunks(
    values: Tensor, gradient: ChunkedGradient | None, received: Sequence[SparseVector]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the offset of each chunk and its sums, valid until the next chunk; adds the gradient to ``values``."""
    array = values.numpy()
    arriving = [(vector.indices.numpy(), vector.values.numpy()) for vector in received]
    sums = np.empty(min(_CHUNK, len(array)) if arriving else 0, array.dtype)
    for first, last, added in _chunks(len(array), gradient):
        part = array[first:last]
        if added is not None and numpy_knows(added):
            np.add(part, added.numpy(), out=part)
        elif added is not None:
            values[first:last] += added
        if arriving:
            np.copyto(sums[: len(part)], part)
            part = sums[: len(part)]
            for indices, entries in arriving:
                cut = slice(*np.searchsorted(indices, (first, last)))
                part[indices[cut] - first] += entries[cut]
        yield first, part


def _chunks(numel: int, gradient: ChunkedGradient | None) -> Iterator[tuple[int, int, Tensor | None]]:
    """Cut all of the vector, in order, into ranges that lie in one part of the gradient; yields this part's range."""
    for start, part in gradient.placed() if gradient is not None else [(0, None)]:
        end = numel if part is None else start + part.numel()
        for first in range(start, end, _CHUNK):
            last = min(first + _CHUNK, end)
            yield first, last, None if part is None else part[first - start : last - start]
