"""Horovod: gradients in any order, agreed upon in cycles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ddp_hooks.comm import mebibytes, num_rounds
from ddp_hooks.planning.events import Process, Signal
from ddp_hooks.planning.groups import Launcher
from ddp_hooks.planning.patterns import Schedule
from ddp_hooks.planning.simulation import Run


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
