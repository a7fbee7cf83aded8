"""Where requests' time goes: totals and trace of what really ran.

Prevents: phases that are counted twice, and traces of something else.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
import torch

from ddp_hooks.comm import Span
from ddp_hooks.coordination import Coordinator, CoordinatorConfig, seconds_by_name, write_trace
from ddp_hooks.coordination.stats import PHASES
from tests.support.workers import WorkerPools


def late(rank: int, world_size: int) -> list[Span]:
    """Rank 1 asks late for one request, and has its group's members far apart."""
    config = CoordinatorConfig(lanes=1, slice_mb=1, trace=True, timeout_s=20)
    coordinator = Coordinator(config=config, groups={"pair": ["a", "b"]})
    for _ in range(2):
        if rank == 1:
            time.sleep(0.1)
        coordinator.all_reduce(torch.ones(5), "single").wait()
        first = coordinator.all_reduce(torch.ones(5), "a")
        if rank == 1:
            time.sleep(0.1)
        second = coordinator.all_reduce(torch.ones(5), "b")
        first.wait()
        second.wait()
    coordinator.close()
    return coordinator.timeline()


@pytest.fixture(scope="module")
def spans(workers: WorkerPools) -> list[list[Span]]:
    return workers(2).run(late)


def test_who_waits_for_what(spans: list[list[Span]]) -> None:
    punctual, tardy = map(seconds_by_name, spans)
    assert set(punctual) == set(tardy) == {"single", "pair"}
    assert punctual["single"]["waits for others"] > tardy["single"]["waits for others"]
    assert tardy["pair"]["waits for data"] > punctual["pair"]["waits for data"]
    for each in spans:
        for name in ("single", "pair"):
            of_name = [span for span in each if span.track in PHASES and span.name == name]
            assert len(of_name) == 2 * len(PHASES)
            ordered = sorted(of_name, key=lambda span: (span.end_s, span.start_s))
            first = ordered[: len(PHASES)]
            assert [span.track for span in first] == list(PHASES)
            gaps = [after.start_s - before.end_s for before, after in itertools.pairwise(first)]
            assert max(map(abs, gaps)) < 1e-9, "one phase begins where the last one ends"


def test_trace(spans: list[list[Span]], tmp_path: Path) -> None:
    write_trace(spans[0], tmp_path / "trace.json", "rank 0")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [event for event in events if event["ph"] == "X" and event["name"] == "pair"]
    assert len(shown) >= 3 and any(event["name"].startswith("cycle") for event in events)
