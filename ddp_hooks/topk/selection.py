"""Finding the largest entries of a vector without sorting it.

A sample gives a threshold that a little more than k entries exceed. One pass adds the gradient to the residual and
compares with the threshold; the few positions that exceed it form a *shortlist*, of which the k largest are picked
exactly. The result is that of an exact selection, ties going to the lowest index; only the work depends on the sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.topk.sparse import kth_largest, largest

_SAMPLE = 1 << 15  # elements per block
_CHUNK = 1 << 16  # elements that one pass handles at a time: they stay in the cache
_PART = 1 << 22  # elements whose mask is kept at a time


def exact_top_k(values: Tensor, k: int) -> Tensor:
    """Positions of the ``k`` entries of largest magnitude, ascending; of equals, the first ones."""
    return torch.nonzero(largest(values.abs(), k)).squeeze(1)


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
            shortlist.add(indices - self._bounds[block])

    def select(self, block: int) -> Tensor:
        """Indices of the block's largest entries, ascending, in the working vector."""
        start, end, k = self._bounds[block], self._bounds[block + 1], self._counts[block]
        values, shortlist = self._work[start:end], self._shortlists[block]
        chosen = shortlist.pick(values, k) if shortlist is not None else None
        if chosen is None:  # no shortlist, or one that has become too short
            fresh = _shortlist(values, None, k)
            chosen = fresh.pick(values, k)
            if chosen is None:
                chosen = exact_top_k(values, k)
        return chosen + start


class _Shortlist:
    """Positions of a block that hold everything of at least a threshold, and perhaps more."""

    def __init__(self, threshold: float, positions: Tensor) -> None:
        self._threshold = threshold
        self._positions = positions

    def add(self, positions: Tensor) -> None:
        """These may have become large."""
        self._positions = torch.unique(torch.cat([self._positions, positions]))

    def pick(self, values: Tensor, k: int) -> Tensor | None:
        """The ``k`` largest of the block, exactly; None if they cannot all be on the list."""
        if self._positions.numel() < min(k, values.numel()):
            return None
        magnitudes = values[self._positions].abs()
        if k < values.numel() and k > 0 and kth_largest(magnitudes, k) < self._threshold:
            return None
        return self._positions[largest(magnitudes, k)]


def _shortlist(values: Tensor, gradient: Tensor | None, k: int) -> _Shortlist:
    """Add ``gradient``, if there is one, to ``values``, and list what may be among the ``k`` largest."""
    threshold = _sampled_threshold(values, gradient, k)
    return _Shortlist(threshold, at_least(values, threshold, gradient))


def _sampled_threshold(values: Tensor, gradient: Tensor | None, k: int) -> float:
    """A magnitude that a little more than ``k`` of the sums should reach."""
    numel = values.numel()
    if k == 0 or k >= numel:
        return 0.0
    stride = max(1, numel // _SAMPLE)
    sample = values[::stride].clone()
    if gradient is not None:
        sample += gradient[::stride]
    expected = k / stride
    wanted = round(expected + 3 * math.sqrt(expected)) + 2  # so that one sample in a thousand gives too few
    if wanted >= sample.numel():
        return 0.0
    return kth_largest(sample.abs_(), wanted)


def _add_and_compare(values: Tensor, gradient: Tensor | None, threshold: float) -> Tensor:
    """Which sums reach the threshold, (n,) bool; a pass over memory in pieces that stay in the cache."""
    numel = values.numel()
    mask = torch.empty(-(-numel // 8) * 8, dtype=torch.bool, device=values.device)
    mask[numel:] = False
    magnitudes = torch.empty(min(_CHUNK, numel), dtype=values.dtype, device=values.device)
    for start in range(0, numel, _CHUNK):
        end = min(start + _CHUNK, numel)
        part = values[start:end]
        if gradient is not None:
            part += gradient[start:end]
        torch.ge(torch.abs(part, out=magnitudes[: end - start]), threshold, out=mask[start:end])
    return mask


def positions_of(mask: Tensor) -> Tensor:
    """Where a mask is set, ascending int64; (n,) bool, n a multiple of 8. Where little is, much faster than nonzero."""
    words = torch.nonzero(mask.view(torch.int64)).squeeze(1)
    bits = torch.nonzero(mask.view(-1, 8)[words].view(-1)).squeeze(1)
    return words[bits >> 3] * 8 + (bits & 7)


def at_least(values: Tensor, threshold: float, gradient: Tensor | None = None) -> Tensor:
    """Positions of the entries whose magnitude reaches ``threshold``, ascending; ``gradient`` is added before."""
    found = []
    for start in range(0, values.numel(), _PART):
        part = slice(start, start + _PART)
        mask = _add_and_compare(values[part], None if gradient is None else gradient[part], threshold)
        found.append(positions_of(mask) + start)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=values.device)
