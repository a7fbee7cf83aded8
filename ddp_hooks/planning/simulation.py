"""Training steps of one worker, simulated: what its thread computes and waits for, and what its lanes send.

All workers are alike and in step, so one stands for all. The collectives are those of :mod:`ddp_hooks.comm`, as
:mod:`~ddp_hooks.planning.patterns` reads them off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ddp_hooks.comm import Span, see
from ddp_hooks.comm.executors.slices import WINDOW, scatter_message_bytes
from ddp_hooks.planning import bounds
from ddp_hooks.planning.events import Engine, Host, Process, Signal, SimulatedLane, Slice, Waiting, turns
from ddp_hooks.planning.network import Network
from ddp_hooks.planning.patterns import Phase, Schedule, all_reduce, all_to_all, ring
from ddp_hooks.planning.step import StepProfile

_STEPS = 4  # simulated; what is under way at the end of the first ones shapes the later ones


@dataclass(frozen=True)
class Costs:
    """What communication costs a worker's processor, in seconds; 0 where an accelerator does it at no cost.

    Args:
        message_s: per message, sent and received.
        byte_s: per byte of a message, sent and received.
        scatter_byte_s: the same of a reduce-scatter, which adds up; None: as the others.
        all_reduce_byte_s: the same of the backend's all-reduce; None: as the others.
        all_reduce: how many times as long as a ring of ours the backend's own all-reduce takes; it is not our code.
        copy_s_per_byte: of a gradient, into DDP's bucket.
        select_s_per_byte: of a gradient, for all that a sparse all-reduce computes.
        python: how many times as long as with a core to itself Python takes, for the hooks of strategies; 0: it runs
            ahead of an accelerator.
        cores: of the processor, for each worker; at least one.
        crowd: workers that share a core; at least one.
    """

    message_s: float = 0.0
    byte_s: float = 0.0
    scatter_byte_s: float | None = None
    all_reduce_byte_s: float | None = None
    all_reduce: float = 1.0
    copy_s_per_byte: float = 0.0
    select_s_per_byte: float = 0.0
    python: float = 0.0
    cores: int = 1
    crowd: float = 1.0


class Strategy(Protocol):
    """A way to train with several workers."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def line(self) -> str:
        """What a user writes for it; empty if it is not ours."""

    def train(self, run: Run) -> Process:
        """The training thread, step after step, until ``run.is_over``."""


@dataclass(frozen=True)
class Prediction:
    """What a step takes.

    Args:
        strategy: its name.
        step_s: seconds from the end of a step to the end of the next one, on average.
        exposed_s: of those, neither forward nor backward nor other work of the loop.
        sent_bytes: through a link, per step.
        bound_s: seconds that no schedule can stay below whose collectives send as much as a ring does.
        spans: what took time on which track.
        step_ends_s: when each simulated step ended.
    """

    strategy: str
    step_s: float
    exposed_s: float
    sent_bytes: float
    bound_s: float
    spans: tuple[Span, ...]
    step_ends_s: tuple[float, ...]


def simulate(
    strategy: Strategy, step: StepProfile, network: Network, costs: Costs | None = None, steps: int = _STEPS
) -> Prediction:
    """Predict a step in the middle of a run.

    Args:
        strategy: how to communicate.
        step: what a worker computes.
        network: between workers.
        costs: of the processor.
        steps: simulated, at least two.
    """
    if steps < 2:
        raise ValueError(f"a step in the middle needs one before it: steps must be >= 2, got {steps}")
    run = Run(step, network, costs or Costs(), steps)
    run.engine.start(_main(strategy, run))
    run.engine.run()
    if len(run.step_ends_s) < steps:
        raise RuntimeError(
            f"{strategy.name}: the simulated training waits for something that never happens{see('please-report')}"
        )
    step_s = (run.step_ends_s[-1] - run.step_ends_s[0]) / (steps - 1)  # steps may differ, in turns
    return Prediction(
        strategy.name,
        step_s,
        step_s - step.compute_s - step.other_s,
        run.sent_bytes / steps,
        bounds.dependency_bound_s(step, network.workers, network.bytes_per_s),
        tuple(sorted(run.engine.spans, key=lambda span: span.start_s)),
        tuple(run.step_ends_s),
    )


def _main(strategy: Strategy, run: Run) -> Process:
    yield from strategy.train(run)
    for lane in run.opened:
        lane.close()


class Run:
    """What strategies are made of: forward, backward and optimizer of the training thread, and collectives."""

    def __init__(self, step: StepProfile, network: Network, costs: Costs, steps: int) -> None:
        self.step = step
        self.network = network
        self.costs = costs
        self.engine = Engine()
        self.opened: list[SimulatedLane] = []
        self.step_ends_s: list[float] = []
        self._host = Host(network, costs.message_s, costs.byte_s, costs.cores)
        self._steps = steps

    @property
    def sent_bytes(self) -> float:
        """Through a link, so far."""
        return self._host.between.sent_bytes

    @property
    def is_over(self) -> bool:
        """Whether all steps have ended."""
        return len(self.step_ends_s) >= self._steps

    def lanes(self, count: int, window: int = WINDOW, by_priority: bool = False) -> list[SimulatedLane]:
        """Streams of communication; by priority all of them take from one queue."""
        waiting = Waiting() if by_priority else None
        made = [SimulatedLane(self.engine, self._host, f"lane {i}", window, waiting) for i in range(count)]
        self.opened += made
        return made

    def forward(self, arrived: Mapping[int, Signal], before: Callable[[int], float] = lambda tensor: 0.0) -> Process:
        """The forward; a tensor is waited for when it is read, and ``before`` it that many seconds go by."""
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
        """The backward; ``ready`` hears of every gradient, when it lies in its bucket and its hooks have run."""
        done_s = 0.0
        for index in self.step.backward_order:
            tensor = self.step.tensors[index]
            own_s = tensor.num_bytes * self.costs.copy_s_per_byte + hook_s * self.costs.python
            yield from self.compute("backward", tensor.ready_s - done_s)
            yield from self.compute_on_core("backward", own_s)
            done_s = tensor.ready_s
            ready(index)
        yield from self.compute("backward", self.step.backward_s - done_s)

    @property
    def optimizer_s(self) -> float:
        """Seconds of an update of all parameters; workers that share a core update at the same time."""
        return max(self.step.optimizer_s, self.step.optimizer_cpu_s * self.costs.crowd)

    def optimizer(self, part: float = 1.0) -> Process:
        """The update of a part of all parameters, by the training thread."""
        yield from self.compute_on_core("optimizer", self.optimizer_s * part)

    def compute(self, track: str, seconds: float, share: float | None = None) -> Process:
        """The training thread is busy, and for a ``share`` of that with a core, for which it takes turns with lanes.

        Measured seconds are those with as many workers per core as there are; so is the share of a core.
        """
        if share is None:
            share = min(1.0, self.step.cpu_share * self.costs.crowd)
        with self.engine.span(track, track):
            if not share:
                yield seconds
                return
            for turn_s in turns(seconds * share):
                yield turn_s * (1 - share) / share
                yield self._host.processor.work_in_turns(self.engine.now_s, turn_s) - self.engine.now_s

    def compute_on_core(self, track: str, seconds: float) -> Process:
        """The same, with a core all the time, unless an accelerator does it."""
        yield from self.compute(track, seconds, 1.0 if self.costs.python else None)

    def wait(self, signal: Signal, name: str) -> Process:
        """The training thread waits."""
        if not signal.happened:
            with self.engine.span("wait", name):
                yield signal

    def end_step(self) -> None:
        """The training thread begins the next step."""
        self.step_ends_s.append(self.engine.now_s)

    def num_bytes(self, tensors: Sequence[int]) -> int:
        """Of some tensors."""
        return sum(self.step.tensors[index].num_bytes for index in tensors)

    def all_reduce(self, num_bytes: float, schedule: Schedule = "ring") -> list[Slice]:
        """An all-reduce of the backend's, in one piece."""
        network = self.network
        pattern = all_reduce(schedule, network.workers, network.node_size, num_bytes)
        return [Slice(pattern, slowdown=self.costs.all_reduce, byte_s=self.costs.all_reduce_byte_s)]

    def collective(self, phase: Phase, num_bytes: float, slice_bytes: float) -> list[Slice]:
        """A half of it: a ring, of accelerators in one piece; on CPUs in slices, and reduce-scatters direct."""
        workers, place = self.network.workers, (self.network.workers, self.network.node_size)
        scatters = phase == "reduce-scatter"
        byte_s = self.costs.scatter_byte_s if scatters else None
        if self.network.native:
            return [Slice(ring(*place, num_bytes), byte_s=byte_s)]
        message_bytes = scatter_message_bytes(int(slice_bytes), workers - 1) if scatters else slice_bytes
        count = max(1, -int(-num_bytes // workers // message_bytes))
        pattern = (all_to_all if scatters else ring)(*place, num_bytes / count)
        return [Slice(pattern, byte_s=byte_s)] * count
