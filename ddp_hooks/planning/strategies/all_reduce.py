"""Strategies that all-reduce gradients: plain DDP, MG-WFBP and ByteScheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_hooks.comm import mebibytes, num_rounds
from ddp_hooks.planning.events import Process, Signal, SimulatedLane, Slice
from ddp_hooks.planning.rounds import Round, Schedule, all_reduce
from ddp_hooks.planning.simulation import Run, Strategy
from ddp_hooks.planning.strategies.grouping import ddp_buckets, launcher

_GLOO_THREADS = 2  # of a process group
_AGREEMENT_BYTES = 8.0
# Seconds per tensor and step that the training thread computes for hooks, beyond a step without DDP: the slope from 100
# to 600 small linear layers on two ranks.
_HOOK_S = 5e-6


@dataclass(frozen=True)
class Ddp(Strategy):
    """DistributedDataParallel: buckets, all-reduced under the backward; the optimizer waits for all of them."""

    bucket_mb: float = 25.0  #: ``bucket_cap_mb``; the first bucket is closed at 1 MB
    schedule: Schedule = "ring"

    @property
    def name(self) -> str:
        return f"DDP, {self.bucket_mb:g} MB"

    @property
    def line(self) -> str:
        return f"DistributedDataParallel(model, bucket_cap_mb={self.bucket_mb:g})"

    def train(self, run: Run) -> Process:
        streams = 1 if run.network.native else _GLOO_THREADS
        yield from _train_in_backward(run, ddp_buckets(run, self.bucket_mb), self.schedule, streams)


@dataclass(frozen=True)
class MgWfbp(Strategy):
    """MG-WFBP (DeAR, section II-C): neighbours are merged where that saves more latency than it costs in waiting."""

    schedule: Schedule = "ring"
    name = "MG-WFBP"

    def train(self, run: Run) -> Process:
        yield from _train_in_backward(run, self.groups(run), self.schedule, 1)

    def groups(self, run: Run) -> list[list[int]]:
        """Merge a gradient with its predecessors if it is ready before their all-reduce begins, or a latency later."""
        ready_s = [tensor.ready_s for tensor in run.step.tensors]
        startup_s = self._all_reduce_s(run, 0)
        groups: list[list[int]] = []
        free_s = 0.0  # end of the all-reduces of all groups but the last one
        for tensor in run.step.backward_order:
            begins_s = max(free_s, ready_s[groups[-1][-1]]) if groups else 0.0
            if groups and ready_s[tensor] < begins_s + startup_s:
                groups[-1].append(tensor)
                continue
            if groups:
                free_s = begins_s + self._all_reduce_s(run, run.num_bytes(groups[-1]))
            groups.append([tensor])
        return groups

    def _all_reduce_s(self, run: Run, num_bytes: int) -> float:
        link = run.network.link
        rounds = all_reduce(self.schedule, run.network.workers, run.network.node_size, num_bytes)
        return sum(each.times * (link.alpha_s + each.between_bytes * link.beta_s_per_byte) for each in rounds)


def _train_in_backward(run: Run, groups: Sequence[Sequence[int]], schedule: Schedule, streams: int) -> Process:
    lanes = run.lanes(streams, window=1)
    while not run.is_over:
        yield from run.forward({})
        yield from all_reduced_in_backward(run, groups, lanes, schedule)
        yield from run.optimizer()
        run.end_step()


def all_reduced_in_backward(
    run: Run,
    groups: Sequence[Sequence[int]],
    lanes: Sequence[SimulatedLane],
    schedule: Schedule,
    also: Callable[[int], None] = lambda tensor: None,
) -> Process:
    """Run a backward and the all-reduces of its groups, in the order of gradients; ``also`` takes each gradient."""
    reduced: list[Signal] = []

    def launch(number: int) -> None:
        slices = run.all_reduce(run.num_bytes(groups[number]), schedule)
        reduced.append(lanes[number % len(lanes)].submit(slices, f"all-reduce of group {number}"))

    group_ready = launcher(groups, launch)

    def ready(tensor: int) -> None:
        group_ready(tensor)
        also(tensor)

    yield from run.backward(ready, _HOOK_S)
    yield from run.wait_all(reduced, "all-reduces")


@dataclass(frozen=True)
class ByteScheduler(Strategy):
    """ByteScheduler (DeAR, section II-D): tensors in parts, all-reduced in the order in which they are read."""

    part_mb: float = 4.0  #: largest part, in MiB
    credit: int = 2  #: parts under way at once
    #: Before each part, workers agree that all of them have it (section II-D), in 2 ceil(log2 P) rounds.
    negotiates: bool = False
    schedule: Schedule = "ring"
    name = "ByteScheduler"

    def train(self, run: Run) -> Process:
        lane, *_ = run.lanes(self.credit, window=1, by_priority=True)  # whichever is free takes a part
        need_of = {tensor: need for need, tensor in enumerate(run.step.forward_order)}
        arrived: dict[int, Signal] = {}

        def launch(tensor: int) -> None:
            num_bytes = run.step.tensors[tensor].num_bytes
            count = max(1, -(-num_bytes // mebibytes(self.part_mb)))
            part = run.all_reduce(num_bytes / count, self.schedule)
            if self.negotiates:
                part = [Slice((Round(2 * num_rounds(run.network.workers), _AGREEMENT_BYTES),)), *part]
            label = f"all-reduce of {run.step.tensors[tensor].name}"
            parts = [lane.submit(part, label, need_of[tensor]) for _ in range(count)]
            arrived[tensor] = run.engine.all_of(parts)

        while not run.is_over:
            yield from run.forward(arrived, run.update_s)
            arrived.clear()
            yield from run.backward(launch)
            run.end_step()
