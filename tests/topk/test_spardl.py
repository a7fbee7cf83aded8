"""SparDL on the in-process fabric, for any number of ranks and teams, against a slow twin on whole vectors.

Prevents: gradients that are lost or counted twice, replicas that differ, messages that grow.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_hooks.comm import num_rounds, run_on_fabric
from ddp_hooks.comm.algorithms.bruck import reduce_scatter_steps
from ddp_hooks.sparse import SparseSum, SparseVector, Sparsity
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.common import block_counts
from ddp_hooks.sparse.spardl import TopHController
from tests.support.topk.algorithms import returning, teams_of
from tests.support.topk.twins import DenseTwin


def run_spardl(
    work: list[Tensor],
    k: int,
    num_teams: int,
    sag: Any,
    collection: Any,
    wire: EntryCodec,
    gradients: list[Tensor] | None = None,
) -> list[SparseVector]:
    """One exchange of all ranks; ``work``, to which gradients are added, becomes their residuals."""
    results: dict[int, SparseVector] = {}
    sparsity = Sparsity("spardl", k, wire, num_teams, sag, collection)
    sums = [SparseSum(sparsity, values.numel(), rank, len(work)) for rank, values in enumerate(work)]
    added = gradients if gradients is not None else [None] * len(work)
    exchanges = [each.run(values, gradient) for each, values, gradient in zip(sums, work, added, strict=True)]
    run_on_fabric([returning(exchange, results, rank) for rank, exchange in enumerate(exchanges)])
    return [results[rank] for rank in range(len(work))]


@st.composite
def exchanges(draw: Any) -> tuple[list[Tensor], int, int, str]:
    world_size = draw(st.integers(1, 17))
    num_teams, sag = draw(st.sampled_from(teams_of(world_size)))
    numel = draw(st.integers(0, 90))
    k = draw(st.integers(1, max(1, numel)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    largest = draw(st.sampled_from([1, 3, 1000]))  # ties and zeros, or neither
    work = [
        torch.randint(-largest, largest + 1, (numel,), generator=generator).double() for _ in range(world_size)
    ]
    return work, k, num_teams, sag


@given(exchanges(), st.sampled_from(["global", "partial", "local"]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_as_the_twin_has_it(exchange: Any, collection: str, in_one_pass: bool) -> None:
    """The gradient is added in the pass that selects, or was added before."""
    work, k, num_teams, sag = exchange
    before = [values.clone() for values in work]
    twin = DenseTwin(work, k, num_teams, collection)
    gradients = None
    if in_one_pass:
        gradients = [values.flip(0) for values in work]
        work = [values - gradient for values, gradient in zip(work, gradients, strict=True)]
    results = run_spardl(work, k, num_teams, sag, collection, EntryCodec("exact", torch.float64), gradients)
    twin.reduce_scatter()
    if num_teams > 1 and sag == "r":
        twin.recursive_all_gather()
    elif num_teams > 1:
        twin.bruck_all_gather([max(1, round(count / num_teams)) if count else 0 for count in twin.counts])
    expected, residuals = twin.finish()
    for result in results:
        dense = torch.zeros_like(expected)
        dense[result.indices] = result.values
        assert torch.equal(dense, expected)
        assert torch.equal(result.indices, results[0].indices)
    for mine, right in zip(work, residuals, strict=True):
        assert torch.equal(mine, right)
    if collection == "global":
        assert torch.equal(expected + sum(work), sum(before)), "something was lost, or counted twice"


@given(exchanges())
@settings(max_examples=60, deadline=None)
def test_what_rounding_takes_is_kept(exchange: Any) -> None:
    """Sums of small integers are exact in float64, also with what bfloat16 takes from them."""
    work, k, num_teams, sag = exchange
    before = torch.stack(work).sum(0)
    results = run_spardl(work, k, num_teams, sag, "global", EntryCodec("compact", torch.float64))
    dense = torch.zeros_like(before)
    dense[results[0].indices] = results[0].values
    assert torch.equal(results[0].values, results[0].values.bfloat16().double())
    assert all(torch.equal(result.values, results[0].values) for result in results)
    assert torch.equal(dense + sum(work), before)


@pytest.mark.parametrize("collection", ["partial", "local"])
def test_rounding_is_kept_under_every_rule(collection: str) -> None:
    """Two ranks with the same large entries: all of them arrive, but for what bfloat16 takes from them."""
    work = [torch.zeros(100, dtype=torch.float64) for _ in range(2)]
    for values in work:
        values[:10] = 1000.0 + torch.arange(10)
    results = run_spardl(work, 20, 1, "r", collection, EntryCodec("compact", torch.float64))
    dense = torch.zeros(100, dtype=torch.float64)
    dense[results[0].indices] = results[0].values
    assert any(values.any() for values in work)
    assert torch.equal(dense + sum(work), torch.where(torch.arange(100) < 10, 2000.0 + 2 * torch.arange(100), 0.0))


def test_how_much_is_lost() -> None:
    """Eight ranks' real gradients at 1 % lose nothing, or a good part of the entries that ranks discard on the way."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(20_000, generator=generator).double() ** 3 for _ in range(8)]
    lost = {}
    for collection in ("global", "partial", "local"):
        work = [gradient.clone() for gradient in gradients]
        result = run_spardl(work, 200, 1, "r", collection, EntryCodec("exact", torch.float64))[0]
        missing = torch.stack(gradients).sum(0) - torch.stack(work).sum(0)
        missing[result.indices] -= result.values
        lost[collection] = float(missing.abs().sum() / result.values.abs().sum())
    print(f"lost, as a part of what was applied: {lost}")
    assert lost["global"] < 1e-12 < 0.001 < lost["partial"] < lost["local"], lost


@pytest.mark.parametrize("world_size", [3, 4, 6, 8])
def test_replicas_are_the_same_with_real_numbers(world_size: int) -> None:
    """Sums of real numbers depend on their order, which therefore is the same on every rank."""
    generator = torch.Generator().manual_seed(world_size)
    inputs = [torch.randn(20_000, generator=generator) ** 3 for _ in range(world_size)]
    shared = torch.randn(20_000, generator=generator) ** 3  # so that entries meet
    for num_teams, sag in teams_of(world_size):
        for format in ("exact", "compact"):
            work = [values + shared for values in inputs]
            results = run_spardl(work, 400, num_teams, sag, "global", EntryCodec(format, torch.float32))
            for result in results:
                assert torch.equal(result.indices, results[0].indices), (num_teams, sag)
                assert torch.equal(result.values, results[0].values), (num_teams, sag)


@pytest.mark.parametrize("format", ["exact", "compact"])
@pytest.mark.parametrize("k", [4, 40])
@pytest.mark.parametrize("opposite", ["none", "one", "half"])
@pytest.mark.filterwarnings("error")  # of numpy, which would end one rank alone
def test_sums_that_are_not_finite(format: Any, opposite: str, k: int) -> None:
    """They are told, and every rank keeps what it had; infinities that meet make sums that are not numbers."""
    for num_teams, sag in teams_of(4):
        work = [torch.ones(1000) for _ in range(4)]
        for rank, values in enumerate(work):
            other_half = rank % 2 == 1 if num_teams == 1 else rank >= 2  # so that those of a kind meet first
            negative = {"none": False, "one": rank == 3, "half": other_half}[opposite]
            values[[7, 57, 600, 601, 999]] = -3e38 if negative else 3e38
        before = [values.clone() for values in work]
        with pytest.raises(RuntimeError, match="their sum over the ranks is not"):
            run_spardl(work, k, num_teams, sag, "global", EntryCodec(format, torch.float32))
        assert all(torch.equal(values, old) for values, old in zip(work, before, strict=True))


@pytest.mark.parametrize("size", range(1, 40))
def test_theorem_1(size: int) -> None:
    """Every block is sent once by all but its owner, and what comes in is a block that is still held."""
    holding = [set(range(size)) for _ in range(size)]
    for round_index in range(num_rounds(size)):
        for worker in range(size):
            step = reduce_scatter_steps(worker, size)[round_index]
            assert set(step.outgoing) <= holding[worker]
            holding[worker] -= set(step.outgoing)
        for worker in range(size):
            step = reduce_scatter_steps(worker, size)[round_index]
            assert set(step.incoming) <= holding[worker]
            assert step.incoming == reduce_scatter_steps(step.source, size)[round_index].outgoing
    assert all(blocks == {worker} for worker, blocks in enumerate(holding))


def test_the_papers_example() -> None:
    """Example 1: worker 1 of six, blocks counted from 1."""
    bags = [step.outgoing for step in reduce_scatter_steps(0, 6)]
    assert [[block + 1 for block in bag] for bag in bags] == [[5, 6], [3, 4], [2]]


def test_at_least_one_entry_of_every_block_that_has_any() -> None:
    assert block_counts(2, (0, 3, 3, 10, 20)) == (1, 0, 1, 1)
    assert sum(block_counts(1000, tuple(range(0, 70_001, 10_000)))) == 1000


def test_the_controller_settles() -> None:
    """Teams whose entries overlap by half: the number sent settles where as many remain as the block keeps."""
    controller = TopHController(1000, 4)
    assert controller.count == 250
    seen = []
    for _ in range(200):
        seen.append(controller.count)
        controller.observe(round(controller.count * 2.5))
    assert all(250 <= count <= 1000 for count in seen)
    assert abs(sum(seen[100:]) / 100 - 400) < 20, seen[100:]


def test_the_controller_leaves_its_bounds() -> None:
    controller = TopHController(1000, 4)
    for _ in range(50):
        controller.observe(0)  # nothing remains: send all that may be sent
    assert controller.count > 900
    for _ in range(100):
        controller.observe(5000)
    assert controller.count < 350
    again = TopHController(**asdict(controller))
    assert again == controller
