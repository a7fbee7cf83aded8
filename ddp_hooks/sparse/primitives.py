"""Steps of selections and sparse sums for which numpy takes a half to a sixth of torch's time on one core.

Accelerators, and types that numpy does not know, use torch's own operations. Indices are int64. NaN counts as the
largest magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MAP = 1 << 20  # elements of a map of indices, which stays in the cache
_SAMPLE = 1 << 10  # values by which the k-th largest is guessed


def numpy_knows(values: Tensor) -> bool:
    """True if numpy can work in the memory of ``values``, and fast."""
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)


def positions_of(mask: Tensor) -> Tensor:
    """Return where (n,) bool is set, ascending."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return torch.nonzero(mask).squeeze(1)


def stable_order(indices: Tensor) -> Tensor:
    """Return the stable permutation that sorts (n,). A few ascending runs are merged in a pass or two."""
    if indices.device.type == "cpu":
        return torch.from_numpy(np.argsort(indices.numpy(), kind="stable"))
    return torch.sort(indices, stable=True).indices


def are_in(queries: Sequence[Tensor], others: Tensor) -> list[Tensor]:
    """Return a mask per query: which of its indices, (n,) ascending, are among ``others``, (m,) ascending."""
    if others.device.type != "cpu":
        return [torch.isin(indices, others, assume_unique=True) for indices in queries]
    wanted, there = [indices.numpy() for indices in queries], others.numpy()
    found = [np.empty(len(indices), bool) for indices in wanted]
    end = max((int(indices[-1]) + 1 for indices in (there, *wanted) if len(indices)), default=0)
    edges = np.arange(0, end + _MAP, _MAP)
    cuts = [np.searchsorted(indices, edges) for indices in (there, *wanted)]
    is_there = np.zeros(min(_MAP, end), bool)
    for number, start in enumerate(edges[:-1]):
        (first, last), *parts = ((cut[number], cut[number + 1]) for cut in cuts)
        marked = there[first:last] - start
        is_there[marked] = True
        for indices, mask, (begin, end) in zip(wanted, found, parts, strict=True):
            mask[begin:end] = is_there[indices[begin:end] - start]
        is_there[marked] = False
    return [torch.from_numpy(mask) for mask in found]


def kth_largest(values: Tensor, k: int) -> float:
    """Return the ``k``-th largest value, 1 <= k <= n."""
    if numpy_knows(values):
        return _kth_largest(values.numpy(), k)
    return float(torch.kthvalue(values, values.numel() - k + 1).values)


def _kth_largest(values: np.ndarray, k: int) -> float:
    """Bracket the value by two values of a sample, so that few are sorted, however many are equal.

    The value may equal one of the two. Where the sample misses it, the values on its side are sampled anew.
    """
    while (numel := len(values)) >= 2 * _SAMPLE:
        sample = np.sort(values[:: numel // _SAMPLE])
        expected = len(sample) * (1 - k / numel)
        spread = 3 * math.sqrt(expected * k / numel) + 1
        low, high = (sample[min(max(int(expected + way * spread), 0), len(sample) - 1)] for way in (-1, 1))
        if math.isnan(high):
            break
        is_below = values < high
        num_from_high = numel - int(np.count_nonzero(is_below))
        if k <= num_from_high:
            is_above = ~(values <= high)  # or not a number
            if k > int(np.count_nonzero(is_above)):
                return float(high)
            values = values[is_above]
            continue
        between = values[np.logical_and(is_below, values > low, out=is_below)]
        if k <= num_from_high + len(between):
            values, k = between, k - num_from_high
            continue
        is_below = values < low
        num_from_low = numel - int(np.count_nonzero(is_below))
        if k <= num_from_low:
            return float(low)
        values, k = values[is_below], k - num_from_low
    return float(np.sort(values)[len(values) - k])
