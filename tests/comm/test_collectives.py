"""Collectives on the in-process fabric, for any number of ranks and any sizes, against a slow and obvious twin."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    AlphaBeta,
    Partition,
    Recv,
    Send,
    aligned_bounds,
    direct_reduce_scatter,
    pairwise_exchange,
    ring_all_gather,
    run_on_fabric,
)
from ddp_hooks.comm.executors.fabric import FabricError
from ddp_hooks.comm.executors.slices import WINDOW, all_gather_slices, reduce_scatter_slices


def divisors_of(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


sizes_of_chunks = st.integers(1, 17).flatmap(lambda p: st.lists(st.integers(0, 9), min_size=p, max_size=p))


def chunks_of(sizes: list[int], rank: int, make: Callable[[int, int], Tensor]) -> list[Tensor]:
    return [make(rank, size) for size in sizes]


def whole(rank: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randint(-99, 100, (size,), generator=generator).float()


def real(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + size))


def in_order(values: list[Tensor]) -> Tensor:
    """``((g0 + g1) + g2) + ...``"""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


@given(sizes_of_chunks, st.integers(1, 5), st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]))
@settings(max_examples=100)
def test_reduce_scatter_adds_in_the_order_of_ranks(sizes: list[int], divisor: int, dtype: torch.dtype) -> None:
    world_size = len(sizes)
    make = whole if dtype == torch.int64 else real
    divisor = 1 if dtype == torch.int64 else divisor
    chunks = [[chunk.to(dtype) for chunk in chunks_of(sizes, rank, make)] for rank in range(world_size)]
    before = [[chunk.clone() for chunk in row] for row in chunks]
    wide = torch.float32 if dtype == torch.bfloat16 else dtype  # rounded once, at the end
    scratch = [torch.zeros((world_size - 1) * size, dtype=dtype) for size in sizes]
    traffic = run_on_fabric([direct_reduce_scatter(chunks[r], r, scratch[r], divisor) for r in range(world_size)])
    for rank in range(world_size):
        total = in_order([before[r][rank].to(wide) for r in range(world_size)])
        assert torch.equal(chunks[rank][rank], (total / divisor if divisor > 1 else total).to(dtype))
        assert all(torch.equal(chunks[rank][c], before[rank][c]) for c in range(world_size) if c != rank)
        others = sum(sizes) - sizes[rank]
        assert traffic[rank].sent_bytes == dtype.itemsize * others, "every chunk but its own is sent exactly once"
        assert traffic[rank].rounds == (world_size > 1)


@given(sizes_of_chunks)
@settings(max_examples=75)
def test_all_gather_copies_in_place(sizes: list[int]) -> None:
    world_size = len(sizes)
    owned = [whole(rank, sizes[rank]) for rank in range(world_size)]
    chunks = [
        [owned[c].clone() if c == r else torch.full((sizes[c],), float("nan")) for c in range(world_size)]
        for r in range(world_size)
    ]
    traffic = run_on_fabric([ring_all_gather(chunks[r], r) for r in range(world_size)])
    assert all(each.rounds == world_size - 1 for each in traffic)
    for rank in range(world_size):
        assert all(torch.equal(chunks[rank][c], owned[c]) for c in range(world_size))


@given(st.integers(1, 9), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_pairwise_exchange(world_size: int, random: object) -> None:
    size = [[(3 * a + 5 * b) % 4 for b in range(world_size)] for a in range(world_size)]
    outgoing = [[torch.full((size[a][b],), 100 * a + b) for b in range(world_size)] for a in range(world_size)]
    incoming = [[torch.zeros(size[b][a], dtype=torch.long) for b in range(world_size)] for a in range(world_size)]
    run_on_fabric([pairwise_exchange(outgoing[r], incoming[r], r) for r in range(world_size)])
    for a in range(world_size):
        for b in range(world_size):
            assert a == b or torch.equal(incoming[a][b], outgoing[b][a])


@given(
    st.integers(1, 9).flatmap(lambda p: st.tuples(st.just(p), st.sampled_from(divisors_of(p)))),
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.integers(1, 200),
)
@example((9, 1), [300], 200)  # messages would be too large but for the limit of memory
@settings(max_examples=25)
def test_slices_cover_everything_once(ranks: tuple[int, int], numels: list[int], slice_bytes: int) -> None:
    """Slicing changes messages, not results: a gather after a scatter of the same partitions is an all-reduce."""
    world_size, node_size = ranks
    partitions = [
        [Partition(whole(r, numel), aligned_bounds(numel, world_size, 4, 16)) for numel in numels]
        for r in range(world_size)
    ]
    expected = [torch.stack([partitions[r][i].flat for r in range(world_size)]).sum(0) for i in range(len(numels))]
    for make in (reduce_scatter_slices, all_gather_slices):
        slices = [list(make(partitions[r], r, slice_bytes, node_size=node_size)) for r in range(world_size)]
        assert len({len(each) for each in slices}) == 1
        for together in zip(*slices, strict=True):
            largest = max(4 * slice_bytes / WINDOW, 4 * world_size)
            assert all(each.scratch_numel * 4 <= largest for each in together), "memory"
            run_on_fabric([each.start(torch.empty(each.scratch_numel)) for each in together])
    for r in range(world_size):
        assert all(torch.equal(partitions[r][i].flat, expected[i]) for i in range(len(numels)))


@given(st.integers(0, 10_000), st.integers(1, 17), st.sampled_from([1, 2, 4, 8]))
def test_bounds_are_equal_aligned_ranges_and_a_tail(numel: int, world_size: int, element_size: int) -> None:
    bounds = aligned_bounds(numel, world_size, element_size)
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == numel and len(set(lengths[:-1])) <= 1
    assert all(length * element_size % 128 == 0 for length in lengths[:-1])
    assert lengths[-1] >= max(lengths) and lengths[-1] - lengths[0] < world_size * 128


def test_clock_follows_the_papers_equations() -> None:
    """DeAR, Eq. 4: t_ag = (P - 1) (alpha + d / P beta). A direct reduce-scatter takes the latency once (Eq. 3)."""
    world_size, numel = 8, 800
    cost = AlphaBeta(alpha_s=1e-3, beta_s_per_byte=1e-6)
    chunks = [list(torch.ones(numel).split(numel // world_size)) for _ in range(world_size)]
    bytes_s = (world_size - 1) / world_size * numel * 4e-6
    scatter = [direct_reduce_scatter(chunks[r], r, torch.empty(numel)) for r in range(world_size)]
    gather = [ring_all_gather(chunks[r], r) for r in range(world_size)]
    assert all(each.clock_s == pytest.approx(1e-3 + bytes_s) for each in run_on_fabric(scatter, cost))
    assert all(each.clock_s == pytest.approx(7e-3 + bytes_s) for each in run_on_fabric(gather, cost))


def test_a_rank_handles_one_message_after_the_other() -> None:
    def tells() -> Algorithm:
        yield [Send(0, torch.zeros(1))]

    def hears() -> Algorithm:
        yield [Recv(peer, torch.zeros(1)) for peer in (1, 2, 3)]

    first, *others = run_on_fabric([hears(), tells(), tells(), tells()], AlphaBeta(alpha_s=1.0), handling_s=0.25)
    assert first.clock_s == 1.75 and all(each.clock_s == 0 for each in others)


def test_fabric_names_who_waits() -> None:
    tensor = torch.zeros(2)

    def waits() -> object:
        yield [Recv(1, tensor)]

    def ends() -> object:
        yield []

    with pytest.raises(FabricError, match="rank 0 waits for a message from 1"):
        run_on_fabric([waits(), ends()])  # type: ignore[list-item]


def test_fabric_refuses_sides_that_differ() -> None:
    def sends() -> object:
        yield [Send(1, torch.zeros(3))]

    def receives() -> object:
        yield [Recv(0, torch.zeros(2))]

    with pytest.raises(FabricError, match=r"sent \(3,\).*expected \(2,\)"):
        run_on_fabric([sends(), receives()])  # type: ignore[list-item]


def test_fabric_notices_messages_that_nobody_receives() -> None:
    def sends() -> object:
        yield [Send(1, torch.zeros(3))]

    def ends() -> object:
        yield []

    with pytest.raises(FabricError, match="nobody received"):
        run_on_fabric([sends(), ends()])  # type: ignore[list-item]


def test_fabric_notices_memory_that_changed_under_way() -> None:
    def sends_and_writes() -> Any:
        values = torch.ones(3)
        yield [Send(1, values)]
        values[1] = 2.0

    def receives() -> Any:
        yield [Recv(0, torch.empty(3))]

    with pytest.raises(FabricError, match="rank 0 changed what it had sent to rank 1"):
        run_on_fabric([sends_and_writes(), receives()])
