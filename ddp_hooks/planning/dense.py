"""Strategies that exchange whole gradients: plain DDP, MG-WFBP, ByteScheduler, Horovod, and DeAR."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddp_hooks.comm import mebibytes, num_rounds, suited_to
from ddp_hooks.planning.events import Process, Signal, SimulatedLane
from ddp_hooks.planning.patterns import Schedule, all_reduce
from ddp_hooks.planning.simulation import Launcher, Run
from ddp_hooks.planning.sizes import TAIL_CUTS, atom_and_fusion_bytes

_FIRST_BUCKET_BYTES = 1 << 20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
_GLOO_THREADS = 2  # of a process group
# Seconds per tensor and step that hooks take with a core to themselves, beyond a step without DDP: the slope from 100
# to 600 small linear layers on two ranks.
_DDP_HOOK_S = 4e-6
_DEAR_HOOK_S = {"sharded": 13e-6, "replicated": 19e-6}


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


def ddp_buckets(run: Run, bucket_mb: float, order: Iterable[int] | None = None) -> list[list[int]]:
    """Tensors in the order of the backward, as DDP has them after its first step: a full bucket is closed."""
    limit = min(_FIRST_BUCKET_BYTES, mebibytes(bucket_mb))
    buckets: list[list[int]] = [[]]
    total = 0
    for tensor in run.step.backward_order if order is None else order:
        if total >= limit:
            buckets.append([])
            total, limit = 0, mebibytes(bucket_mb)
        buckets[-1].append(tensor)
        total += run.step.tensors[tensor].num_bytes
    return buckets


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

    yield from run.backward(ready, _DDP_HOOK_S)
    for signal in reduced:
        yield from run.wait(signal, "all-reduces")


@dataclass(frozen=True)
class ByteScheduler:
    """ByteScheduler (DeAR, section II-D): tensors in parts, all-reduced in the order in which the forward reads them.

    Args:
        part_mb: largest part, in MiB.
        credit: parts under way at once.
        schedule: of their all-reduces.
    """

    part_mb: float = 4.0
    credit: int = 2
    schedule: Schedule = "ring"

    @property
    def name(self) -> str:
        """What tables call it."""
        return "ByteScheduler"

    line = ""

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        lanes = run.lanes(self.credit, window=1, by_priority=True)
        rank_of = {tensor: rank for rank, tensor in enumerate(run.step.forward_order)}
        turns = itertools.cycle(lanes)
        arrived: dict[int, Signal] = {}
        while not run.is_over:
            yield from run.forward(arrived, lambda tensor: run.step.optimizer_s * _share(run, tensor))
            arrived = {}

            def launch(tensor: int, arrived: dict[int, Signal] = arrived) -> None:
                num_bytes = run.step.tensors[tensor].num_bytes
                parts = max(1, -(-num_bytes // mebibytes(self.part_mb)))
                for _ in range(parts):  # of one priority, so the last one is the last
                    slices = run.all_reduce(num_bytes / parts, self.schedule)
                    name = f"all-reduce of {run.step.tensors[tensor].name}"
                    arrived[tensor] = next(turns).submit(slices, name, priority=rank_of[tensor])

            yield from run.backward(launch)
            run.end_step()


def _share(run: Run, tensor: int) -> float:
    return run.step.tensors[tensor].num_bytes / run.step.num_bytes


@dataclass(frozen=True)
class Horovod:
    """Horovod: what is ready on all workers is agreed upon in cycles, fused and all-reduced, one buffer after another.

    Args:
        fusion_mb: largest buffer, in MiB.
        cycle_ms: least milliseconds between two agreements.
        agreement: by a coordinator, which hears from every worker, or by the response cache's bitvector (Horovod,
            Algorithms 1 and 2).
        message_s: seconds in which a coordinator handles one worker's message.
        num_groups: tensors are grouped, and a group travels together; None: they are not.
        schedule: of the all-reduces.
    """

    fusion_mb: float = 64.0
    cycle_ms: float = 1.0
    agreement: Literal["coordinator", "bitvector"] = "bitvector"
    message_s: float = 5e-6
    num_groups: int | None = None
    schedule: Schedule = "ring"

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"Horovod, {self.agreement}" + (f", {self.num_groups} groups" if self.num_groups else "")

    line = ""

    def agreement_s(self, run: Run) -> float:
        """Seconds of one agreement."""
        network = run.network
        if self.agreement == "coordinator":  # in, and out again
            return 2 * (network.link.alpha_s + (network.workers - 1) * self.message_s)
        return 2 * num_rounds(network.workers) * network.link.alpha_s

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        groups = _even_groups(run, self.num_groups)
        (lane,) = run.lanes(1, window=1)
        while not run.is_over:
            yield from run.forward({})
            waiting: list[int] = []
            woken = [Signal()]
            done = Signal()

            def ready(group: int, waiting: list[int] = waiting, woken: list[Signal] = woken) -> None:
                waiting.append(group)
                run.engine.fire(woken[0])

            def serve(waiting: list[int] = waiting, woken: list[Signal] = woken, done: Signal = done) -> Process:
                left = len(groups)
                while left:
                    while not waiting:
                        woken[0] = Signal()
                        yield woken[0]
                    yield max(self.cycle_ms * 1e-3, self.agreement_s(run))
                    agreed = list(waiting)
                    waiting.clear()
                    left -= len(agreed)
                    for num_bytes in _fused([run.num_bytes(groups[g]) for g in agreed], mebibytes(self.fusion_mb)):
                        yield lane.submit(run.all_reduce(num_bytes, self.schedule), "all-reduce")
                run.engine.fire(done)

            run.engine.start(serve())
            yield from run.backward(Launcher(groups, ready).ready)
            yield from run.wait(done, "all-reduces")
            yield from run.optimizer()
            run.end_step()


def _even_groups(run: Run, num_groups: int | None) -> list[list[int]]:
    order = list(run.step.backward_order)
    count = min(num_groups or len(order), len(order))
    return [order[len(order) * i // count : len(order) * (i + 1) // count] for i in range(count)]


def _fused(sizes: Iterable[int], limit: int) -> list[int]:
    """Neighbours joined while they fit."""
    buffers: list[int] = []
    for size in sizes:
        if buffers and buffers[-1] + size <= limit:
            buffers[-1] += size
        else:
            buffers.append(size)
    return buffers


@dataclass(frozen=True)
class Dear:
    """DeAR: reduce-scatters under the backward, all-gathers under the next forward.

    Args:
        update: ``"sharded"``: parameters are gathered, and a worker updates its share; ``"replicated"``: gradients are,
            and every worker updates all of them, each before it is read.
        bucket_mb: of DDP; a gradient counts as ready with its bucket, but for the last one's.
        fusion_mb: largest group, in MiB (section IV-B).
        lanes: streams of communication.
        slice_mb: largest message, in MiB. What is None is chosen for the link, as by ``DearConfig``.
        schedule: of its collectives.
        scatters, gathers: False: as if these took no time (Fig. 8).
    """

    update: Literal["sharded", "replicated"] = "sharded"
    bucket_mb: float = 5.0
    fusion_mb: float | None = None
    lanes: int | None = None
    slice_mb: float | None = None
    schedule: Schedule = "ring"
    scatters: bool = True
    gathers: bool = True

    @property
    def name(self) -> str:
        """What tables call it."""
        parts = "" if self.scatters and self.gathers else ", RS only" if self.scatters else ", AG only"
        return f"DeAR, {self.update}{parts}"

    @property
    def line(self) -> str:
        """What a user writes."""
        config = "" if self.update == "sharded" else ', DearConfig(update="replicated")'
        return f"ddp.register_comm_hook(DearState(ddp, optimizer{config}), dear_hook)"

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        sizes = self._sizes(run)
        backward_groups = self._scattered_groups(run, sizes)
        forward_groups = fuse(run, run.step.forward_order, sizes.fusion_bytes)
        lanes = run.lanes(sizes.lanes)
        replicates = self.update == "replicated"

        def update_s(tensor: int) -> float:
            own_s = run.step.optimizer_s * _share(run, tensor) if replicates else 0.0
            return own_s + _DEAR_HOOK_S[self.update] * run.costs.python

        arrived: dict[int, Signal] = {}
        while not run.is_over:
            yield from run.forward(arrived, update_s)
            scattered: list[Signal] = []

            def launch(number: int, scattered: list[Signal] = scattered) -> None:
                if self.scatters:
                    num_bytes = run.num_bytes(backward_groups[number])
                    slices = run.collective("reduce-scatter", num_bytes, self.schedule, sizes.message_bytes)
                    scattered.append(
                        lanes[number % sizes.lanes].submit(slices, f"reduce-scatter of group {number}")
                    )

            yield from run.backward(Launcher(backward_groups, launch).ready)
            for signal in scattered:
                yield from run.wait(signal, "reduce-scatters")
            if not replicates:
                yield from run.optimizer(1 / run.network.workers)
            arrived = dict.fromkeys(run.step.forward_order, _HAPPENED)
            for number, group in enumerate(forward_groups if self.gathers else []):
                slices = run.collective("all-gather", run.num_bytes(group), self.schedule, sizes.message_bytes)
                signal = lanes[number % sizes.lanes].submit(slices, f"all-gather of group {number}")
                arrived.update(dict.fromkeys(group, signal))
            run.end_step()

    def _sizes(self, run: Run) -> _Sizes:
        network = run.network
        link = suited_to(None if network.native else network.bytes_per_s)
        message_bytes = link.message_bytes if self.slice_mb is None else mebibytes(self.slice_mb)
        busy = self.update == "replicated" and link.outruns_processor
        atom_bytes, fusion_bytes = atom_and_fusion_bytes(message_bytes, run.step.num_bytes, busy, network.native)
        if self.fusion_mb is not None:
            fusion_bytes = mebibytes(self.fusion_mb)
        return _Sizes(self.lanes or link.num_lanes, message_bytes, atom_bytes, fusion_bytes)

    def _scattered_groups(self, run: Run, sizes: _Sizes) -> list[list[int]]:
        """Whole buckets while they fit; the last one, behind which nothing comes, in smaller parts on CPUs."""
        *buckets, last = ddp_buckets(run, self.bucket_mb)
        groups: list[list[int]] = []
        for bucket in buckets:
            if groups and run.num_bytes(groups[-1]) + run.num_bytes(bucket) <= sizes.fusion_bytes:
                groups[-1] += bucket
            else:
                groups.append(list(bucket))
        tail_bytes = sizes.fusion_bytes if run.network.native else sizes.atom_bytes // TAIL_CUTS
        return [*groups, *fuse(run, last, tail_bytes)]


class _Sizes(NamedTuple):
    lanes: int
    message_bytes: int
    atom_bytes: int
    fusion_bytes: int


_HAPPENED = Signal(happened=True)


def fuse(run: Run, order: Iterable[int], limit: int) -> list[list[int]]:
    """Neighbours together while their total does not exceed ``limit`` bytes; a larger tensor alone (section IV-B)."""
    groups: list[list[int]] = []
    total = 0
    for tensor in order:
        num_bytes = run.step.tensors[tensor].num_bytes
        if groups and total + num_bytes <= limit:
            groups[-1].append(tensor)
            total += num_bytes
        else:
            groups.append([tensor])
            total = num_bytes
    return groups
