"""Selections without sorting: exactly those of a sort, whatever the sample says.

Prevents: a selection that depends on the sample, on rounding, or on which of equal entries was seen first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_hooks.topk import primitives, selection
from ddp_hooks.topk.primitives import are_in, kth_largest, positions_of, reaching, stable_order
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.selection import BlockSelector, exact_top_k
from ddp_hooks.topk.sparse import SparseVector, add, split_largest
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
def test_the_fast_path_selects_the_same(density: float, kind: str) -> None:
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
    selector.add(Scattered((gradient[:70_000], gradient[70_000:250_000], gradient[250_000:])))
    assert torch.equal(work, residual + gradient)
    for block, k in enumerate(counts):
        part = work[bounds[block] : bounds[block + 1]]
        chosen = selector.select(block)
        assert torch.equal(chosen.indices, by_sorting(part, k) + bounds[block])
        assert torch.equal(chosen.values, work[chosen.indices])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 50), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_a_gradient_in_several_places(lengths: list[int], stride: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = tuple(torch.randint(-9, 10, (length,), generator=generator).float() for length in lengths)
    scattered, whole = Scattered(parts), torch.cat(parts)
    start, end = sorted(torch.randint(0, len(whole) + 1, (2,), generator=generator).tolist())
    cut = scattered.cut(start, end).parts
    assert torch.equal(torch.cat([*cut, whole[:0]]), whole[start:end]) and all(len(part) for part in cut)
    assert torch.equal(scattered.sample(stride), whole[::stride])
    values = torch.randint(-9, 10, (len(whole),), generator=generator).float()
    again = values.clone()
    scattered.add_to(again)
    positions, kept = scattered.add_and_find(values, 6.0)
    assert torch.equal(values, again) and torch.equal(kept, values[positions])
    assert positions.tolist() == [index for index, value in enumerate(values.tolist()) if abs(value) >= 6.0]


@given(st.integers(0, 1000), st.booleans())
@settings(max_examples=60, deadline=None)
def test_entries_that_are_received_after_the_pass(seed: int, with_pass: bool) -> None:
    """They may lift entries onto the list, or take so much from others that the list is too short."""
    generator = torch.Generator().manual_seed(seed)
    work, gradient = torch.zeros(5000), torch.randint(-9, 10, (5000,), generator=generator).float()
    selector = BlockSelector(work, (0, 2000, 5000), (20, 30))
    if with_pass:
        selector.add(Scattered((gradient,)))
    else:  # the gradient is there already
        work += gradient
    total = work.clone()
    received = torch.randperm(2999, generator=generator)[:400].sort().values + 2001
    values = torch.randint(-9, 10, (400,), generator=generator).float()
    if seed % 2:
        received = torch.nonzero(work[2001:].abs() > 7).squeeze(1) + 2001  # the largest ones fall
        values = -work[received]
    again = received[::3] - 1  # some of them, and neighbours
    for indices, added in [(received, values), (again, torch.full((len(again),), -1.0))]:
        selector.receive(1, SparseVector(indices, added))
        total[indices] += added
    for block, (start, end, k) in enumerate([(0, 2000, 20), (2000, 5000, 30)]):
        chosen = selector.select(block)
        assert torch.equal(chosen.indices, by_sorting(total[start:end], k) + start)
        assert torch.equal(chosen.values, total[chosen.indices])
    assert torch.equal(work, gradient)


@pytest.mark.parametrize("k", [10, 950])
def test_a_list_that_is_too_short_is_made_again(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what was received; and if there are not so many that are not 0, everything is looked at."""
    listed: list[int] = []
    exact: list[int] = []
    monkeypatch.setattr(selection, "reaching", noting(listed, selection.reaching, lambda found: len(found[0])))
    monkeypatch.setattr(selection, "exact_top_k", noting(exact, exact_top_k, len))
    work = torch.zeros(1000)
    selector = BlockSelector(work, (0, 1000), (k,))
    selector.add(Scattered((torch.arange(1000).float(),)))
    gone = torch.arange(900, 1000)
    selector.receive(0, SparseVector(gone, -work[gone]))  # among them everything that was listed, if k is 10
    assert torch.equal(selector.select(0).indices, torch.arange(890, 900) if k == 10 else torch.arange(950))
    assert len(listed) == 1 and exact == ([] if k == 10 else [950])  # after that of the pass


def noting(seen: list[int], function: Callable[..., Any], number: Callable[[Any], int]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        result = function(*arguments)
        seen.append(number(result))
        return result

    return noted


@pytest.mark.parametrize("columns", [768, 1024, 3 * 3 * 512])
def test_a_sample_sees_all_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a linear layer's gradient are large or small together, as its inputs are."""
    listed: list[int] = []
    monkeypatch.setattr(selection, "reaching", noting(listed, selection.reaching, lambda found: len(found[0])))
    generator = torch.Generator().manual_seed(0)
    rows = 3 * 2**20 // columns
    values = torch.randn(rows, columns, generator=generator) * torch.randn(columns, generator=generator).exp()
    k = values.numel() // 100
    work = values.flatten()
    assert torch.equal(BlockSelector(work, [0, work.numel()], [k]).select(0).indices, by_sorting(work, k))
    assert k <= listed[0] < 1.6 * k and len(listed) == 1


@given(st.lists(st.integers(0, 9_999), max_size=60))
@settings(max_examples=50, deadline=None)
def test_positions_of_a_mask(positions: list[int]) -> None:
    mask = torch.zeros(10_000, dtype=torch.bool)
    mask[positions] = True
    assert torch.equal(positions_of(mask), torch.nonzero(mask).squeeze(1))


@given(
    st.lists(st.integers(0, 5_000)), st.lists(st.integers(0, 5_000)), st.sampled_from([1, 2_000]), st.integers(1, 99)
)
@settings(max_examples=100, deadline=None)
def test_membership_and_order(some: list[int], others: list[int], stretch: int, part: int) -> None:
    """By maps of parts of the range, and by searching where these would be many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "_MAP", 50 * part)
        look_up(some, others, stretch)


def look_up(some: list[int], others: list[int], stretch: int) -> None:
    indices, ascending = (torch.tensor(sorted(set(x)), dtype=torch.int64) * stretch for x in (some, others))
    queries = [indices, indices[:0], indices[1::2].contiguous(), indices[-3:]]
    for query, found in zip(queries, are_in(queries, ascending), strict=True):
        assert found.tolist() == [index in set(ascending.tolist()) for index in query.tolist()]
    both = torch.cat([indices, ascending])
    assert torch.equal(stable_order(both), torch.sort(both, stable=True).indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("with_gradient", [True, False])
def test_what_reaches_a_threshold(
    dtype: torch.dtype, with_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(primitives, "_CHUNK", 3)  # several chunks, one of them short
    values = torch.tensor([1.0, -2.0, 3.0, 2.0, -1.9, 0.0, -4.0], dtype=dtype)
    gradient = torch.tensor([1.0, 0.0, -3.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.bfloat16) if with_gradient else None
    positions, kept = reaching(values, 2.0, gradient)
    assert positions.tolist() == ([0, 1, 3, 6] if with_gradient else [1, 2, 3, 6])
    assert torch.equal(kept, values[positions]) and values.dtype == dtype
    assert values.tolist()[2] == (0.0 if with_gradient else 3.0)
    for nothing in (values[:0], values[5:6]):
        positions, kept = reaching(nothing, 2.0)
        assert positions.tolist() == [] and positions.dtype == torch.int64 and kept.dtype == dtype
        assert kept.view(torch.uint8).numel() == 0


@pytest.mark.parametrize("kind", ["normal", "sorted", "few values", "not numbers", "a sample that misleads"])
def test_the_kth_largest_of_many(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    partitioned: list[int] = []
    monkeypatch.setattr(np, "partition", noting(partitioned, np.partition, len))
    numel = 20_000
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).abs()
    if kind == "sorted":
        values = values.sort().values
    elif kind == "few values":
        values = (3 * values).floor()
    elif kind == "not numbers":
        values[::7] = math.nan
    elif kind == "a sample that misleads":
        values[:: numel // 1024] += 100
    in_order = values.sort(descending=True).values  # what is not a number first, too
    for k in (1, 2, 150, 3000, 10_000, 19_999, 20_000):
        expected = float(in_order[k - 1])
        found = kth_largest(values, k)
        assert found == expected or (math.isnan(found) and math.isnan(expected))
    if kind == "a sample that misleads":
        assert numel in partitioned
    elif kind == "normal":
        assert sum(size < numel / 4 for size in partitioned) >= 3  # at the ends a sample may miss


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
