"""Horovod: gradients in any order, agreed upon in cycles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ddp_hooks.comm import Span, mebibytes, num_rounds
from ddp_hooks.planning import Strategy
from ddp_hooks.planning.events import Process, Signal, SimulatedLane
from ddp_hooks.planning.simulation import Run
from ddp_hooks.planning.strategies.in_backward import group_by_size, launcher
from recipes.paper.strategies.queues import Queue
from recipes.paper.strategies.rounds import Schedule, backends_all_reduce

AGREEMENT_TRACK = "lane of agreements"
"""Track of the spans in which workers agree."""
_LABEL = "all-reduce of {} bytes"

Agreement: TypeAlias = Literal["coordinator", "tree", "bitvector"]


@dataclass(frozen=True)
class Horovod(Strategy):
    """Horovod: workers agree in cycles on tensors that all of them have, fuse and all-reduce them, buffer by buffer."""

    fusion_mb: float = 64.0  #: largest buffer, in MiB
    cycle_ms: float = 1.0  #: least time between two agreements
    #: By a coordinator, which hears from every worker; by a tree of coordinators, each of which hears from ``fan_out``
    #: others (Horovod, section 2.2.3); or by the response cache's bitvector (Algorithms 1 and 2).
    agreement: Agreement = "bitvector"
    message_s: float = 5e-6  #: in which a coordinator handles one worker's message
    request_s: float = 0.0  #: in which it handles one request of that message; a group is one request
    fan_out: int = 8  #: children of a node of the tree
    num_groups: int | None = None  #: groups of tensors that travel together, None for no groups
    schedule: Schedule = "ring"
    #: The next agreement waits for the all-reduces of the last one, as with MPI; with NCCL they are queued.
    waits: bool = True

    def __post_init__(self) -> None:
        if self.fan_out < 2:
            raise ValueError(f"fan_out must be >= 2, got {self.fan_out}")

    @property
    def name(self) -> str:
        return f"Horovod, {self.agreement}" + (f", {self.num_groups} groups" if self.num_groups else "")

    def agreement_on(self, workers: int, alpha_s: float, requests: int = 1) -> float:
        """Return the seconds of one agreement, in and out again; every message has so many ``requests``."""
        if workers == 1:
            return 0.0
        if self.agreement == "bitvector":
            return 2 * num_rounds(workers) * alpha_s
        handled_s = 2 * self.message_s + requests * self.request_s  # a list is read once, and an answer is sent
        if self.agreement == "coordinator":
            return 2 * alpha_s + (workers - 1) * handled_s
        children = min(self.fan_out, workers - 1)
        return num_levels(workers, self.fan_out) * (2 * alpha_s + children * handled_s)

    def train(self, run: Run) -> Process:
        groups = _even_groups(run, self.num_groups)
        (lane,) = run.lanes(1, window=1)
        while not run.is_over:
            yield from run.forward({})
            pending = Queue[int](run.engine)  # groups that are ready, and not agreed upon yet
            done = run.engine.start(self._run_cycles(run, groups, pending, lane))
            yield from run.backward(launcher(groups, pending.put))
            yield from run.wait(done, "all-reduces")
            yield from run.optimizer()
            run.end_step()

    def _run_cycles(
        self, run: Run, groups: Sequence[Sequence[int]], pending: Queue[int], lane: SimulatedLane
    ) -> Process:
        """Run the cycles of a step, until everything is reduced."""

        def agreement_s(requests: int) -> float:
            return self.agreement_on(run.network.workers, run.network.link.alpha_s, requests)

        def group_bytes(number: int) -> int:
            return run.num_bytes(groups[number])

        left = len(groups)
        reduced: list[Signal] = []
        while left:
            yield from pending.wait()
            # A cycle begins with the groups that are ready; later ones are for the next cycle.
            yield max(0.0, self.cycle_ms * 1e-3 - agreement_s(1))
            agreed = pending.take_all()
            left -= len(agreed)
            with run.engine.span(AGREEMENT_TRACK, f"agreement on {len(agreed)}"):
                yield agreement_s(len(agreed))
            for buffer in group_by_size(agreed, group_bytes, mebibytes(self.fusion_mb)):
                num_bytes = sum(map(group_bytes, buffer))
                slices = backends_all_reduce(run, num_bytes, self.schedule)
                reduced.append(lane.submit(slices, _LABEL.format(num_bytes)))
            if self.waits:
                yield from reduced
        yield from reduced


def buffer_bytes(spans: Iterable[Span]) -> list[int]:
    """Return the sizes of the buffers whose all-reduces are among these spans."""
    found = (re.fullmatch(_LABEL.format(r"(\d+)"), span.name) for span in spans)
    return [int(match[1]) for match in found if match is not None]


def num_levels(workers: int, fan_out: int) -> int:
    """Return the levels of the smallest tree in which each of ``workers`` hears from at most ``fan_out`` others.

    >>> [num_levels(workers, 8) for workers in (1, 9, 10, 73)]
    [0, 1, 2, 2]
    """
    levels, reached, width = 0, 1, 1
    while reached < workers:
        width *= fan_out
        reached += width
        levels += 1
    return levels


def _even_groups(run: Run, num_groups: int | None) -> list[list[int]]:
    order = list(run.step.backward_order)
    count = min(num_groups or len(order), len(order))
    return [order[len(order) * i // count : len(order) * (i + 1) // count] for i in range(count)]
