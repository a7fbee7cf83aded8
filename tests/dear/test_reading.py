"""Code that reads or writes parameters right after step(), outside of any forward, does as with plain DDP, bit for bit.

Prevents: values of the step before in averages, copies, files and logs; clamps that a gather overwrites on some ranks.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ddp_hooks.comm.executors.lanes import ThreadLane
from tests.support.dear.reading import CONFIGS, differing, train
from tests.support.dear.twins import CONFIG
from tests.support.workers import WorkerPools


@pytest.mark.quick("sharded", "replicated")
@pytest.mark.parametrize("kind", CONFIGS)
def test_reads_and_writes_after_a_step(workers: WorkerPools, kind: str) -> None:
    assert workers(2).run(differing, kind) == [[], []]


def read_while_it_travels(rank: int, world_size: int) -> tuple[bool, bool]:
    """Gathers are slow, so that a read too early and a write too early show."""
    run_slices = ThreadLane._run_slices

    def slowly(lane: ThreadLane, submission: Any) -> None:
        if submission.work.label.startswith("all-gather"):
            time.sleep(0.01)
        run_slices(lane, submission)

    with mock.patch.object(ThreadLane, "_run_slices", slowly):
        ours, _ = train("vector", replace(CONFIG, fusion="none", fusion_mb=None))
        replicated, _ = train("clamp", replace(CONFIG, update="replicated", fusion="none", fusion_mb=None))
    vector, _ = train("vector", None)
    clamped, _ = train("clamp", None)
    return torch.equal(ours[-1], vector[-1]), torch.equal(replicated[-1], clamped[-1])


def test_slow_gathers_are_awaited(workers: WorkerPools) -> None:
    assert workers(2).run(read_while_it_travels) == [(True, True)] * 2
