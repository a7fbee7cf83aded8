"""Lanes on NCCL, between real processes: collectives and exchanges in stream order, with whole numbers.

Prevents: results that are read before a stream has written them, and memory that is used again too early.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ddp_hooks.comm import Algorithm, Lanes, LaneSettings, Partition, Recorder, aligned_bounds
from ddp_hooks.comm.algorithms.collectives import direct_reduce_scatter, pairwise_exchange, ring_all_gather
from tests.support.devices import rank_device
from tests.support.exact_native import CASES, turns
from tests.support.lanes import whole
from tests.support.workers import WorkerPools

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def lanes_of(num_lanes: int) -> Lanes:
    assert dist.group.WORLD is not None
    return Lanes(dist.group.WORLD, num_lanes, rank_device(), LaneSettings(timeout_s=30), Recorder())


def collectives(rank: int, world_size: int, num_lanes: int) -> tuple[int, bool]:
    """All submitted before any is waited for, behind a computation that takes a while; and how many were native."""
    lanes, device = lanes_of(num_lanes), rank_device()
    slow = torch.randn(2048, 2048, device=device)
    submitted = []
    for index, numel in enumerate([0, 3, 130, 32 * world_size, 1001, 300_007]):
        dtype = DTYPES[index % 4]
        values = [whole(numel, 10 * index + r, dtype) for r in range(world_size)]
        bounds = aligned_bounds(numel, world_size, values[0].element_size())
        for _ in range(10):
            slow = (slow @ slow).clamp(-1, 1)
        flat = values[rank].to(device) + (slow[0, 0] * 0).to(dtype)  # written late
        partition = Partition(flat, bounds)
        submitted.append((lanes.reduce_scatter([partition], f"numbers {index}"), partition, torch.stack(values).sum(0)))
    gathers = []
    for scatter, partition, total in submitted:
        scatter.wait()
        own = slice(partition.bounds[rank], partition.bounds[rank + 1])
        assert torch.equal(partition.flat[own].cpu(), total[own])
        gathers.append(lanes.all_gather([partition], "numbers"))
    for gather, (_, partition, total) in zip(gathers, submitted, strict=True):
        gather.wait()
        assert torch.equal(partition.flat.cpu(), total)
    native = lanes.native
    lanes.close()
    return len(submitted), native


@pytest.mark.parametrize("num_lanes", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives(gpu_workers: WorkerPools, world_size: int, num_lanes: int) -> None:
    assert set(gpu_workers(world_size).run(collectives, num_lanes)) == {(6, True)}


def exchanges(rank: int, world_size: int) -> None:
    """Generators, as batches of point-to-point messages."""
    lanes, device = lanes_of(2), rank_device()
    values = [whole(100 * world_size, r) for r in range(world_size)]
    chunks = list(values[rank].to(device).chunk(world_size))

    def scatter_and_gather() -> Algorithm:
        yield from direct_reduce_scatter(chunks, rank, torch.empty(100 * (world_size - 1), device=device))
        yield from ring_all_gather(chunks, rank)

    outgoing = [torch.full((rank + peer,), float(10 * rank + peer), device=device) for peer in range(world_size)]
    incoming = [torch.zeros(rank + peer, device=device) for peer in range(world_size)]
    works = [
        lanes.run(scatter_and_gather(), "a sum"),
        lanes.run(pairwise_exchange(outgoing, incoming, rank), "an exchange"),
    ]
    for work in works:
        work.wait()
    assert torch.equal(torch.cat(chunks).cpu(), torch.stack(values).sum(0))
    for peer in range(world_size):
        assert peer == rank or bool((incoming[peer] == 10 * peer + rank).all())
    lanes.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_exchanges(gpu_workers: WorkerPools, world_size: int) -> None:
    gpu_workers(world_size).run(exchanges)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_exact_16_bits(gpu_workers: WorkerPools, world_size: int, name: str) -> None:
    kind, expected = CASES[name]
    for found in gpu_workers(world_size).run(turns, kind, len(expected)):
        assert [turn.narrow for turn in found] == expected
