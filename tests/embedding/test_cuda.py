"""Sharded tables on NCCL end in the bits of whole ones under plain DDP.

Prevents: rows that are sent, applied or read before a stream has written them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.embedding import replicated
from tests.support.embedding.hooks import HOOKS
from tests.support.embedding.loops import LOOPS, NUM_BATCHES, run
from tests.support.embedding.twins import CONFIG, OPTIMIZERS, Twins, batches
from tests.support.workers import WorkerPools


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_plain_loop(gpu_workers: WorkerPools, optimizer: str, prefetch: bool) -> None:
    results = gpu_workers(2).run(run, "plain", optimizer, prefetch, CONFIG)
    # torch adds a single row with another rounding (x + a * b at once) than several, and a part may be a single row.
    tolerance = 1e-6 if optimizer == "adagrad" and prefetch else 0.0
    assert all(gap <= tolerance and optimizer_gap == 0.0 for gap, optimizer_gap, *_ in results)
    assert all((delayed > 0) == prefetch for *_, delayed in results)


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_ranks(gpu_workers: WorkerPools, world_size: int) -> None:
    results = gpu_workers(world_size).run(run, "plain", "sparse_adam", True, CONFIG)
    assert [result[:2] for result in results] == [(0.0, 0.0)] * world_size


@pytest.mark.parametrize("loop", ["accumulate", "accumulate_with_sync", "skip_steps", "evaluate_between", "schedule"])
def test_other_loops(gpu_workers: WorkerPools, loop: str) -> None:
    results = gpu_workers(2).run(run, loop, "sparse_adam", True, CONFIG)
    assert [result[:2] for result in results] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("way", ["horizontal", "none"])
def test_other_schedules(gpu_workers: WorkerPools, way: Any) -> None:
    results = gpu_workers(2).run(run, "plain", "sparse_adam", True, replace(CONFIG, schedule=way))
    assert [result[:2] for result in results] == [(0.0, 0.0)] * 2


def beside(rank: int, world_size: int, name: str) -> float:
    states: list[Any] = []
    twins = Twins.of(world_size, wrap=lambda *given: states.append(HOOKS[name](*given)))
    assert twins.ours.tables is not None
    twins.train(LOOPS["plain"], batches(rank, world_size, NUM_BATCHES), True)
    states[0].synchronize()
    gap = twins.gap()
    states[0].close()
    twins.ours.tables.close()
    return gap


@pytest.mark.parametrize("name", ["dear", "dear_inspecting", "dear_replicated"])
def test_beside_hooks(gpu_workers: WorkerPools, name: str) -> None:
    assert gpu_workers(2).run(beside, name) == [0.0, 0.0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_replicated_tables(gpu_workers: WorkerPools, world_size: int) -> None:
    for gaps, sent in gpu_workers(world_size).run(replicated.train, "dear"):
        assert max(gaps) == 0.0 and (sent > 0) == (world_size > 1)
