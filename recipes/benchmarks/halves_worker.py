"""Work of one worker that times all-reduces and their halves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_hooks.comm import Lanes, LaneSettings, Partition, Recorder, aligned_bounds, profile_link
from recipes.benchmarks.harness.worker import slowest

KINDS = ("all-reduce", "rsag", "reduce-scatter", "all-gather")


@dataclass(frozen=True)
class HalvesJob:
    """All kinds for all sizes, alternating.

    Args:
        sizes: bytes of the gradient, float32.
        rounds: timed runs of each; one more comes before.
    """

    sizes: tuple[int, ...]
    rounds: int = 9


def time_halves(job: HalvesJob) -> dict[str, Any]:
    """Return the seconds of every kind by size, of the slowest rank, per round."""
    group = dist.group.WORLD
    assert group is not None
    settings = LaneSettings(timeout_s=120.0)
    lanes = Lanes(group, 1, torch.device("cpu"), settings, Recorder())
    link = profile_link(lanes)
    lanes.grow(link.num_lanes)
    settings.slice_bytes = link.message_bytes
    seconds = {}
    for size in job.sizes:
        actions = _actions(lanes, torch.zeros(size // 4))
        kinds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(job.rounds + 1):
            for kind in KINDS:
                taken_s = _slowest_s(actions[kind])
                if number:  # the first one connects
                    kinds[kind].append(taken_s)
        seconds[str(size)] = kinds
    lanes.close()
    return {"seconds": seconds, "lanes": link.num_lanes, "message_bytes": link.message_bytes}


def _actions(lanes: Lanes, gradient: torch.Tensor) -> dict[str, Callable[[], object]]:
    partition = Partition(gradient, aligned_bounds(gradient.numel(), lanes.world_size, gradient.element_size()))

    def scatter() -> None:
        lanes.reduce_scatter([partition], "Fig. 5").wait()

    def gather() -> None:
        lanes.all_gather([partition], "Fig. 5").wait()

    def both() -> None:
        scatter()
        gather()

    return {
        "all-reduce": lambda: dist.all_reduce(gradient, group=lanes.group),
        "rsag": both,
        "reduce-scatter": scatter,
        "all-gather": gather,
    }


def _slowest_s(action: Callable[[], object]) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    action()
    return slowest(time.perf_counter() - start_s)[0]
