"""Sharded tables end in the bits of whole ones under plain DDP, in every kind of loop.

Prevents: rows that are lost, applied twice, applied to another row or in another step than plain DDP would; rows read
before their update; and moments or bias corrections that differ because an update came in two parts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.embedding.loops import LOOPS, plain, run
from tests.support.embedding.twins import CONFIG, OPTIMIZERS, Tables, Twins, batches
from tests.support.workers import WorkerPools


@pytest.mark.quick("2-*-prefetch")
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_plain_loop(workers: WorkerPools, world_size: int, optimizer: str, prefetch: bool) -> None:
    results = workers(world_size).run(run, "plain", optimizer, prefetch, CONFIG)
    assert [result[:2] for result in results] == [(0.0, 0.0)] * world_size
    assert all((delayed > 0) == prefetch for *_, delayed in results)  # the split has really run, or really not


@pytest.mark.quick("2-*-prefetch", "3-skip_steps-no_prefetch")
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("loop", [name for name in LOOPS if name != "plain"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_other_loops(workers: WorkerPools, world_size: int, loop: str, prefetch: bool) -> None:
    results = workers(world_size).run(run, loop, "sparse_adam", prefetch, CONFIG)
    assert [result[:2] for result in results] == [(0.0, 0.0)] * world_size
    if prefetch:
        assert all(delayed > 0 for *_, delayed in results)


class InBfloat16(Tables):
    """Small whole numbers are exact in it, and so are their sums."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.bfloat16()


def in_bfloat16(rank: int, world_size: int, prefetch: bool) -> float:
    twins = Twins.of(world_size, "sgd", model=InBfloat16)
    assert twins.ours.tables is not None
    twins.train(plain, batches(rank, world_size, 6), prefetch)
    gap = twins.gap()
    twins.ours.tables.close()
    return gap


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
def test_bfloat16(workers: WorkerPools, prefetch: bool) -> None:
    assert workers(2).run(in_bfloat16, prefetch) == [0.0, 0.0]


@pytest.mark.quick("2d-False", "horizontal-True")
@pytest.mark.parametrize("deduplicate", [True, False])
@pytest.mark.parametrize("way", ["2d", "horizontal", "none"])
def test_other_schedules(workers: WorkerPools, way: str, deduplicate: bool) -> None:
    config = replace(CONFIG, schedule=way, deduplicate=deduplicate)  # type: ignore[arg-type]
    results = workers(3).run(run, "plain", "sparse_adam", True, config)
    assert [result[:2] for result in results] == [(0.0, 0.0)] * 3
    assert all((delayed > 0) == (way == "2d") for *_, delayed in results)


@pytest.mark.parametrize("loop", ["accumulate", "sum_losses"])
def test_rows_that_come_several_times(workers: WorkerPools, loop: str) -> None:
    """Those of several forwards are put together, of which each may have a row more than once."""
    results = workers(2).run(run, loop, "sparse_adam", True, replace(CONFIG, deduplicate=False))
    assert [result[:2] for result in results] == [(0.0, 0.0)] * 2
