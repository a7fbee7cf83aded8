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

_SPARSEST_MAP = 512  # elements per index, from which on a search is faster than a map of the range
_SAMPLE = 1 << 10  # values by which the k-th largest is guessed
_MAP = 1 << 22  # elements of a map: it stays in the cache


def numpy_knows(values: Tensor) -> bool:
    """True if numpy can work in the memory of ``values``, and fast."""
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)


def positions_of(mask: Tensor) -> Tensor:
    """Return where (n,) bool is set, ascending."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return torch.nonzero(mask).squeeze(1)


def first_of(mask: Tensor, num: int) -> Tensor:
    """Keep the first ``num`` set elements of (n,) bool, which has at least as many; in place."""
    if mask.device.type == "cpu":
        mask[_end_of(mask.numpy(), num) :] = False
        return mask
    return mask.logical_and_(mask.cumsum(0, dtype=torch.int32) <= num)


def _end_of(mask: np.ndarray, num: int) -> int:
    """Return the position after the ``num``-th set element; counting takes a tenth of the time of listing."""
    start, end = 0, len(mask)
    while end - start > 1:
        middle = (start + end) // 2
        found = int(np.count_nonzero(mask[start:middle]))
        if found >= num:
            end = middle
        else:
            start, num = middle, num - found
    return end


def stable_order(indices: Tensor) -> Tensor:
    """Return the stable permutation that sorts (n,). A few ascending runs are merged in a pass or two."""
    if indices.device.type == "cpu":
        return torch.from_numpy(np.argsort(indices.numpy(), kind="stable"))
    return torch.sort(indices, stable=True).indices


def are_in(queries: Sequence[Tensor], others: Tensor) -> list[Tensor]:
    """Return a mask per query: which of its indices, (n,) ascending, are among ``others``, (m,) ascending."""
    found = [torch.zeros_like(indices, dtype=torch.bool) for indices in queries]
    asked = [(indices, mask) for indices, mask in zip(queries, found, strict=True) if indices.numel()]
    if not asked or not others.numel():
        return found
    first, last = (pick(int(indices[end]) for indices, _ in asked) for pick, end in ((min, 0), (max, -1)))
    if last - first > _SPARSEST_MAP * sum(indices.numel() for indices, _ in asked):
        for indices, mask in asked:
            positions = torch.searchsorted(others, indices).clamp_(max=others.numel() - 1)
            torch.eq(others.index_select(0, positions), indices, out=mask)
        return found
    edges = [*range(first, last + 1, _MAP), last + 1]
    at = torch.tensor(edges, device=others.device)
    cuts = [torch.searchsorted(indices, at).tolist() for indices in (others, *(indices for indices, _ in asked))]
    present = torch.zeros(min(_MAP, last - first + 1), dtype=torch.bool, device=others.device)
    for number, start in enumerate(edges[:-1]):
        (first_there, last_there), *parts = ((cut[number], cut[number + 1]) for cut in cuts)
        there = others[first_there:last_there] - start
        present.index_fill_(0, there, True)
        for (indices, mask), (begin, end) in zip(asked, parts, strict=True):
            torch.index_select(present, 0, indices[begin:end] - start, out=mask[begin:end])
        present.index_fill_(0, there, False)
    return found


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
