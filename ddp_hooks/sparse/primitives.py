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

_SAMPLE = 1 << 10  # values by which the k-th largest is bounded


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
    end = 1 + max((int(indices[-1]) for indices in (*queries, others) if indices.numel()), default=0)
    is_there = np.zeros(end, bool)  # pages that nobody writes or reads take no memory
    is_there[others.numpy()] = True
    return [torch.from_numpy(is_there[indices.numpy()]) for indices in queries]


def kth_largest(values: Tensor, k: int) -> float:
    """Return the ``k``-th largest value, 1 <= k <= n."""
    if not numpy_knows(values):
        return float(torch.kthvalue(values, values.numel() - k + 1).values)
    among = values.numpy()
    if len(among) >= 2 * _SAMPLE:  # leave out what is surely smaller
        sample = np.sort(among[:: len(among) // _SAMPLE])
        expected = len(sample) * k / len(among)
        bound = sample[max(0, len(sample) - 2 - int(expected + 3 * math.sqrt(expected)))]
        reaching = among[~(among < bound)]
        among = reaching if len(reaching) >= k else among
    return float(np.partition(among, len(among) - k)[len(among) - k])
