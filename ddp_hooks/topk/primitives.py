"""Steps of selections and sparse sums for which numpy takes a half to a sixth of torch's time on one core.

On accelerators, and for types that numpy does not know, they are torch's own operations. Indices are int64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements that a pass handles at a time: they stay in the cache
_SPARSEST_MAP = 512  # elements per index, from which on a search is faster than a map of the range
_MAP = 1 << 22  # elements of a map: it stays in the cache


def positions_of(mask: Tensor) -> Tensor:
    """Where (n,) bool is set, ascending."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return torch.nonzero(mask).squeeze(1)


def stable_order(indices: Tensor) -> Tensor:
    """The permutation that sorts (n,), equal ones in their order. A few ascending runs are merged in a pass or two."""
    if indices.device.type == "cpu":
        return torch.from_numpy(np.argsort(indices.numpy(), kind="stable"))
    return torch.sort(indices, stable=True).indices


def is_in(indices: Tensor, others: Tensor) -> Tensor:
    """Which of ``indices`` are among ``others``; both ascending, (n,) and (m,)."""
    if not others.numel() or not indices.numel():
        return torch.zeros_like(indices, dtype=torch.bool)
    first, last = int(indices[0]), int(indices[-1])
    if last - first > _SPARSEST_MAP * indices.numel():
        positions = torch.searchsorted(others, indices)
        return others[positions.clamp_(max=others.numel() - 1)] == indices
    edges = [*range(first, last + 1, _MAP), last + 1]
    at = torch.tensor(edges, device=indices.device)
    cuts, other_cuts = (torch.searchsorted(values, at).tolist() for values in (indices, others))
    present = torch.empty(min(_MAP, last - first + 1), dtype=torch.bool, device=indices.device)
    found = []
    for number, start in enumerate(edges[:-1]):
        present.zero_()
        present.index_fill_(0, others[other_cuts[number] : other_cuts[number + 1]] - start, True)
        found.append(present.index_select(0, indices[cuts[number] : cuts[number + 1]] - start))
    return torch.cat(found)


def kth_largest(values: Tensor, k: int) -> float:
    """The ``k``-th largest value, 1 <= k <= n."""
    if _numpy_knows(values):
        position = values.numel() - k
        return float(np.partition(values.numpy(), position)[position])
    return float(torch.kthvalue(values, values.numel() - k + 1).values)


def reaching(values: Tensor, threshold: float, gradient: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Add ``gradient``, if there is one, to ``values`` in place, and find what reaches ``threshold`` by magnitude.

    One pass over memory.

    Returns:
        Positions, ascending, and the values there.
    """
    if not _numpy_knows(values):
        if gradient is not None:
            values += gradient
        positions = torch.nonzero(values.abs() >= threshold).squeeze(1)
        return positions, values.index_select(0, positions)
    found = [(positions, kept) for positions, kept in _reaching_in_chunks(values, threshold, gradient) if len(kept)]
    if not found:  # an empty array has strides that torch does not like
        return torch.empty(0, dtype=torch.int64), values.new_empty(0)
    all_positions, all_kept = zip(*found, strict=True)
    return torch.from_numpy(np.concatenate(all_positions)), torch.from_numpy(np.concatenate(all_kept))


def _reaching_in_chunks(
    values: Tensor, threshold: float, gradient: Tensor | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    array = values.numpy()
    magnitudes, mask = np.empty(_CHUNK, array.dtype), np.empty(_CHUNK, bool)
    for start in range(0, len(array), _CHUNK):
        part = array[start : start + _CHUNK]
        if gradient is not None:
            values[start : start + _CHUNK] += gradient[start : start + _CHUNK]
        np.abs(part, out=magnitudes[: len(part)])
        np.greater_equal(magnitudes[: len(part)], threshold, out=mask[: len(part)])
        positions = np.flatnonzero(mask[: len(part)])
        kept = part[positions]
        positions += start
        yield positions, kept


def _numpy_knows(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)
