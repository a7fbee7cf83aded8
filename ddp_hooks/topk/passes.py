"""The pass over a long vector: add the gradient to it, and find what is large, while it is in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.topk.primitives import numpy_knows
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.sparse import SparseVector

_CHUNK = 1 << 17  # elements that are handled at a time: they stay in the cache


def reaching(
    values: Tensor, threshold: float, gradient: Scattered | None = None, received: Sequence[SparseVector] = ()
) -> SparseVector:
    """What reaches a threshold by magnitude, or is not a number.

    Args:
        values: (n,); becomes the sum with ``gradient``, in place.
        threshold: a magnitude.
        gradient: (n,), or None.
        received: of (n,), added to what is looked at and returned, in this order, but not to ``values``.
    """
    if not numpy_knows(values):
        if gradient is not None:
            gradient.add_to(values)
        sums = with_added(values, received)
        positions = torch.nonzero(~(sums.abs() < threshold)).squeeze(1)
        return SparseVector(positions, sums.index_select(0, positions))
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found, and the ledger tells all ranks
        found = [chunk for chunk in _in_chunks(values, threshold, gradient, received) if len(chunk[0])]
    if not found:  # an empty array has strides that torch does not like
        return SparseVector(torch.empty(0, dtype=torch.int64), values.new_empty(0))
    positions, kept = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*found, strict=True))
    return SparseVector(positions, kept)


def with_added(values: Tensor, received: Sequence[SparseVector]) -> Tensor:
    """(n,) and what was received, in this order; ``values`` itself if that is nothing."""
    sums = values.clone() if received else values
    for vector in received:
        sums.index_add_(0, vector.indices, vector.values)
    return sums


def _in_chunks(
    values: Tensor, threshold: float, gradient: Scattered | None, received: Sequence[SparseVector]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions and values of what is found, chunk by chunk."""
    array, chunks = values.numpy(), list(_chunks(values.numel(), gradient))
    arriving = [_Arriving(vector, [*(chunk.first for chunk in chunks), len(array)]) for vector in received]
    room = min(_CHUNK, len(array))
    magnitudes, is_found = np.empty(room, array.dtype), np.empty(room, bool)
    sums = np.empty(room if arriving else 0, array.dtype)
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
        mask = np.less(np.abs(part, out=magnitudes[: len(part)]), threshold, out=is_found[: len(part)])
        positions = np.logical_not(mask, out=mask).nonzero()[0]  # what is not a number is not less
        kept = part[positions]
        positions += first
        yield positions, kept


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
