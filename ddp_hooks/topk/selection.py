"""Finding the largest entries of a vector without sorting it.

A sample gives a threshold that a little more than k entries exceed. One pass adds the gradient to the residual and
compares with the threshold; the few entries that exceed it form a *shortlist*, of which the k largest are picked
exactly. The result is that of an exact selection, ties going to the lowest index; only the work depends on the sample.
What other workers have sent is added on the list: the long vector is not written again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.topk.primitives import kth_largest, positions_of, reaching, stable_order
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.sparse import SparseVector, concatenated, largest

_SAMPLE = 1 << 13  # elements per block


def exact_top_k(values: Tensor, k: int) -> Tensor:
    """Positions of the ``k`` entries of largest magnitude, ascending; of equals, the first ones."""
    return positions_of(largest(values.abs(), k))


class BlockSelector:
    """The largest entries of the blocks of a working vector; see :class:`~ddp_hooks.topk.exchange.Selector`.

    Args:
        work: (n,), the working vector; :meth:`add` has it formed, nothing else changes it.
        bounds: where blocks begin and end.
        counts: entries to select of every block.
    """

    def __init__(self, work: Tensor, bounds: Sequence[int], counts: Sequence[int]) -> None:
        self._work = work
        self._bounds = bounds
        self._counts = counts
        self._shortlists: list[_Shortlist | None] = [None] * len(counts)

    def add(self, gradient: Scattered) -> None:
        """Add (n,) to the working vector, and make every block's shortlist in the same pass."""
        for block in range(len(self._counts)):
            start, end = self._bounds[block], self._bounds[block + 1]
            part = gradient.cut(start, end) if end > start else None
            self._shortlists[block] = _Shortlist.of(self._work[start:end], self._counts[block], part)

    def receive(self, block: int, vector: SparseVector) -> None:
        """Add entries to the block, without changing the working vector."""
        self._shortlist(block).receive(vector.shifted(-self._bounds[block]))

    def select(self, block: int) -> SparseVector:
        """The largest entries of the block and what it has received, with their indices in the working vector."""
        return self._shortlist(block).select().shifted(self._bounds[block])

    def _shortlist(self, block: int) -> _Shortlist:
        present = self._shortlists[block]
        if present is None:
            values = self._work[self._bounds[block] : self._bounds[block + 1]]
            present = self._shortlists[block] = _Shortlist.of(values, self._counts[block])
        return present


class _Shortlist:
    """Everything of a block that may be among its k largest entries, and everything that it has received.

    Args:
        values: (n,), of the block; what is not on the list is of less than the threshold.
        k: entries to select.
        threshold: above 0.
        entries: positions in the block, and what is there by now.
    """

    def __init__(self, values: Tensor, k: int, threshold: float, entries: SparseVector) -> None:
        self._values = values
        self._k = k
        self._threshold = threshold
        self._entries = entries
        self._received: list[SparseVector] = []

    @staticmethod
    def of(values: Tensor, k: int, gradient: Scattered | None = None) -> _Shortlist:
        """Add ``gradient``, if there is one, to ``values``, in place, and list what is large enough."""
        threshold = _sampled_threshold(values, gradient, k)
        found = reaching(values, threshold) if gradient is None else gradient.add_and_find(values, threshold)
        return _Shortlist(values, k, threshold, SparseVector(*found))

    def receive(self, vector: SparseVector) -> None:
        """Add to some entries."""
        self._received.append(vector)

    def select(self) -> SparseVector:
        """The ``k`` largest of the block, exactly."""
        entries = self._entries_by_now()
        chosen = self._pick(entries)
        if chosen is not None:
            return chosen
        values = self._values
        if self._received:  # which has taken entries off the list
            values = values.index_copy(0, entries.indices, entries.values)
            anew = _Shortlist.of(values, self._k)
            chosen = anew._pick(anew._entries)
            if chosen is not None:
                return chosen
        positions = exact_top_k(values, self._k)
        return SparseVector(positions, values.index_select(0, positions))

    def _entries_by_now(self) -> SparseVector:
        """The list, and what was received, each entry as the sum in the order of arrival."""
        if not self._received:
            return self._entries
        every = concatenated([self._entries, *self._received])
        order = stable_order(every.indices)
        every = every.at(order)
        begins = torch.ones_like(every.indices, dtype=torch.bool)
        torch.ne(every.indices[1:], every.indices[:-1], out=begins[1:])
        places = positions_of(begins)
        indices, sums = every.indices.index_select(0, places), every.values.index_select(0, places)
        unlisted = positions_of(order.index_select(0, places) >= len(self._entries))
        sums.index_add_(0, unlisted, self._values.index_select(0, indices.index_select(0, unlisted)))
        repeated = positions_of(~begins)
        sums.index_add_(0, begins.cumsum(0).index_select(0, repeated) - 1, every.values.index_select(0, repeated))
        return SparseVector(indices, sums)

    def _pick(self, entries: SparseVector) -> SparseVector | None:
        """The largest of some; None if others may be among them."""
        numel = self._values.numel()
        if len(entries) < min(self._k, numel):
            return None
        chosen = entries.at(largest(entries.values.abs(), self._k))
        if self._k and self._k < numel and chosen.values.abs().min() < self._threshold:
            return None
        return chosen


def _stride(numel: int) -> int:
    """Between two elements of the sample: not a multiple of 2, 3, 5 or 7, as rows of weights are, so that the sample
    goes through all columns: whole columns of a gradient are large or small together."""
    stride = max(1, numel // _SAMPLE)
    while math.gcd(stride, 2 * 3 * 5 * 7) > 1:
        stride -= 1
    return stride


def _sampled_threshold(values: Tensor, gradient: Scattered | None, k: int) -> float:
    """A magnitude above 0 that a little more than ``k`` of the sums should reach.

    Where that would be 0, the smallest normal number: of a vector that is mostly zeros, only what is not is listed.
    """
    numel, smallest = values.numel(), torch.finfo(values.dtype).smallest_normal
    if k == 0 or k >= numel:
        return math.inf
    stride = _stride(numel)
    sample = values[::stride].clone()
    if gradient is not None:
        sample += gradient.sample(stride)
    expected = k / stride
    wanted = round(expected + 3 * math.sqrt(expected)) + 2  # so that one sample in a thousand gives too few
    if wanted >= sample.numel():
        return smallest
    return max(kth_largest(sample.abs_(), wanted), smallest)
