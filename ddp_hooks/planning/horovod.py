"""Horovod: gradients in any order, agreed upon in cycles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ddp_hooks.comm import Span, mebibytes, num_rounds
from ddp_hooks.planning.events import Process, Signal, SimulatedLane
from ddp_hooks.planning.groups import Launcher
from ddp_hooks.planning.patterns import Schedule
from ddp_hooks.planning.simulation import Run

AGREEMENT_TRACK = "lane of agreements"
"""Of the spans in which workers agree."""
_LABEL = "all-reduce of {} bytes"

Agreement: TypeAlias = Literal["coordinator", "tree", "bitvector"]


@dataclass(frozen=True)
class Horovod:
    """Horovod: what is ready on all workers is agreed upon in cycles, fused and all-reduced, one buffer after another.

    Args:
        fusion_mb: largest buffer, in MiB.
        cycle_ms: least milliseconds between two agreements.
        agreement: by a coordinator, which hears from every worker; by a tree of them, each of which hears from
            ``fan_out`` others (Horovod, section 2.2.3); or by the response cache's bitvector (Algorithms 1 and 2).
        message_s: seconds in which a coordinator handles one worker's message.
        request_s: seconds in which it handles one request of that message; a group is one request.
        fan_out: of the tree.
        num_groups: tensors are grouped, and a group travels together; None: they are not.
        schedule: of the all-reduces.
        waits: whether the next agreement waits for the all-reduces of the last one, as with MPI; with NCCL they are
            queued.
    """

    fusion_mb: float = 64.0
    cycle_ms: float = 1.0
    agreement: Agreement = "bitvector"
    message_s: float = 5e-6
    request_s: float = 0.0
    fan_out: int = 8
    num_groups: int | None = None
    schedule: Schedule = "ring"
    waits: bool = True

    def __post_init__(self) -> None:
        if self.fan_out < 2:
            raise ValueError(f"fan_out must be >= 2, got {self.fan_out}")

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"Horovod, {self.agreement}" + (f", {self.num_groups} groups" if self.num_groups else "")

    line = ""

    def agreement_s(self, run: Run, requests: int = 1) -> float:
        """Seconds of one agreement: in, and out again.

        Args:
            run: whose workers agree, over the link between nodes.
            requests: in every worker's message.
        """
        return self.agreement_on(run.network.workers, run.network.link.alpha_s, requests)

    def agreement_on(self, workers: int, alpha_s: float, requests: int = 1) -> float:
        """Seconds of one agreement of so many workers, whose short messages take ``alpha_s``."""
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
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        groups = _even_groups(run, self.num_groups)
        (lane,) = run.lanes(1, window=1)
        while not run.is_over:
            yield from run.forward({})
            pending = _Pending(run)
            done = run.engine.start(self._serve(run, groups, pending, lane))
            yield from run.backward(Launcher(groups, pending.add).ready)
            yield from run.wait(done, "all-reduces")
            yield from run.optimizer()
            run.end_step()

    def _serve(self, run: Run, groups: Sequence[Sequence[int]], pending: _Pending, lane: SimulatedLane) -> Process:
        """Cycles of a step, until everything is reduced."""
        left = len(groups)
        reduced: list[Signal] = []
        while left:
            yield from pending.some()
            # A cycle begins with what is there; what comes while workers agree is for the next one.
            yield max(0.0, self.cycle_ms * 1e-3 - self.agreement_s(run, 1))
            agreed = pending.take()
            left -= len(agreed)
            with run.engine.span(AGREEMENT_TRACK, f"agreement on {len(agreed)}"):
                yield self.agreement_s(run, len(agreed))
            for num_bytes in _fused([run.num_bytes(groups[g]) for g in agreed], mebibytes(self.fusion_mb)):
                reduced.append(lane.submit(run.all_reduce(num_bytes, self.schedule), _LABEL.format(num_bytes)))
            if self.waits:
                yield from reduced
        yield from reduced


class _Pending:
    """Groups that are ready, and not agreed upon yet."""

    def __init__(self, run: Run) -> None:
        self._engine = run.engine
        self._groups: list[int] = []
        self._news = Signal()

    def add(self, group: int) -> None:
        """One more is ready."""
        self._groups.append(group)
        self._engine.fire(self._news)

    def some(self) -> Process:
        """Wait until there is one."""
        while not self._groups:
            self._news = Signal()
            yield self._news

    def take(self) -> list[int]:
        """All of them."""
        groups, self._groups = self._groups, []
        return groups


def buffer_bytes(spans: Iterable[Span]) -> list[int]:
    """How long the buffers were that these spans show the all-reduces of; others are left out."""
    prefix, suffix = _LABEL.split("{}")
    return [
        int(span.name[len(prefix) : -len(suffix)])
        for span in spans
        if span.name.startswith(prefix) and span.name.endswith(suffix)
    ]


def num_levels(workers: int, fan_out: int) -> int:
    """Levels of the smallest tree in which each of ``workers`` hears from at most ``fan_out`` others.

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


def _fused(sizes: Iterable[int], limit: int) -> list[int]:
    """Neighbours joined while they fit."""
    buffers: list[int] = []
    for size in sizes:
        if buffers and buffers[-1] + size <= limit:
            buffers[-1] += size
        else:
            buffers.append(size)
    return buffers
