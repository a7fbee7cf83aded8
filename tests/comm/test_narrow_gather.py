"""Gathers of which some ranges travel in 16 bits: those rounded to nearest, all others and the owner's as they were.

Prevents: a norm that is rounded with the matrices beside it, owners that lose their low bits, numbers that land in
another's place, buffers that grow with the number of ranks.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import (
    Lanes,
    LaneSettings,
    NarrowGather,
    Partition,
    Recorder,
    aligned_bounds,
    ring_all_gather,
    run_on_fabric,
)
from ddp_hooks.comm.algorithms.narrow import narrow_all_gather, narrow_scratch_bytes
from ddp_hooks.comm.algorithms.two_level import two_level_all_gather
from ddp_hooks.comm.executors.stream_lane import StreamLane
from tests.support.workers import WorkerPools

NUMEL = 1003
RANGES = [(), ((0, NUMEL),), ((0, 1),), ((NUMEL - 1, NUMEL),), ((3, 250), (251, 252), (400, 990))]


def values_of(rank: int) -> Tensor:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    values[:: 50 + rank] = torch.tensor([0.0, -0.0, torch.inf, 2.0**-133, 3.4e38, 1 + 2.0**-8]).repeat(4)[
        : len(values[:: 50 + rank])
    ]
    return values


def expected(bounds: tuple[int, ...], rank: int, rounded: tuple[tuple[int, int], ...]) -> Tensor:
    """Element by element: its owner's number, rounded where it is another rank's and in a range."""
    result = torch.empty(NUMEL)
    for owner, (start, end) in enumerate(itertools.pairwise(bounds)):
        whole = values_of(owner)
        for index in range(start, end):
            is_rounded = owner != rank and any(first <= index < last for first, last in rounded)
            result[index] = whole[index].bfloat16().float() if is_rounded else whole[index]
    return result


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("rounded", RANGES)
@pytest.mark.parametrize(("world_size", "node_size"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_numbers_and_bytes(world_size: int, node_size: int, rounded: tuple[tuple[int, int], ...]) -> None:
    wire, bounds = NarrowGather(rounded), aligned_bounds(NUMEL, world_size, 4)
    cuts = list(itertools.pairwise(bounds))
    flats, algorithms = [values_of(rank) for rank in range(world_size)], []
    for rank, flat in enumerate(flats):

        def gather(messages: list[Tensor], rank: int = rank) -> object:
            two = node_size > 1
            return two_level_all_gather(messages, rank, node_size) if two else ring_all_gather(messages, rank)

        scratch = torch.empty(narrow_scratch_bytes(cuts, wire), dtype=torch.uint8)
        algorithms.append(narrow_all_gather(flat, cuts, rank, wire, gather, scratch))  # type: ignore[arg-type]
    traffic = run_on_fabric(algorithms)
    assert all(same_bits(flat, expected(bounds, rank, rounded)) for rank, flat in enumerate(flats))
    num_rounded = sum(last - first for first, last in rounded)
    total = (world_size - 1) * (4 * NUMEL - 2 * num_rounded)
    assert sum(each.sent_bytes for each in traffic) == total


def gather_on_lanes(rank: int, world_size: int) -> None:
    """Lanes for CPUs, with several slices, and the lane for NCCL, whose stream verbs do nothing here."""
    assert dist.group.WORLD is not None
    settings = LaneSettings(slice_bytes=256, timeout_s=20, stall_warning_s=10)
    lanes = Lanes(dist.group.WORLD, 2, torch.device("cpu"), settings, Recorder(False))
    bounds = aligned_bounds(NUMEL, world_size, 4)
    everything = 0
    for lane in (lanes, StreamLane(dist.group.WORLD, torch.device("cpu"))):
        wires = [NarrowGather(rounded) for rounded in RANGES]
        partitions = [Partition(values_of(rank), bounds, wire) for wire in [*wires, None]]
        before = lane.traffic.sent_bytes
        lane.all_gather(partitions, "numbers").wait()
        for partition, rounded in zip(partitions, [*RANGES, ()], strict=True):
            assert same_bits(partition.flat, expected(bounds, rank, rounded))
        sent = torch.tensor(float(lane.traffic.sent_bytes - before))
        dist.all_reduce(sent)
        everything = (world_size - 1) * sum(each.nbytes for each in partitions)
        assert abs(float(sent) - everything) < world_size
        assert everything < (world_size - 1) * sum(each.flat.nbytes for each in partitions)
    for each in lanes._lanes:
        buffers = each._scratch.get(torch.uint8, [])  # type: ignore[union-attr]
        assert sum(buffer.nbytes for buffer in buffers) <= 2 * 4 * 256
    lanes.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_on_lanes(workers: WorkerPools, world_size: int) -> None:
    workers(world_size).run(gather_on_lanes)
