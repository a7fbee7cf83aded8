"""Selection of the k largest entries, exact and without sorting.

1. A sample gives a threshold that a little more than k entries reach.
2. One pass adds the gradient to the residual and lists the entries that reach the threshold
   (:mod:`~ddp_hooks.sparse.threshold`); the k largest of the list are the result.
3. If the list is too short, the sample was misleading, and a pass without a threshold follows.

So the result is that of an exact selection, and only the work depends on the sample. A block's pass runs when the block
is selected from, so it includes everything received before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.sparse.primitives import kth_largest
from ddp_hooks.sparse.sparse_vector import SparseVector
from ddp_hooks.sparse.threshold import ChunkedGradient, add_and_threshold

_SAMPLE = 1 << 13  # elements per block; fewer than twice as many where they do not divide it
_SHARES = torch.rand(2 * _SAMPLE, dtype=torch.float64, device="cpu", generator=torch.Generator("cpu").manual_seed(0))


class BlockSelector:
    """Largest entries, ``counts`` of each, of the blocks of a vector; indices count from the beginning of the block.

    ``work``, (n,), is the residual. ``gradient``, (n,), is added to it, block by block as they are selected from; None
    if ``work`` includes it.
    """

    def __init__(
        self, work: Tensor, bounds: Sequence[int], counts: Sequence[int], gradient: ChunkedGradient | None = None
    ) -> None:
        self._work = work
        self._bounds = bounds
        self._counts = counts
        self._gradient = gradient
        self._received: list[list[SparseVector] | None] = [[] for _ in counts]  # None: selected from

    def receive(self, block: int, vector: SparseVector) -> None:
        received = self._received[block]
        assert received is not None, f"block {block} has been selected from already"
        received.append(vector)

    def select(self, block: int) -> SparseVector:
        """Return the largest entries of a block and everything it has received; once per block."""
        received, self._received[block] = self._received[block], None
        assert received is not None, f"block {block} has been selected from already"
        start, end = self._bounds[block], self._bounds[block + 1]
        values, k = self._work[start:end], self._counts[block]
        gradient = self._gradient.cut(start, end) if self._gradient is not None and end > start else None
        threshold = _sampled_threshold(values, gradient, received, k)
        chosen = add_and_threshold(values, threshold, k, gradient, received)
        if len(chosen) < min(k, values.numel()):
            chosen = add_and_threshold(values, 0.0, k, None, received)
        return chosen


@functools.lru_cache(maxsize=32)  # blocks have the same lengths in every step
def _sampled_places(numel: int, stride: int, device: torch.device) -> Tensor:
    """Return one pseudo-random place of each ``stride`` elements, (ceil(numel / stride),) ascending.

    Regular distances would see some columns of a gradient too often, and a column is large or small as a whole.
    """
    starts = torch.arange(0, numel, stride, device="cpu")
    return (starts + (_SHARES[: len(starts)] * stride).long()).clamp_(max=numel - 1).to(device)


def _sampled_threshold(
    values: Tensor, gradient: ChunkedGradient | None, received: Sequence[SparseVector], k: int
) -> float:
    """Return a magnitude that a little more than ``k`` of the sums should reach; 0: look at all."""
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
