"""Finding the largest entries of a vector without sorting it.

A sample gives a threshold that a little more than k entries exceed. One pass adds the gradient to the residual and
compares with the threshold; the few entries that exceed it form a *shortlist*, of which the k largest are picked
exactly. The result is that of an exact selection, ties going to the lowest index; only the work depends on the sample.
A block's pass is made when the block is selected from, so that what other workers have sent is part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.topk.passes import reaching, with_added
from ddp_hooks.topk.primitives import kth_largest, positions_of
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.sparse import SparseVector, largest

_SAMPLE = 1 << 13  # elements per block


def exact_top_k(values: Tensor, k: int) -> Tensor:
    """Positions of the ``k`` entries of largest magnitude, ascending; of equals, the first ones."""
    return positions_of(largest(values.abs(), k))


class BlockSelector:
    """The largest entries of the blocks of a working vector; see :class:`~ddp_hooks.topk.exchange.Selector`.

    Args:
        work: (n,), the residual; becomes the working vector, block by block as they are selected from.
        bounds: where blocks begin and end.
        counts: entries to select of every block.
        gradient: (n,), added to ``work``; None if it was.
    """

    def __init__(
        self, work: Tensor, bounds: Sequence[int], counts: Sequence[int], gradient: Scattered | None = None
    ) -> None:
        self._work = work
        self._bounds = bounds
        self._counts = counts
        self._gradient = gradient
        self._received: list[list[SparseVector] | None] = [[] for _ in counts]  # None: selected from

    def receive(self, block: int, vector: SparseVector) -> None:
        """Add entries to the block, without changing the working vector."""
        received = self._received[block]
        assert received is not None, f"block {block} has been selected from already"
        received.append(vector)

    def select(self, block: int) -> SparseVector:
        """The largest entries of the block and what it has received, exactly; once per block."""
        received, self._received[block] = self._received[block], None
        assert received is not None, f"block {block} has been selected from already"
        start, end = self._bounds[block], self._bounds[block + 1]
        gradient = self._gradient.cut(start, end) if self._gradient is not None and end > start else None
        return _largest_sums(self._work[start:end], self._counts[block], gradient, received)


def _largest_sums(
    values: Tensor, k: int, gradient: Scattered | None, received: Sequence[SparseVector]
) -> SparseVector:
    """The ``k`` largest; adds ``gradient`` to ``values`` in place."""
    shortlist = reaching(values, _sampled_threshold(values, gradient, received, k), gradient, received)
    if len(shortlist) >= min(k, values.numel()):
        return shortlist.at(largest(shortlist.values.abs(), k))
    sums = with_added(values, received)
    positions = exact_top_k(sums, k)
    return SparseVector(positions, sums.index_select(0, positions))


def _stride(numel: int) -> int:
    """Between two elements of the sample: not a multiple of 2, 3, 5 or 7, as rows of weights are, so that the sample
    goes through all columns: whole columns of a gradient are large or small together."""
    stride = max(1, numel // _SAMPLE)
    while math.gcd(stride, 2 * 3 * 5 * 7) > 1:
        stride -= 1
    return stride


def _sampled_threshold(
    values: Tensor, gradient: Scattered | None, received: Sequence[SparseVector], k: int
) -> float:
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
    for vector in received:
        sampled = vector.sample(stride)
        sample.index_add_(0, sampled.indices, sampled.values)
    expected = k / stride
    wanted = round(expected + 3 * math.sqrt(expected)) + 2  # so that one sample in a thousand gives too few
    if wanted >= sample.numel():
        return smallest
    return max(kth_largest(sample.abs_(), wanted), smallest)
