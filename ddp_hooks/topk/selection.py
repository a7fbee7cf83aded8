"""Finding the largest entries of a vector without sorting it.

A sample gives a threshold that a little more than k entries exceed. One pass adds the gradient to the residual and
compares with the threshold; the few entries that exceed it form a *shortlist*, of which the k largest are picked
exactly. The result is that of an exact selection, ties going to the lowest index; only the work depends on the sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.topk.primitives import is_in, kth_largest, positions_of, reaching, stable_order
from ddp_hooks.topk.sparse import SparseVector, concatenated, largest

_SAMPLE = 1 << 15  # elements per block


def exact_top_k(values: Tensor, k: int) -> Tensor:
    """Positions of the ``k`` entries of largest magnitude, ascending; of equals, the first ones."""
    return positions_of(largest(values.abs(), k))


class BlockSelector:
    """The largest entries of the blocks of a working vector; see :class:`~ddp_hooks.topk.exchange.Selector`.

    Args:
        work: (n,), the working vector; :meth:`add` has it formed.
        bounds: where blocks begin and end.
        counts: entries to select of every block.
    """

    def __init__(self, work: Tensor, bounds: Sequence[int], counts: Sequence[int]) -> None:
        self._work = work
        self._bounds = bounds
        self._counts = counts
        self._shortlists: list[_Shortlist | None] = [None] * len(counts)

    def add(self, gradient: Tensor) -> None:
        """Add (n,) to the working vector, and make every block's shortlist in the same pass."""
        for block, k in enumerate(self._counts):
            part = slice(self._bounds[block], self._bounds[block + 1])
            self._shortlists[block] = _shortlist(self._work[part], gradient[part], k)

    def received(self, block: int, indices: Tensor) -> None:
        """These entries of the block have changed."""
        shortlist = self._shortlists[block]
        if shortlist is not None:
            shortlist.change(indices - self._bounds[block])

    def select(self, block: int) -> SparseVector:
        """The block's largest entries, with their indices in the working vector."""
        start, end, k = self._bounds[block], self._bounds[block + 1], self._counts[block]
        values, shortlist = self._work[start:end], self._shortlists[block]
        chosen = shortlist.pick(values, k) if shortlist is not None else None
        if chosen is None:  # no shortlist, or one that has become too short
            chosen = _shortlist(values, None, k).pick(values, k)
        if chosen is None:
            positions = exact_top_k(values, k)
            chosen = SparseVector(positions, values.index_select(0, positions))
        return chosen.shifted(start)


class _Shortlist:
    """Everything of a block that is of at least a threshold, and perhaps more: positions and values.

    Args:
        threshold: above 0.
        entries: what reached it when the list was made.
    """

    def __init__(self, threshold: float, entries: SparseVector) -> None:
        self._threshold = threshold
        self._entries = entries
        self._changed: Tensor | None = None  # positions, ascending, that have other values by now

    def change(self, positions: Tensor) -> None:
        """These, ascending, have other values now."""
        earlier = self._changed
        if earlier is not None:
            positions = torch.cat([earlier, positions[~is_in(positions, earlier)]])
            positions = positions.index_select(0, stable_order(positions))
        self._changed = positions

    def pick(self, values: Tensor, k: int) -> SparseVector | None:
        """The ``k`` largest of the block, exactly; None if they cannot all be on the list."""
        entries = self._entries
        if self._changed is not None:
            unchanged = entries.at(~is_in(entries.indices, self._changed))
            entries = concatenated([unchanged, SparseVector(self._changed, values.index_select(0, self._changed))])
            entries = entries.at(stable_order(entries.indices))
        if len(entries) < min(k, values.numel()):
            return None
        chosen = entries.at(largest(entries.values.abs(), k))
        if k and k < values.numel() and chosen.values.abs().min() < self._threshold:
            return None
        return chosen


def _shortlist(values: Tensor, gradient: Tensor | None, k: int) -> _Shortlist:
    """Add ``gradient``, if there is one, to ``values``, and list what may be among the ``k`` largest."""
    threshold = _sampled_threshold(values, gradient, k)
    return _Shortlist(threshold, SparseVector(*reaching(values, threshold, gradient)))


def _sampled_threshold(values: Tensor, gradient: Tensor | None, k: int) -> float:
    """A magnitude above 0 that a little more than ``k`` of the sums should reach.

    Where that would be 0, the smallest normal number: of a vector that is mostly zeros, only what is not is listed.
    """
    numel, smallest = values.numel(), torch.finfo(values.dtype).smallest_normal
    if k == 0 or k >= numel:
        return math.inf
    stride = max(1, numel // _SAMPLE)
    sample = values[::stride].clone()
    if gradient is not None:
        sample += gradient[::stride]
    expected = k / stride
    wanted = round(expected + 3 * math.sqrt(expected)) + 2  # so that one sample in a thousand gives too few
    if wanted >= sample.numel():
        return smallest
    return max(kth_largest(sample.abs_(), wanted), smallest)
