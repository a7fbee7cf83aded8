"""Training steps of one worker, simulated: its training thread computes and waits, its lanes send.

All workers are alike and in step, so one stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ddp_hooks.comm import Span, see
from ddp_hooks.comm.executors.slices import WINDOW, coded_message_bytes, scatter_message_bytes
from ddp_hooks.planning.events import Engine, Host, Process, Signal, SimulatedLane, Slice, timeslices
from ddp_hooks.planning.network import Costs, Network, Phase, all_to_all, ring
from ddp_hooks.planning.step import StepProfile, dependency_bound_s

_STEPS = 4  # simulated; communication under way at the end of the first ones shapes the later ones


class Strategy(Protocol):
    """A way to train with several workers."""

    @property
    def name(self) -> str:
        """Name in tables."""

    @property
    def line(self) -> str:
        """Lines that a user writes for it; empty if the strategy is not ours."""
        return ""

    @property
    def effect(self) -> str:
        """Sentence on what it does to gradients, and where to read on; empty if the strategy is exact."""
        return ""

    def train(self, run: Run) -> Process:
        """Run the training thread, step after step, until ``run.is_over``."""


@dataclass(frozen=True)
class Prediction:
    """A simulated step."""

    strategy: str  #: name of the strategy
    step_s: float  #: mean seconds from the end of a step to the end of the next one
    exposed_s: float  #: ``step_s`` without forward, backward and other work of the loop
    sent_bytes: float  #: through a link, per step
    bound_s: float  #: seconds of the best schedule whose collectives send as much as a ring does
    spans: tuple[Span, ...]  #: work by track
    step_ends_s: tuple[float, ...]  #: of the simulated steps
    line: str = ""  #: lines that a user writes for it; empty if the strategy is not ours
    is_exact: bool = True  #: gradients are summed in full
    effect: str = ""  #: on gradients otherwise, a sentence
    processor_s: float = 0.0  #: in which a core works for communication, per step


def simulate(strategy: Strategy, step: StepProfile, network: Network, costs: Costs | None = None) -> Prediction:
    """Predict a step in the middle of a run."""
    run = Run(step, network, costs or Costs())
    run.engine.start(strategy.train(run))
    run.engine.run()
    if not run.is_over:
        raise RuntimeError(
            f"{strategy.name}: the simulated training waits for something that never happens{see('please-report')}"
        )
    step_s = (run.step_ends_s[-1] - run.step_ends_s[0]) / (_STEPS - 1)  # steps may differ
    exposed_s = step_s - step.compute_s - step.other_s
    bound_s = dependency_bound_s(step, network.workers, network.bytes_per_s)
    spans = tuple(sorted(run.engine.spans, key=lambda span: span.start_s))
    return Prediction(
        strategy.name,
        step_s,
        exposed_s,
        run.host.between.sent_bytes / _STEPS,
        bound_s,
        spans,
        tuple(run.step_ends_s),
        strategy.line,
        is_exact=not strategy.effect,
        effect=strategy.effect,
        processor_s=run.host.worked_s / _STEPS,
    )


class Run:
    """Building blocks of strategies: forward, backward and optimizer of the training thread, and collectives."""

    def __init__(self, step: StepProfile, network: Network, costs: Costs) -> None:
        self.step = step
        self.network = network
        self.costs = costs
        self.engine = Engine()
        self.step_ends_s: list[float] = []
        self.host = Host(network, costs)

    @property
    def is_over(self) -> bool:
        return len(self.step_ends_s) >= _STEPS

    @property
    def optimizer_s(self) -> float:
        """Seconds of an update of all parameters; workers that share a core update at the same time."""
        return max(self.step.optimizer_s, self.step.optimizer_cpu_s * self.costs.oversubscription)

    def update_s(self, tensor: int) -> float:
        return self.optimizer_s * self.step.tensors[tensor].num_bytes / self.step.num_bytes

    def num_bytes(self, tensors: Sequence[int]) -> int:
        return sum(self.step.tensors[index].num_bytes for index in tensors)

    def lanes(self, count: int, window: int = WINDOW) -> list[SimulatedLane]:
        return [SimulatedLane(self.engine, self.host, f"lane {i}", window) for i in range(count)]

    def forward(self, arrived: Mapping[int, Signal], before: Callable[[int], float] = lambda tensor: 0.0) -> Process:
        """Run the forward; it waits for each tensor of ``arrived`` and computes ``before(tensor)`` seconds for it."""
        yield from self.compute("other", self.step.other_s)
        done_s = 0.0
        for index in self.step.forward_order:
            tensor = self.step.tensors[index]
            if index not in arrived:
                continue
            yield from self.compute("forward", tensor.needed_s - done_s)
            done_s = tensor.needed_s
            yield from self.wait(arrived[index], tensor.name)
            yield from self.compute_on_core("optimizer", before(index))
        yield from self.compute("forward", self.step.forward_s - done_s)

    def backward(self, ready: Callable[[int], None], hook_s: float = 0.0) -> Process:
        """Run the backward; it calls ``ready(tensor)`` when a gradient lies in its bucket and its hooks have run."""
        done_s = 0.0
        for index in self.step.backward_order:
            tensor = self.step.tensors[index]
            own_s = tensor.num_bytes * self.costs.copy_s_per_byte + hook_s * self.costs.python
            yield from self.compute("backward", tensor.ready_s - done_s)
            yield from self.compute_on_core("backward", own_s)
            done_s = tensor.ready_s
            ready(index)
        yield from self.compute("backward", self.step.backward_s - done_s)

    def optimizer(self, part: float = 1.0) -> Process:
        yield from self.compute_on_core("optimizer", self.optimizer_s * part)

    def end_step(self) -> None:
        self.step_ends_s.append(self.engine.now_s)

    def compute(self, track: str, seconds: float, share: float | None = None) -> Process:
        """Keep the training thread busy, and a core for a ``share`` of that time, in timeslices that lanes share."""
        if share is None:  # seconds are measured with as many workers per core as there are
            share = min(1.0, self.step.cpu_share * self.costs.oversubscription)
        with self.engine.span(track, track):
            if not share:
                yield seconds
                return
            for busy_s in timeslices(seconds * share):
                yield busy_s * (1 - share) / share
                yield self.host.processor.work_in_timeslices(self.engine.now_s, busy_s) - self.engine.now_s

    def compute_on_core(self, track: str, seconds: float) -> Process:
        """Keep the training thread and a core busy, unless an accelerator computes."""
        yield from self.compute(track, seconds, 1.0 if self.costs.python else None)

    def wait(self, signal: Signal, name: str) -> Process:
        if not signal.happened:
            with self.engine.span("wait", name):
                yield signal

    def wait_all(self, signals: Sequence[Signal], name: str) -> Process:
        for signal in signals:
            yield from self.wait(signal, name)

    def all_reduce(self, num_bytes: float) -> list[Slice]:
        """Return the backend's all-reduce, two rings in one slice."""
        rounds = 2 * ring(self.network.workers, self.network.node_size, num_bytes)
        return [Slice(rounds, slowdown=self.costs.all_reduce, byte_s=self.costs.all_reduce_byte_s)]

    def collective(
        self, phase: Phase, num_bytes: float, slice_bytes: float, width: float = 1.0, code_s: float = 0.0
    ) -> list[Slice]:
        """Return our half of an all-reduce: on accelerators a ring in one slice, on CPUs in slices, scatters direct.

        Of each byte ``width`` bytes travel, in messages of at most ``slice_bytes``. ``code_s``: seconds to encode and
        decode all bytes once.
        """
        workers, node_size, costs = self.network.workers, self.network.node_size, self.costs
        scatters = phase == "reduce-scatter"
        byte_s = costs.byte_s
        if scatters and costs.scatter_byte_s is not None:
            byte_s += (costs.scatter_byte_s - costs.byte_s) / width  # sums are of whole numbers
        sent_bytes, work_s = width * num_bytes, code_s * (workers - 1) / workers
        if self.network.native:
            return [Slice(ring(workers, node_size, sent_bytes), work_s, byte_s=byte_s)]
        message_bytes = slice_bytes
        if scatters:
            message_bytes = scatter_message_bytes(int(slice_bytes), workers - 1)
        elif width < 1:
            message_bytes = coded_message_bytes(int(slice_bytes), workers)
        count = max(1, -int(-sent_bytes // workers // message_bytes))
        rounds = (all_to_all if scatters else ring)(workers, node_size, sent_bytes / count)
        return [Slice(rounds, work_s / count, byte_s=byte_s)] * count
