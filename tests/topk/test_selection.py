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

from ddp_hooks.sparse import BlockSelector, ChunkedGradient, SparseVector, primitives
from ddp_hooks.sparse import selector as selector_module
from ddp_hooks.sparse import threshold as threshold_module
from ddp_hooks.sparse.primitives import are_in, kth_largest, positions_of, stable_order
from ddp_hooks.sparse.sparse_vector import add, largest, split_largest
from ddp_hooks.sparse.threshold import add_and_threshold
from tests.support.topk.twins import top


@given(st.integers(0, 60), st.integers(0, 70), st.integers(0, 1000), st.sampled_from([1, 5, 100]))
@settings(max_examples=150, deadline=None)
def test_a_mask_of_the_largest(numel: int, k: int, seed: int, most: int) -> None:
    values = torch.randint(-most, most + 1, (numel,), generator=torch.Generator().manual_seed(seed)).float()
    assert torch.equal(largest(values.abs(), k), top(values, k))


def by_sorting(values: Tensor, k: int) -> Tensor:
    order = torch.sort(values.abs(), descending=True, stable=True).indices[:k]
    return torch.sort(order).values


SLOW_ONCE = {
    "zeros": lambda numel, k, generator: torch.zeros(numel),
    "equal": lambda numel, k, generator: torch.full((numel,), 0.5),
    "signs": lambda numel, k, generator: torch.randn(numel, generator=generator).sign(),
    "nine tenths equal": lambda numel, k, generator: torch.where(
        torch.rand(numel, generator=generator) < 0.9, 0.5, torch.randn(numel, generator=generator)
    ),
    "few together": lambda numel, k, generator: few(numel, k // 2, numel // 3),
    "few at the end": lambda numel, k, generator: few(numel, k // 2, numel - k // 2),
    "a few more than are wanted": lambda numel, k, generator: few(numel, k + 1, 0),
    "denormal": lambda numel, k, generator: torch.randint(-3, 4, (numel,), generator=generator) * 1e-41,
    "one is huge": lambda numel, k, generator: few(numel, 1, numel // 2) * 1e30 + 1e-3,
    "ascending": lambda numel, k, generator: torch.arange(numel) / 7,
    "no numbers": lambda numel, k, generator: torch.full((numel,), math.nan),
    "infinite": lambda numel, k, generator: torch.full((numel,), -math.inf),
}


def few(numel: int, num: int, start: int) -> Tensor:
    values = torch.zeros(numel)
    values[start : start + num] = 1.0 + torch.arange(num).flip(0)[: numel - start] % 100
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SLOW_ONCE)
def test_the_first_of_equals(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are equal, short lists suffice, and no other entries are chosen; also where a chunk ends."""
    monkeypatch.setattr(threshold_module, "_CHUNK", 4096)
    monkeypatch.setattr(threshold_module, "_SLACK", 1000)
    listed: list[int] = []
    monkeypatch.setattr(threshold_module, "largest", noting(listed, largest, len))
    for numel, density in [(1, 1.0), (4095, 0.3), (4096, 0.01), (4097, 0.9), (20_000, 0.01), (20_480, 0.2)]:
        k = max(1, round(density * numel))
        gradient = SLOW_ONCE[kind](numel, k, torch.Generator().manual_seed(0)).to(dtype)
        for with_gradient in (False, True):
            listed.clear()
            work = torch.zeros_like(gradient) if with_gradient else gradient.clone()
            scattered = ChunkedGradient((gradient,)) if with_gradient else None
            chosen = BlockSelector(work, (0, numel), (k,), scattered).select(0)
            assert torch.equal(chosen.indices, by_sorting(gradient, k))
            assert torch.equal(chosen.values.nan_to_num(7.0), gradient[chosen.indices].nan_to_num(7.0))
            if primitives.numpy_knows(work):
                assert max(listed, default=0) <= 3 * k + 1000 + 4096
                assert len(listed) <= 2 or kind == "ascending"
                assert sum(listed) < 8 * numel


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
    scattered = ChunkedGradient((gradient[:70_000], gradient[70_000:250_000], gradient[250_000:]))
    selector = BlockSelector(work, bounds, counts, scattered)
    for block, k in enumerate(counts):
        part = work[bounds[block] : bounds[block + 1]]
        chosen = selector.select(block)
        assert torch.equal(chosen.indices, by_sorting(part, k))
        assert torch.equal(chosen.values, part[chosen.indices])
    assert torch.equal(work, residual + gradient)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 50), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_a_gradient_in_several_places(lengths: list[int], stride: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = tuple(torch.randint(-9, 10, (length,), generator=generator).float() for length in lengths)
    scattered, whole = ChunkedGradient(parts), torch.cat(parts)
    start, end = sorted(torch.randint(0, len(whole) + 1, (2,), generator=generator).tolist())
    cut = scattered.cut(start, end).parts
    assert torch.equal(torch.cat([*cut, whole[:0]]), whole[start:end]) and all(len(part) for part in cut)
    places = torch.arange(0, len(whole), stride)
    assert torch.equal(scattered.sample(places), whole[places])
    sparse = SparseVector(positions_of(whole > 0), whole[whole > 0]).sample(places)
    assert torch.equal(sparse.indices, positions_of(whole[places] > 0))
    assert torch.equal(sparse.values, whole[places][sparse.indices])
    values = torch.randint(-9, 10, (len(whole),), generator=generator).float()
    again = values.clone()
    scattered.add_to(again)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threshold_module, "_CHUNK", 7)
        found = add_and_threshold(values, 6.0, len(values), scattered)
    assert torch.equal(values, again) and torch.equal(found.values, values[found.indices])
    assert found.indices.tolist() == [index for index, value in enumerate(values.tolist()) if abs(value) >= 6.0]


@given(st.integers(0, 1000), st.sampled_from([7, 1 << 17]), st.booleans(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_entries_that_are_received(seed: int, chunk: int, with_gradient: bool, is_misled: bool) -> None:
    """They may lift entries onto the list, or take so much from the largest ones that others take their places.

    Sums are formed in the order of arrival: tenths are rounded in another way in another order.
    """
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randint(-9, 10, (5000,), generator=generator) * 0.1
    work = torch.zeros(5000) if with_gradient else gradient.clone()
    scattered = ChunkedGradient((gradient[:2500], gradient[2500:])) if with_gradient else None
    selector = BlockSelector(work, (0, 2000, 5000), (20, 30), scattered)
    total = gradient.clone()
    received = torch.randperm(2999, generator=generator)[:400].sort().values + 1
    values = torch.randint(-9, 10, (400,), generator=generator) * 0.1
    if seed % 2:
        received = torch.nonzero(gradient[2001:].abs() > 0.7).squeeze(1) + 1  # the largest ones fall
        values = -gradient[2000 + received]
    again = received[::3] - 1  # some of them, and neighbours
    for indices, added in [(received, values), (again, torch.full((len(again),), -0.3)), (received, 3 * values)]:
        selector.receive(1, SparseVector(indices, added))
        total[2000 + indices] += added
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threshold_module, "_CHUNK", chunk)
        if is_misled:  # nothing is on the list
            patch.setattr(selector_module, "_sampled_threshold", lambda *_: 1e9)
        for block, (start, end, k) in enumerate([(0, 2000, 20), (2000, 5000, 30)]):
            chosen = selector.select(block)
            assert torch.equal(chosen.indices, by_sorting(total[start:end], k))
            assert torch.equal(chosen.values, total[start:end][chosen.indices])
    assert torch.equal(work, gradient)


@pytest.mark.parametrize("what", ["others", "the sample", "everything"])
def test_a_list_that_is_too_short_is_not_used(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Received entries count in the sample; where it misleads, a second pass looks at all sums, with these entries."""
    thresholds: list[float] = []

    def noted(values: Tensor, threshold: float, *others: Any) -> SparseVector:
        thresholds.append(threshold)
        return add_and_threshold(values, threshold, *others)

    monkeypatch.setattr(selector_module, "add_and_threshold", noted)
    numel, k = 3 * 2**20, 1000
    work = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    selector = BlockSelector(work.clone(), (0, numel), (k,))
    received = {
        "others": torch.arange(0, numel, 97),
        "the sample": selector_module._sampled_places(numel, numel // selector_module._SAMPLE, work.device),
        "everything": torch.arange(numel),
    }[what]
    added = torch.full((len(received),), 50.0) if what == "the sample" else -work[received]
    selector.receive(0, SparseVector(received, added))
    total = work.clone()
    total[received] += added
    assert torch.equal(selector.select(0).indices, by_sorting(total, k))
    assert thresholds[0] == 0.0 if what == "everything" else thresholds[0] > 0.0
    assert thresholds[1:] == ([0.0] if what == "the sample" else [])


@pytest.mark.parametrize("k", [1, 2, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_received", [False, True])
def test_sums_that_are_not_numbers_are_selected(dtype: torch.dtype, k: int, is_received: bool) -> None:
    """So that the result has them, and every rank refuses it."""
    work = torch.arange(1000).flip(0).to(dtype)  # the largest numbers come first
    selector = BlockSelector(work, (0, 1000), (k,))
    spoilt = torch.tensor([998, 999])
    if is_received:
        for value in (math.inf, -math.inf):
            selector.receive(0, SparseVector(spoilt, torch.full((2,), value, dtype=dtype)))
    else:
        work[spoilt] = math.nan
    chosen = selector.select(0)
    assert len(chosen) == k and chosen.indices[-2:].tolist() == spoilt[:k].tolist()
    assert chosen.values[-2:].isnan().all()
    with pytest.raises(AssertionError, match="already"):  # the gradient would be added twice
        selector.select(0)


def noting(seen: list[int], function: Callable[..., Any], number: Callable[[Any], int]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        result = function(*arguments)
        seen.append(number(result))
        return result

    return noted


@pytest.mark.parametrize("columns", [383, 768, 1024, 3 * 3 * 512])  # 383 * 2**13 is the size, almost
def test_a_sample_sees_all_columns(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of a linear layer's gradient are large or small together, as its inputs are."""
    listed: list[int] = []
    monkeypatch.setattr(threshold_module, "largest", noting(listed, largest, len))
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


@given(st.lists(st.integers(0, 5_000)), st.lists(st.integers(0, 5_000)), st.sampled_from([1, 2_000]))
@settings(max_examples=100, deadline=None)
def test_membership_and_order(some: list[int], others: list[int], stretch: int) -> None:
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
    monkeypatch.setattr(threshold_module, "_CHUNK", 3)  # several chunks, one of them short
    values = torch.tensor([1.0, -2.0, 3.0, 2.0, -1.9, 0.0, -4.0], dtype=dtype)
    gradient = torch.tensor([1.0, 0.0, -3.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.bfloat16)
    found = add_and_threshold(values, 2.0, 7, ChunkedGradient((gradient,)) if with_gradient else None)
    assert found.indices.tolist() == ([0, 1, 3, 6] if with_gradient else [1, 2, 3, 6])
    assert torch.equal(found.values, values[found.indices]) and values.dtype == dtype
    assert values.tolist()[2] == (0.0 if with_gradient else 3.0)
    for nothing in (values[:0], values[5:6]):
        found = add_and_threshold(nothing, 2.0, 7)
        assert len(found) == 0 and found.indices.dtype == torch.int64 and found.values.dtype == dtype
        assert found.values.view(torch.uint8).numel() == 0


KINDS = ["normal", "sorted", "few values", "mostly zeros", "not numbers", "a sample that misleads", "and downwards"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kth_largest_of_many(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few are sorted, whatever the values are; but for what is not a number."""
    numel = 20_000
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).abs()
    if kind == "sorted":
        values = values.sort().values
    elif kind == "few values":
        values = (3 * values).floor()
    elif kind == "mostly zeros":
        values[:18_000] = 0.0
    elif kind == "not numbers":
        values[::7] = math.nan
    elif kind == "a sample that misleads":
        values[:: numel // 1024] += 100
    elif kind == "and downwards":
        values[:: numel // 1024] = 0.0
    in_order = values.sort(descending=True).values  # what is not a number first, too
    sizes: list[int] = []
    monkeypatch.setattr(np, "sort", noting(sizes, np.sort, len))
    for k in (1, 2, 150, 1024, 1056, 1057, 3000, 10_000, 18_943, 18_944, 19_999, 20_000):
        expected = float(in_order[k - 1])
        found = kth_largest(values, k)
        assert found == expected or (math.isnan(found) and math.isnan(expected))
    assert kind == "not numbers" or max(sizes) < numel / 4


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
