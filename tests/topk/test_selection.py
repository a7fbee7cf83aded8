"""Selections without sorting: exactly those of a sort, whatever the sample says.

Prevents: a selection that depends on the sample, on rounding, or on which of equal entries was seen first.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_hooks.topk import selection
from ddp_hooks.topk.selection import BlockSelector, at_least, exact_top_k, positions_of
from ddp_hooks.topk.sparse import SparseVector, add, kth_largest, split_largest
from tests.topk.twins import top


@given(st.integers(0, 60), st.integers(0, 70), st.integers(0, 1000), st.sampled_from([1, 5, 100]))
@settings(max_examples=150, deadline=None)
def test_exact_top_k(numel: int, k: int, seed: int, largest: int) -> None:
    values = torch.randint(-largest, largest + 1, (numel,), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(exact_top_k(values, k), torch.nonzero(top(values, k)).squeeze(1))


def by_sorting(values: Tensor, k: int) -> Tensor:
    order = torch.sort(values.abs(), descending=True, stable=True).indices[:k]
    return torch.sort(order).values


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "equal", "zeros", "sorted", "few values"])
def test_the_fast_path_selects_the_same(density: float, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_PART", 1 << 17)  # several parts, one of them short
    numel = 300_007
    generator = torch.Generator().manual_seed(1)
    residual = torch.randn(numel, generator=generator)
    if kind == "heavy tails":
        residual = residual**9
    elif kind == "equal":
        residual.fill_(2.0)
    elif kind == "zeros":
        residual = residual * (torch.rand(numel, generator=generator) < density / 3)
    elif kind == "sorted":
        residual = residual.sort().values
    elif kind == "few values":
        residual = residual.round()
    gradient = torch.zeros(numel) if kind in ("equal", "zeros") else torch.randn(numel, generator=generator).round()
    bounds = (0, 100_000, 100_000, 100_003, numel)
    counts = tuple(round(density * (end - start)) for start, end in itertools.pairwise(bounds))
    work = residual.clone()
    selector = BlockSelector(work, bounds, counts)
    selector.add(gradient)
    assert torch.equal(work, residual + gradient)
    for block, k in enumerate(counts):
        part = work[bounds[block] : bounds[block + 1]]
        assert torch.equal(selector.select(block), by_sorting(part, k) + bounds[block])


@given(st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_entries_that_change_after_the_pass(seed: int) -> None:
    """What was received may lift entries onto the list, or take so much from others that the list is too short."""
    generator = torch.Generator().manual_seed(seed)
    work = torch.zeros(5000)
    selector = BlockSelector(work, (0, 2000, 5000), (20, 30))
    selector.add(torch.randint(-9, 10, (5000,), generator=generator).float())
    changed = torch.randperm(3000, generator=generator)[:400].sort().values + 2000
    if seed % 2:
        changed = (torch.nonzero(work[2000:].abs() > 7).squeeze(1)) + 2000  # the largest ones fall
        work[changed] = 0.0
    else:
        work[changed] += torch.randint(-9, 10, (400,), generator=generator).float()
    selector.received(1, changed)
    assert torch.equal(selector.select(1), by_sorting(work[2000:], 30) + 2000)
    assert torch.equal(selector.select(0), by_sorting(work[:2000], 20))


def test_a_list_that_is_too_short_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    shortlist = selection._shortlist

    def noting(values: Tensor, gradient: Tensor | None, k: int) -> Any:
        made.append(k)
        return shortlist(values, gradient, k)

    monkeypatch.setattr(selection, "_shortlist", noting)
    work = torch.zeros(1000)
    selector = BlockSelector(work, (0, 1000), (10,))
    selector.add(torch.arange(1000).float())
    work[900:] = 0.0  # everything that was listed
    assert torch.equal(selector.select(0), torch.arange(890, 900))
    assert made == [10, 10]


@given(st.lists(st.integers(0, 9_999), max_size=60))
@settings(max_examples=50, deadline=None)
def test_positions_of_a_mask(positions: list[int]) -> None:
    mask = torch.zeros(10_000, dtype=torch.bool)
    mask[positions] = True
    assert torch.equal(positions_of(mask), torch.nonzero(mask).squeeze(1))


def test_at_least_includes_the_threshold() -> None:
    assert at_least(torch.tensor([1.0, -2.0, 3.0, 2.0, -1.9]), 2.0).tolist() == [1, 2, 3]
    assert at_least(torch.empty(0), 2.0).tolist() == []


@given(st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_sums_of_sparse_vectors(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts, dense = [], torch.zeros(40)
    for _ in range(2):
        indices = torch.nonzero(torch.rand(40, generator=generator) < 0.3).squeeze(1)
        values = torch.randint(-3, 4, (indices.numel(),), generator=generator).float()
        parts.append(SparseVector(indices, values))
        dense[indices] += values
    both = add(*parts)
    union = torch.unique(torch.cat([part.indices for part in parts]))
    assert torch.equal(both.indices, union) and torch.equal(both.values, dense[union])
    kept, dropped = split_largest(both, 3)
    assert len(kept) == min(3, len(both)) and len(kept) + len(dropped) == len(both)
    if len(dropped):
        assert kth_largest(kept.values.abs(), len(kept)) >= dropped.values.abs().max()
