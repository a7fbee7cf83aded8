"""The pass over a long vector: add the gradient to it, and find what is large, while it is in the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.topk.primitives import kth_largest, numpy_knows, positions_of
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.sparse import SparseVector, above_and_ties, empty_like, largest

_CHUNK = 1 << 17  # elements that are handled at a time: they stay in the cache
_SLACK = 1 << 16  # entries that a list may have beyond three times as many as are wanted, before it is shortened


def reaching(
    values: Tensor,
    threshold: float,
    most: int,
    gradient: Scattered | None = None,
    received: Sequence[SparseVector] = (),
) -> SparseVector:
    """The largest of what reaches a threshold by magnitude, or is not a number; of equals, the first ones.

    Args:
        values: (n,); becomes the sum with ``gradient``, in place.
        threshold: a magnitude, 0 for everything.
        most: entries that are returned; all that there are if they are fewer.
        gradient: (n,), or None.
        received: of (n,), added to what is looked at and returned, in this order, but not to ``values``.
    """
    if not numpy_knows(values):
        if gradient is not None:
            gradient.add_to(values)
        return _at_once(_with_added(values, received), threshold, most)
    shortlist = _Shortlist(threshold, most, min(_CHUNK, values.numel()), values.numpy().dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found, and the ledger tells all ranks
        for first, part in _in_chunks(values, gradient, received):
            shortlist.look_at(first, part)
    return shortlist.largest() if len(shortlist) else empty_like(values)


class _Shortlist:
    """The largest entries of what has been looked at from left to right, and a few others.

    As soon as there are as many as are wanted, what equals the threshold comes too late, so that a list stays short
    where many are equal. Where the threshold is too low, the list is shortened now and then, which raises it.

    Args:
        threshold: a magnitude that entries reach.
        most: entries that are wanted.
        room: elements that are looked at together, at most.
        dtype: of the values.
    """

    def __init__(self, threshold: float, most: int, room: int, dtype: np.dtype) -> None:
        self._threshold = threshold
        self._most = most
        self._magnitudes, self._mask = np.empty(room, dtype), np.empty(room, bool)
        self._positions: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self._numel = 0

    def __len__(self) -> int:
        return self._numel

    def look_at(self, first: int, part: np.ndarray) -> None:
        """Go on with (m,), which begins at ``first``."""
        if math.isnan(self._threshold):  # all on the list are that, and none is larger
            return
        positions = self._found(np.abs(part, out=self._magnitudes[: len(part)]))
        if len(positions):
            values = part[positions]
            positions += first
            self._append(positions, values)
        if self._numel > 3 * self._most + _SLACK:
            self._shorten()

    def largest(self) -> SparseVector:
        """As many as are wanted, or all; there is at least one on the list."""
        positions, values = (torch.from_numpy(np.concatenate(parts)) for parts in (self._positions, self._values))
        listed, magnitudes = SparseVector(positions, values), values.abs()
        if len(listed) <= self._most:
            return listed
        if len(listed) - int((magnitudes <= self._threshold).count_nonzero()) < self._most:
            return listed.at(above_and_ties(magnitudes, self._threshold, self._most))
        return listed.at(largest(magnitudes, self._most))

    def _found(self, magnitudes: np.ndarray) -> np.ndarray:
        """Where magnitudes are large enough, or no numbers."""
        missing = self._most - self._numel
        if missing <= 0:
            return self._not(np.less_equal, magnitudes).nonzero()[0]
        mask = self._not(np.less, magnitudes)
        if missing >= len(mask) or np.count_nonzero(mask) <= missing:
            return mask.nonzero()[0]
        end = missing
        while np.count_nonzero(mask[:end]) < missing:
            end *= 2
        in_time = mask[:end].nonzero()[0][:missing]
        start = int(in_time[-1]) + 1
        late = self._not(np.less_equal, magnitudes[start:]).nonzero()[0]
        late += start
        return np.concatenate([in_time, late])

    def _not(self, compare: np.ufunc, magnitudes: np.ndarray) -> np.ndarray:
        """Where a comparison with the threshold fails: so it does for what is not a number."""
        mask = self._mask[: len(magnitudes)]
        compare(magnitudes, self._threshold, out=mask)
        return np.logical_not(mask, out=mask)

    def _append(self, positions: np.ndarray, values: np.ndarray) -> None:
        self._positions.append(positions)
        self._values.append(values)
        self._numel += len(positions)

    def _shorten(self) -> None:
        entries = self.largest()
        self._threshold = kth_largest(entries.values.abs(), self._most) if self._most else math.nan
        self._positions, self._values, self._numel = [], [], 0
        self._append(entries.indices.numpy(), entries.values.numpy())


def _at_once(sums: Tensor, threshold: float, most: int) -> SparseVector:
    """As :class:`_Shortlist` does it, with operations on all of (n,)."""
    magnitudes, longest = sums.abs(), 3 * most + _SLACK
    mask = ~(magnitudes < threshold)
    if int(mask.count_nonzero()) > longest:
        mask = above_and_ties(magnitudes, threshold, most)
        if int(mask.count_nonzero()) > longest:
            mask = largest(magnitudes, most)
    positions = positions_of(mask)
    listed = SparseVector(positions, sums.index_select(0, positions))
    return listed if len(listed) <= most else listed.at(largest(listed.values.abs(), most))


def _with_added(values: Tensor, received: Sequence[SparseVector]) -> Tensor:
    """(n,) and what was received, in this order; ``values`` itself if that is nothing."""
    sums = values.clone() if received else values
    for vector in received:
        sums.index_add_(0, vector.indices, vector.values)
    return sums


def _in_chunks(
    values: Tensor, gradient: Scattered | None, received: Sequence[SparseVector]
) -> Iterator[tuple[int, np.ndarray]]:
    """Where chunks begin, and what is to be looked at of them, until the next one is asked for."""
    array, chunks = values.numpy(), list(_chunks(values.numel(), gradient))
    arriving = [_Arriving(vector, [*(chunk.first for chunk in chunks), len(array)]) for vector in received]
    sums = np.empty(min(_CHUNK, len(array)) if arriving else 0, array.dtype)
    for number, (first, last, added) in enumerate(chunks):
        part = array[first:last]
        if added is not None and numpy_knows(added):
            np.add(part, added.numpy(), out=part)
        elif added is not None:
            values[first:last] += added
        if arriving:
            np.copyto(sums[: len(part)], part)
            part = sums[: len(part)]
            for vector in arriving:
                vector.add_to(part, number)
        yield first, part


class _Chunk(NamedTuple):
    """A range of the vector, and what belongs to it of one part of the gradient."""

    first: int
    last: int
    gradient: Tensor | None


def _chunks(numel: int, gradient: Scattered | None) -> Iterator[_Chunk]:
    """All of the vector, in order."""
    for start, part in gradient.placed() if gradient is not None else [(0, None)]:
        end = numel if part is None else start + part.numel()
        for first in range(start, end, _CHUNK):
            last = min(first + _CHUNK, end)
            yield _Chunk(first, last, None if part is None else part[first - start : last - start])


class _Arriving:
    """What was received, cut into chunks.

    Args:
        vector: of the whole.
        edges: where chunks begin, and the last one ends.
    """

    def __init__(self, vector: SparseVector, edges: Sequence[int]) -> None:
        self._indices, self._values, self._edges = vector.indices.numpy(), vector.values.numpy(), edges
        self._cuts = np.searchsorted(self._indices, edges)

    def add_to(self, part: np.ndarray, number: int) -> None:
        """Add what belongs to a chunk to it."""
        cut = slice(self._cuts[number], self._cuts[number + 1])
        part[self._indices[cut] - self._edges[number]] += self._values[cut]
