"""Strategies that all-reduce gradients: plain DDP, MG-WFBP and ByteScheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_hooks.comm import mebibytes, num_rounds
from ddp_hooks.planning.events import Process, Signal, SimulatedLane, Slice
from ddp_hooks.planning.groups import Launcher, ddp_buckets, part_of
from ddp_hooks.planning.patterns import Hop, Schedule, all_reduce
from ddp_hooks.planning.simulation import Run

_GLOO_THREADS = 2  # of a process group
_AGREEMENT_BYTES = 8.0  # that say who is ready
# Seconds per tensor and step that the training thread computes for hooks, beyond a step without DDP: the slope from 100
# to 600 small linear layers on two ranks.
_HOOK_S = 5e-6


@dataclass(frozen=True)
class Ddp:
    """DistributedDataParallel: buckets, all-reduced under the backward, all of them awaited at its end.

    Args:
        bucket_mb: ``bucket_cap_mb``; the first bucket is closed at 1 MB.
        schedule: of its all-reduces.
    """

    bucket_mb: float = 25.0
    schedule: Schedule = "ring"

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"DDP, {self.bucket_mb:g} MB"

    @property
    def line(self) -> str:
        """What a user writes."""
        return f"DistributedDataParallel(model, bucket_cap_mb={self.bucket_mb:g})"

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        streams = 1 if run.network.native else _GLOO_THREADS
        yield from _train_in_backward(run, ddp_buckets(run, self.bucket_mb), self.schedule, streams)


@dataclass(frozen=True)
class MgWfbp:
    """MG-WFBP (DeAR, section II-C): neighbours are merged where that saves more latency than it costs in waiting."""

    schedule: Schedule = "ring"

    @property
    def name(self) -> str:
        """What tables call it."""
        return "MG-WFBP"

    line = ""

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        yield from _train_in_backward(run, self.groups(run), self.schedule, 1)

    def groups(self, run: Run) -> list[list[int]]:
        """A gradient joins the ones before it if it comes before their all-reduce has begun, or not a latency later."""
        network = run.network
        startup_s = network.link.alpha_s * sum(
            hop.times for hop in all_reduce(self.schedule, network.workers, network.node_size, 1.0)
        )
        groups: list[list[int]] = []
        free_s = 0.0  # when the all-reduces of all groups but the last one have ended
        for tensor in run.step.backward_order:
            ready_s = run.step.tensors[tensor].ready_s
            begins_s = max(free_s, run.step.tensors[groups[-1][-1]].ready_s) if groups else 0.0
            if groups and ready_s < begins_s + startup_s:
                groups[-1].append(tensor)
                continue
            if groups:
                free_s = begins_s + self._takes_s(run, groups[-1])
            groups.append([tensor])
        return groups

    def _takes_s(self, run: Run, group: Sequence[int]) -> float:
        link = run.network.link
        pattern = all_reduce(self.schedule, run.network.workers, run.network.node_size, run.num_bytes(group))
        return sum(hop.times * (link.alpha_s + hop.between_bytes * link.beta_s_per_byte) for hop in pattern)


def _train_in_backward(run: Run, groups: Sequence[Sequence[int]], schedule: Schedule, streams: int) -> Process:
    """All-reduces under the backward, in the order of gradients; the optimizer waits for all of them."""
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
    others: Callable[[int], None] = lambda tensor: None,
) -> Process:
    """A backward, and the all-reduces of its groups; ``others`` hears of all gradients, too."""
    reduced: list[Signal] = []

    def launch(number: int) -> None:
        slices = run.all_reduce(run.num_bytes(groups[number]), schedule)
        reduced.append(lanes[number % len(lanes)].submit(slices, f"all-reduce of group {number}"))

    launcher = Launcher(groups, launch)

    def ready(tensor: int) -> None:
        launcher.ready(tensor)
        others(tensor)

    yield from run.backward(ready, _HOOK_S)
    for signal in reduced:
        yield from run.wait(signal, "all-reduces")


@dataclass(frozen=True)
class ByteScheduler:
    """ByteScheduler (DeAR, section II-D): tensors in parts, all-reduced in the order in which the forward reads them.

    Args:
        part_mb: largest part, in MiB.
        credit: parts under way at once.
        negotiates: before each part workers agree that all of them have it (section II-D), in 2 ceil(log2 P) rounds.
        schedule: of their all-reduces.
    """

    part_mb: float = 4.0
    credit: int = 2
    negotiates: bool = False
    schedule: Schedule = "ring"

    @property
    def name(self) -> str:
        """What tables call it."""
        return "ByteScheduler"

    line = ""

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        lane, *_ = run.lanes(self.credit, window=1, by_priority=True)  # whichever is free takes a part
        rank_of = {tensor: rank for rank, tensor in enumerate(run.step.forward_order)}
        arrived: dict[int, Signal] = {}
        while not run.is_over:
            yield from run.forward(arrived, lambda tensor: run.optimizer_s * part_of(run, tensor))
            arrived = {}

            def launch(tensor: int, arrived: dict[int, Signal] = arrived) -> None:
                num_bytes = run.step.tensors[tensor].num_bytes
                count = max(1, -(-num_bytes // mebibytes(self.part_mb)))
                part = run.all_reduce(num_bytes / count, self.schedule)
                if self.negotiates:
                    part = [Slice((Hop(2 * num_rounds(run.network.workers), _AGREEMENT_BYTES),)), *part]
                label = f"all-reduce of {run.step.tensors[tensor].name}"
                parts = [lane.submit(part, label, rank_of[tensor]) for _ in range(count)]
                arrived[tensor] = run.engine.start(_all(parts))

            yield from run.backward(launch)
            run.end_step()


def _all(signals: Sequence[Signal]) -> Process:
    yield from signals
