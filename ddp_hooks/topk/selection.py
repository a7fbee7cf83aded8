"""Finding the largest entries of a vector without sorting it.

A sample gives a threshold that a little more than k entries reach. One pass adds the gradient to the residual and
compares with the threshold; the few entries that reach it form a *shortlist*, of which the k largest are picked
exactly. Once it has k entries, it takes only what exceeds the threshold: ties go to the lowest index, so many equal
magnitudes cost no more than different ones. The result is that of an exact selection; only the work depends on the
sample.
A block's pass is made when the block is selected from, so that what other workers have sent is part of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.topk.passes import reaching
from ddp_hooks.topk.primitives import kth_largest
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.sparse import SparseVector

_SAMPLE = 1 << 13  # elements per block; fewer than twice as many where they do not divide it
_SHARES = torch.rand(2 * _SAMPLE, dtype=torch.float64, device="cpu", generator=torch.Generator("cpu").manual_seed(0))


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
    threshold = _sampled_threshold(values, gradient, received, k)
    chosen = reaching(values, threshold, k, gradient, received)
    if len(chosen) < min(k, values.numel()):  # the sample was misleading
        chosen = reaching(values, 0.0, k, None, received)
    return chosen


@functools.lru_cache(maxsize=32)  # blocks have the same lengths in every step
def _sampled_places(numel: int, stride: int, device: torch.device) -> Tensor:
    """Return one place of each ``stride`` elements, (ceil(numel / stride),) ascending.

    A pseudo-random one: whole columns of a gradient are large or small together, so a sample at regular distances
    would see some of them too often.
    """
    starts = torch.arange(0, numel, stride, device="cpu")
    return (starts + (_SHARES[: len(starts)] * stride).long()).clamp_(max=numel - 1).to(device)


def _sampled_threshold(
    values: Tensor, gradient: Scattered | None, received: Sequence[SparseVector], k: int
) -> float:
    """A magnitude that a little more than ``k`` of the sums should reach; 0 if all may have to be looked at."""
    numel = values.numel()
    if k == 0:
        return math.inf
    if k >= numel:
        return 0.0
    stride = max(1, numel // _SAMPLE)
    places = _sampled_places(numel, stride, values.device)
    sample = values.index_select(0, places)
    if gradient is not None:
        sample += gradient.sample(places)
    for vector in received:
        sampled = vector.sample(places)
        sample.index_add_(0, sampled.indices, sampled.values)
    expected = k / stride
    wanted = round(expected + 3 * math.sqrt(expected)) + 2  # so that one sample in a thousand gives too few
    if wanted >= sample.numel():
        return 0.0
    threshold = kth_largest(sample.abs_(), wanted)
    return math.inf if math.isnan(threshold) else threshold
