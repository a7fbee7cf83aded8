"""The four baselines on the in-process fabric: any number of ranks, nothing lost, replicas that are the same.

Prevents: the crashes of earlier implementations where P is not a power of two, and residuals that lose what a tree or a
threshold has discarded on the way.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_hooks.comm import run_on_fabric
from ddp_hooks.sparse import SparseSum, SparseVector, Sparsity
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.oktopk import OkTopkEstimates
from tests.support.topk.algorithms import returning
from tests.support.topk.twins import top

NAMES = ["topka", "topkdsa", "gtopk", "oktopk"]


def sums_of(name: Any, k: int, wire: EntryCodec, world_size: int, numel: int) -> list[SparseSum]:
    """One per rank."""
    return [SparseSum(Sparsity(name, k, wire), numel, rank, world_size) for rank in range(world_size)]


def run_baseline(sums: list[SparseSum], work: list[Tensor]) -> list[SparseVector]:
    """One exchange of all ranks; ``work`` becomes their residuals."""
    results: dict[int, SparseVector] = {}
    exchanges = [each.run(values, None) for each, values in zip(sums, work, strict=True)]
    run_on_fabric([returning(exchange, results, rank) for rank, exchange in enumerate(exchanges)])
    return [results[rank] for rank in range(len(work))]


def dense_of(vector: SparseVector, numel: int) -> Tensor:
    dense = torch.zeros(numel, dtype=vector.values.dtype)
    dense[vector.indices] = vector.values
    return dense


@st.composite
def inputs(draw: Any) -> tuple[list[Tensor], int]:
    world_size, numel = draw(st.integers(1, 17)), draw(st.integers(0, 90))
    k = draw(st.integers(1, max(1, numel)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    largest = draw(st.sampled_from([1, 3, 1000]))
    values = [torch.randint(-largest, largest + 1, (numel,), generator=generator).double() for _ in range(world_size)]
    return values, k


@pytest.mark.quick("oktopk-compact", "gtopk-compact")
@pytest.mark.parametrize("format", ["exact", "compact"])
@pytest.mark.parametrize("name", NAMES)
@given(inputs())
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost(name: str, format: Any, given_inputs: Any) -> None:
    work, k = given_inputs
    before = torch.stack(work).sum(0)
    results = run_baseline(sums_of(name, k, EntryCodec(format, torch.float64), len(work), before.numel()), work)
    assert all(torch.equal(r.indices, results[0].indices) for r in results), "replicas differ"
    assert all(torch.equal(r.values, results[0].values) for r in results), "replicas differ"
    assert torch.equal(dense_of(results[0], before.numel()) + sum(work), before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", ["exact", "compact"])
def test_replicas_are_the_same_with_real_numbers(name: str, format: Any) -> None:
    """Sums of real numbers depend on their order, which therefore is the same on every rank."""
    for world_size in (3, 5, 8):
        generator = torch.Generator().manual_seed(world_size)
        shared = torch.randn(5_000, generator=generator) ** 3  # so that entries meet
        work = [torch.randn(5_000, generator=generator) + shared for _ in range(world_size)]
        results = run_baseline(sums_of(name, 200, EntryCodec(format, torch.float32), world_size, 5_000), work)
        assert all(torch.equal(r.indices, results[0].indices) for r in results)
        assert all(torch.equal(r.values, results[0].values) for r in results)


@pytest.mark.parametrize("name", NAMES)
def test_sums_that_are_not_finite(name: str) -> None:
    work = [torch.ones(1000) for _ in range(3)]
    for rank, values in enumerate(work):
        values[7::50] = -3e38 if rank == 2 else 3e38
    before = [values.clone() for values in work]
    with pytest.raises(RuntimeError, match="their sum over the ranks is not"):
        run_baseline(sums_of(name, 40, EntryCodec("compact", torch.float32), 3, 1000), work)
    assert all(torch.equal(values, old) for values, old in zip(work, before, strict=True))


@pytest.mark.parametrize("name", ["topka", "topkdsa"])
@given(inputs())
@settings(max_examples=60, deadline=None)
def test_all_selected_entries_arrive(name: str, given_inputs: Any) -> None:
    work, k = given_inputs
    masks = [top(values, k) for values in work]
    expected = torch.stack([torch.where(mask, v, 0.0) for mask, v in zip(masks, work, strict=True)]).sum(0)
    rest = [torch.where(mask, 0.0, values) for mask, values in zip(masks, work, strict=True)]
    results = run_baseline(sums_of(name, k, EntryCodec("exact", torch.float64), len(work), work[0].numel()), work)
    assert torch.equal(dense_of(results[0], work[0].numel()), expected)
    for mine, right, mask in zip(work, rest, masks, strict=True):
        # Entries that cancel are no part of a dense message, so those who made them keep them.
        cancelled = mask & (expected == 0)
        assert torch.equal(mine[~cancelled], right[~cancelled])


@given(inputs())
@settings(max_examples=60, deadline=None)
def test_the_tree(given_inputs: Any) -> None:
    work, k = given_inputs
    held = [(torch.where(top(v, k), v, 0.0), top(v, k)) for v in work]
    distance = 1
    while distance < len(work):
        for rank in range(0, len(work) - distance, 2 * distance):
            values, entries = held[rank][0] + held[rank + distance][0], held[rank][1] | held[rank + distance][1]
            where = torch.nonzero(entries).squeeze(1)
            kept = torch.zeros_like(entries)
            kept[where[top(values[where], k)]] = True
            held[rank] = torch.where(kept, values, 0.0), kept
        distance *= 2
    results = run_baseline(sums_of("gtopk", k, EntryCodec("exact", torch.float64), len(work), work[0].numel()), work)
    assert torch.equal(dense_of(results[0], work[0].numel()), held[0][0])
    assert torch.equal(results[0].indices, torch.nonzero(held[0][1]).squeeze(1))


def test_estimates_are_used_for_several_steps() -> None:
    """Thresholds of one step serve the next; regions follow the load; what one rank has is spread over all."""
    torch.manual_seed(0)
    world_size, numel, k = 5, 4000, 100
    estimates = [OkTopkEstimates(threshold_interval=4, region_interval=8) for _ in range(world_size)]
    sums = sums_of("oktopk", k, EntryCodec("exact", torch.float64), world_size, numel)
    for each, its in zip(sums, estimates, strict=True):
        each.memory = its
    work = [torch.zeros(numel, dtype=torch.float64) for _ in range(world_size)]
    thresholds, counts = [], []
    for _ in range(12):
        gradients = [torch.randint(-50, 51, (numel,)).double() for _ in range(world_size)]
        for values, gradient in zip(work, gradients, strict=True):
            values += gradient
            values[: numel // 20] *= 8  # where most of the large entries are
        before = torch.stack(work).sum(0)
        results = run_baseline(sums, work)
        assert torch.equal(dense_of(results[0], numel) + sum(work), before)
        thresholds.append(estimates[0].global_threshold)
        counts.append(len(results[0]))
        assert len({tuple(e.bounds) for e in estimates}) == 1 and len({e.global_threshold for e in estimates}) == 1
    assert thresholds[0] == thresholds[3] != thresholds[4], "not re-estimated when it was due, or too often"
    assert counts[0] >= k and estimates[0].bounds[1] < numel // world_size
    again = OkTopkEstimates(**asdict(estimates[0]))
    assert again == estimates[0]
