"""Work of one worker of the benchmark of coordination."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import (
    Lanes,
    LaneSettings,
    Partition,
    Recorder,
    Work,
    agree,
    aligned_bounds,
    direct_reduce_scatter,
    ring_all_gather,
    run_on_fabric,
)
from ddp_hooks.coordination import Coordinator, CoordinatorConfig
from ddp_hooks.coordination.grouping import equal_counts
from recipes.benchmarks.coordination import ControlJob, GroupingJob, Pattern
from recipes.benchmarks.emulation import SleepClock
from recipes.benchmarks.harness.worker import report, slowest, spare_the_collector, total

FORWARD_PART = 1 / 3  # of a step
LANES, SLICE_MB = 2, 1.0  # fixed: a link that is measured anew for every variant would not be the same
FARAWAY_S = 120.0  # a crowded machine is no failure
CONFIGS = {
    "coordinator": CoordinatorConfig(capacity=0, lanes=LANES, slice_mb=SLICE_MB, timeout_s=FARAWAY_S),
    "hierarchical": CoordinatorConfig(capacity=0, fan_out=2, lanes=LANES, slice_mb=SLICE_MB, timeout_s=FARAWAY_S),
    "bitvector": CoordinatorConfig(lanes=LANES, slice_mb=SLICE_MB, timeout_s=FARAWAY_S),
}


@dataclass
class Totals:
    """What agreeing has cost so far, on this rank: what it has sent, and how long it took."""

    messages: float
    nbytes: float
    cycles: float
    control_s: float
    control_cpu_s: float


class Variant(Protocol):
    """A way to all-reduce the tensors of a step."""

    tensors: list[Tensor]

    def ask(self, index: int) -> None:
        """The tensor of this number is ready."""

    def finish(self) -> None:
        """Wait for all that was asked for."""

    def totals(self) -> Totals: ...

    def close(self) -> None: ...


class Negotiated:
    """Each tensor by its name, agreed upon in every step."""

    def __init__(self, config: CoordinatorConfig, job: ControlJob) -> None:
        self.tensors = [torch.ones(job.numel) for _ in range(job.num_tensors)]
        self._coordinator = Coordinator(config=config)
        self._handles: list[Any] = []

    def ask(self, index: int) -> None:
        name = f"layers.{index}.weight"
        self._handles.append(self._coordinator.all_reduce(self.tensors[index], name, mean=True))

    def finish(self) -> None:
        for handle in self._handles:
            handle.wait()
        self._handles.clear()

    def totals(self) -> Totals:
        stats = self._coordinator.stats()
        return Totals(stats.control_messages, stats.control_bytes, stats.cycles, stats.control_s, stats.control_cpu_s)

    def close(self) -> None:
        self._coordinator.close()


class Verified:
    """Buckets in one order, which was compared once. What it sends beyond its data is counted, and would be control."""

    def __init__(self, job: ControlJob) -> None:
        world_size = dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        numbers = [str(index) for index in range(job.num_tensors)]
        self._buckets = [[int(each) for each in bucket] for bucket in equal_counts(numbers, job.num_buckets)]
        settings = LaneSettings(int(SLICE_MB * (1 << 20)), FARAWAY_S)
        agree({"buckets": self._buckets, "numel": job.numel}, None, group, "the schedule", settings)
        self._lanes = Lanes(group, LANES, torch.device("cpu"), settings, Recorder())
        self._partitions = []
        for bucket in self._buckets:
            flat = torch.ones(len(bucket) * job.numel)
            self._partitions.append(Partition(flat, aligned_bounds(flat.numel(), world_size, flat.element_size())))
        self.tensors: list[Tensor] = [each for part in self._partitions for each in part.flat.split(job.numel)]
        self._data = [_data_alone(part) for part in self._partitions]
        self._last_of = {bucket[-1]: number for number, bucket in enumerate(self._buckets)}
        self._under_way: list[Work] = []
        self._messages = self._nbytes = 0  # that data alone has taken so far

    def ask(self, index: int) -> None:
        number = self._last_of.get(index)
        if number is None:
            return
        lane, label = self._lanes.next_lane(), f"bucket {number}"
        lane.reduce_scatter([self._partitions[number]], label, self._lanes.world_size)
        self._under_way.append(lane.all_gather([self._partitions[number]], label))
        messages, nbytes = self._data[number]
        self._messages += messages
        self._nbytes += nbytes

    def finish(self) -> None:
        for work in self._under_way:
            work.wait()
        self._under_way.clear()

    def totals(self) -> Totals:
        moved = self._lanes.traffic
        return Totals(moved.rounds - self._messages, moved.sent_bytes - self._nbytes, 0, 0.0, 0.0)

    def close(self) -> None:
        self._lanes.close()


def _data_alone(partition: Partition) -> tuple[int, int]:
    """Rounds and bytes that this rank takes for a reduce-scatter and an all-gather, as counted on the fabric."""
    ranks = range(dist.get_world_size())
    copies = [Partition(torch.zeros_like(partition.flat), partition.bounds).ranges for _ in ranks]
    scratch = [torch.empty(len(ranks) * copies[rank][rank].numel()) for rank in ranks]
    scatter = run_on_fabric([direct_reduce_scatter(copies[rank], rank, scratch[rank]) for rank in ranks])
    gather = run_on_fabric([ring_all_gather(copies[rank], rank) for rank in ranks])
    mine = (scatter[dist.get_rank()], gather[dist.get_rank()])
    return sum(each.rounds for each in mine), sum(each.sent_bytes for each in mine)


def agree_in_turns(job: ControlJob) -> dict[str, Any]:
    """Runs every variant once per round and pattern, so that slow phases of the machine hit all of them alike."""
    variants: dict[str, Variant] = {
        name: Verified(job) if name == "verified" else Negotiated(CONFIGS[name], job) for name in job.variants
    }
    spare_the_collector()
    windows: dict[str, dict[str, list[dict[str, Any]]]] = {
        pattern: {name: [] for name in job.variants} for pattern in job.patterns
    }
    for round_index in range(job.rounds):
        for pattern in job.patterns:
            for name, variant in variants.items():
                window = _control_window(job, variant, pattern)
                windows[pattern][name].append(window)
                place = f"{dist.get_world_size()} workers, round {round_index + 1}/{job.rounds}, {pattern}"
                report(f"{place}, {name}: {window['most']['control_s'] * 1e3:.2f} ms of agreement per step")
    for name, variant in variants.items():
        assert all(bool((tensor == 1).all()) for tensor in variant.tensors), f"{name}: means of ones"
        variant.close()
    return {"windows": windows}


def _control_window(job: ControlJob, variant: Variant, pattern: Pattern) -> dict[str, Any]:
    """Per step: of the first rank, the most of any rank, and of all together."""
    clock = SleepClock()
    pause_s = job.step_s * (1 - FORWARD_PART) / job.num_tensors

    def step() -> None:
        if pattern == "spread":
            clock.sleep(job.step_s * FORWARD_PART)
        for index in range(job.num_tensors):
            if pattern == "spread":
                clock.sleep(pause_s)
            variant.ask(index)
        variant.finish()

    _repeat(step, job.warmup)
    before = variant.totals()
    step_s = _repeat(step, job.steps)
    after = variant.totals()
    costs = [(b - a) / job.steps for a, b in zip(astuple(before), astuple(after), strict=True)]
    own = [*costs, step_s]
    names = ("messages", "bytes", "cycles", "control_s", "control_cpu_s", "step_s")
    return {
        "first": dict(zip(names, own, strict=True)),
        "most": dict(zip(names, slowest(*own), strict=True)),
        "all": dict(zip(names, total(*own), strict=True)),
    }


def group_in_turns(job: GroupingJob) -> dict[str, Any]:
    """Runs every number of groups once per round."""
    tensors = {name: torch.ones(numel) for name, numel, _ in job.tensors}
    coordinators = {
        number: Coordinator(config=CONFIGS["bitvector"], groups=_groups(list(tensors), number)) for number in job.groups
    }
    spare_the_collector()
    windows: dict[str, list[dict[str, Any]]] = {str(number): [] for number in job.groups}
    for round_index in range(job.rounds):
        for number, coordinator in coordinators.items():
            window = _grouping_window(job, coordinator, tensors)
            windows[str(number)].append(window)
            place = f"round {round_index + 1}/{job.rounds}, {number or 'no'} groups"
            report(f"{place}: {window['step_s']:.3f} s per step, {window['collectives']:g} messages")
    for coordinator in coordinators.values():
        coordinator.close()
    assert all(bool((tensor == 1).all()) for tensor in tensors.values()), "means of ones"
    return {"windows": windows}


def _groups(names: list[str], number: int) -> dict[str, list[str]]:
    return {f"group {index}": group for index, group in enumerate(equal_counts(names, number))} if number else {}


def _grouping_window(job: GroupingJob, coordinator: Coordinator, tensors: dict[str, Tensor]) -> dict[str, Any]:
    clock = SleepClock()

    def step() -> None:
        clock.sleep(job.forward_s)
        handles = []
        for name, _, backward_s in job.tensors:
            clock.sleep(backward_s)
            handles.append(coordinator.all_reduce(tensors[name], name, mean=True))
        for handle in handles:
            handle.wait()

    _repeat(step, job.warmup)
    before = coordinator.stats()
    (step_s,) = slowest(_repeat(step, job.steps))
    after = coordinator.stats()
    sizes = Counter(after.message_sizes)
    sizes.subtract(before.message_sizes)
    return {
        "step_s": step_s,
        "collectives": (after.collectives - before.collectives) / job.steps,
        "cycles": (after.cycles - before.cycles) / job.steps,
        "sizes": {str(size): count / job.steps for size, count in sorted(sizes.items()) if count},
    }


def _repeat(step: Callable[[], None], times: int) -> float:
    """Seconds per step, from where all ranks have met."""
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(times):
        step()
    return (time.perf_counter() - start_s) / max(1, times)
