"""The pass over a long vector: add the gradient to it, and find what is large, while it is in the cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

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
    pieces: Iterable[tuple[int, Tensor | None]] = gradient.placed() if gradient is not None else [(0, None)]
    chunks = (chunk for start, piece in pieces for chunk in _in_chunks(values, threshold, start, piece, received))
    found = [chunk for chunk in chunks if len(chunk[0])]
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
    values: Tensor, threshold: float, start: int, gradient: Tensor | None, received: Sequence[SparseVector]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positions and values of what is found from ``start`` on, as far as ``gradient`` goes."""
    array = values.numpy()
    added = gradient.numpy() if gradient is not None and numpy_knows(gradient) else None
    end = len(array) if gradient is None else start + gradient.numel()
    edges = [*range(start, end, _CHUNK), end]
    arriving = [_Arriving(vector, edges) for vector in received]
    magnitudes, is_large, sums = np.empty(_CHUNK, array.dtype), np.empty(_CHUNK, bool), np.empty(_CHUNK, array.dtype)
    for number, (first, last) in enumerate(itertools.pairwise(edges)):
        part = array[first:last]
        if added is not None:
            np.add(part, added[first - start : last - start], out=part)
        elif gradient is not None:
            values[first:last] += gradient[first - start : last - start]
        mask = is_large[: last - first]
        if arriving:
            np.copyto(sums[: last - first], part)
            part = sums[: last - first]
            for vector in arriving:
                vector.add_to(part, number)
            np.less(np.abs(part, out=magnitudes[: last - first]), threshold, out=mask)
            np.logical_not(mask, out=mask)  # what is not a number is not less
        else:
            np.greater_equal(np.abs(part, out=magnitudes[: last - first]), threshold, out=mask)
        positions = mask.nonzero()[0]
        kept = part[positions]
        positions += first
        yield positions, kept


class _Arriving:
    """What was received, cut into chunks.

    Args:
        vector: of the whole.
        edges: where chunks begin and end.
    """

    def __init__(self, vector: SparseVector, edges: Sequence[int]) -> None:
        self._indices, self._values, self._edges = vector.indices.numpy(), vector.values.numpy(), edges
        self._cuts = np.searchsorted(self._indices, edges)

    def add_to(self, part: np.ndarray, number: int) -> None:
        """Add what belongs to a chunk to it."""
        cut = slice(self._cuts[number], self._cuts[number + 1])
        with np.errstate(invalid="ignore"):  # an overflow that another worker has sent; the ledger tells of it
            part[self._indices[cut] - self._edges[number]] += self._values[cut]
