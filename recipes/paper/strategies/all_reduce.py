"""Strategies that all-reduce gradients: DDP on two levels, MG-WFBP and ByteScheduler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ddp_hooks.comm import mebibytes, num_rounds
from ddp_hooks.planning import Ddp, Strategy
from ddp_hooks.planning.events import Process, Signal, Slice
from ddp_hooks.planning.network import Round
from ddp_hooks.planning.simulation import Run
from ddp_hooks.planning.strategies.in_backward import DDP_HOOK_S, reduce_in_backward
from recipes.paper.strategies.queues import PriorityLanes
from recipes.paper.strategies.rounds import Schedule, all_reduce, backends_all_reduce

_AGREEMENT_BYTES = 8.0


@dataclass(frozen=True)
class DdpOn(Ddp):
    """Plain DDP whose backend has a schedule of its own."""

    schedule: Schedule = "ring"

    def all_reduce(self, run: Run, num_bytes: float) -> list[Slice]:
        return backends_all_reduce(run, num_bytes, self.schedule)


@dataclass(frozen=True)
class MgWfbp(Strategy):
    """MG-WFBP (DeAR, section II-C): neighbours are merged where that saves more latency than it costs in waiting."""

    schedule: Schedule = "ring"
    name = "MG-WFBP"

    def train(self, run: Run) -> Process:
        collective = partial(backends_all_reduce, run, schedule=self.schedule)
        lanes = run.lanes(1, window=1)
        yield from reduce_in_backward(run, self.groups(run), lanes, collective, "all-reduce", DDP_HOOK_S)

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
        lanes = PriorityLanes(run, self.credit)
        need_of = {tensor: need for need, tensor in enumerate(run.step.forward_order)}
        arrived: dict[int, Signal] = {}

        def launch(tensor: int) -> None:
            num_bytes = run.step.tensors[tensor].num_bytes
            count = max(1, -(-num_bytes // mebibytes(self.part_mb)))
            part = backends_all_reduce(run, num_bytes / count, self.schedule)
            if self.negotiates:
                part = [Slice((Round(2 * num_rounds(run.network.workers), _AGREEMENT_BYTES),)), *part]
            label = f"all-reduce of {run.step.tensors[tensor].name}"
            parts = [lanes.submit(part, label, need_of[tensor]) for _ in range(count)]
            arrived[tensor] = run.engine.all_of(parts)

        while not run.is_over:
            yield from run.forward(arrived, run.update_s)
            arrived.clear()
            yield from run.backward(launch)
            run.end_step()
