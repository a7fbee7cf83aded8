"""The same algorithms between real processes: bit for bit what the fabric has, also with real numbers.

Prevents: sums whose order depends on the executor, and messages that only fit together in one process.
"""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Lanes, LaneSettings, Recorder, run_on_fabric
from ddp_hooks.sparse import Name, SparseSum, SparseVector, Sparsity
from ddp_hooks.sparse.codec import EntryCodec
from tests.support.topk.algorithms import returning, teams_of
from tests.support.workers import WorkerPools

NUMEL, K = 70_001, 700


def inputs(rank: int) -> tuple[Tensor, Tensor]:
    """A residual and a gradient."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL, generator=generator) ** 3, torch.randn(NUMEL, generator=generator)


def every_sparsity(world_size: int) -> list[Sparsity]:
    """Every algorithm, in both formats."""
    sparsities = []
    for wire in (EntryCodec("exact", torch.float32), EntryCodec("compact", torch.float32)):
        for num_teams, sag in teams_of(world_size):
            sparsities.append(Sparsity("spardl", K, wire, num_teams, sag))  # type: ignore[arg-type]
        sparsities += [Sparsity(name, K, wire) for name in get_args(Name) if name != "spardl"]
    return sparsities


def on_lanes_and_on_the_fabric(rank: int, world_size: int) -> list[Sparsity]:
    """The settings with which the two differ."""
    assert dist.group.WORLD is not None
    settings = LaneSettings(timeout_s=20, stall_warning_s=10)
    lanes = Lanes(dist.group.WORLD, 2, torch.device("cpu"), settings, Recorder())
    different, works, mine = [], [], []
    for sparsity in every_sparsity(world_size):
        results: dict[int, SparseVector] = {}
        residual, gradient = inputs(rank)
        algorithm = SparseSum(sparsity, NUMEL, rank, world_size).run(residual, gradient)
        works.append(lanes.run(returning(algorithm, results, rank), str(sparsity)))
        mine.append((results, residual))
    for work in works:
        work.wait()
    for sparsity, (results, residual) in zip(every_sparsity(world_size), mine, strict=True):
        pairs = [inputs(r) for r in range(world_size)]
        sums = [SparseSum(sparsity, NUMEL, r, world_size).run(*pair) for r, pair in enumerate(pairs)]
        expected: dict[int, SparseVector] = {}
        run_on_fabric([returning(algorithm, expected, r) for r, algorithm in enumerate(sums)])
        result = results[rank]
        same = torch.equal(result.indices, expected[rank].indices) and torch.equal(result.values, expected[rank].values)
        if not (same and torch.equal(residual, pairs[rank][0]) and len(result)):
            different.append(sparsity)
    lanes.close()
    return different


@pytest.mark.quick("2", "3")
@pytest.mark.parametrize(
    "world_size", [1, 2, 3, 4, *(pytest.param(size, marks=pytest.mark.slow) for size in (5, 6, 7, 8))]
)
def test_processes_do_what_the_fabric_does(workers: WorkerPools, world_size: int) -> None:
    pool = workers(world_size)
    assert pool.run(on_lanes_and_on_the_fabric, timeout_s=100) == [[]] * world_size
    if world_size > 4:
        pool.end()  # large pools are used once
