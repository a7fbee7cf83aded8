"""A small discrete-event engine, and the lanes, links and processors that it runs.

Processes are generators; they yield seconds that pass, or a signal that they wait for.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from ddp_hooks.comm import AlphaBeta, Span
from ddp_hooks.comm.executors.slices import WINDOW
from ddp_hooks.planning.network import Costs, Network, Round, Rounds

_TIMESLICE_S = 3e-3  # of a thread, while others wait for its core
_MAX_TIMESLICES = 256  # per piece of work; timeslices of longer work are longer
_MAX_EVENTS = 64  # per slice; of more rounds, neighbours are simulated as one


@dataclass
class Signal:
    """An event that happens once, and the processes that wait for it."""

    happened: bool = False
    waiting: list[Process] = field(default_factory=list)


Process: TypeAlias = Generator["float | Signal", None, None]


class Engine:
    """Run processes in the order of a clock that starts at 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.spans: list[Span] = []
        self._order = itertools.count()
        self._due: list[tuple[float, int, Process]] = []
        self._ended: dict[Process, Signal] = {}

    def start(self, process: Process) -> Signal:
        """Start a process now; return the signal of its end."""
        ended = self._ended[process] = Signal()
        self._resume(process)
        return ended

    def all_of(self, signals: Sequence[Signal]) -> Signal:
        """Return a signal that happens when all of ``signals`` have happened."""
        return signals[0] if len(signals) == 1 else self.start(signal for signal in signals)

    def fire(self, signal: Signal) -> None:
        signal.happened = True
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self._at(self.now_s, process)

    def run(self) -> None:
        """Run until all processes have ended, or wait for signals."""
        while self._due:
            self.now_s, _, process = heapq.heappop(self._due)
            self._resume(process)

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        start_s = self.now_s
        yield
        if self.now_s > start_s:
            self.spans.append(Span(track, name, start_s, self.now_s))

    def _at(self, time_s: float, process: Process) -> None:
        heapq.heappush(self._due, (time_s, next(self._order), process))

    def _resume(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, Signal):
                if wanted.happened:
                    continue
                wanted.waiting.append(process)
                return
            self._at(self.now_s + wanted, process)  # also 0 s: processes that were woken before go first
            return
        self.fire(self._ended.pop(process))


class Link:
    """One direction of a link: messages follow one another, and arrive a latency later."""

    def __init__(self, cost: AlphaBeta, burst_credit_s: float = 0.0) -> None:
        self._cost = cost
        self._burst_credit_s = burst_credit_s
        self._free_s = 0.0
        self.sent_bytes = 0.0

    def send(self, now_s: float, num_bytes: float, times: int = 1, slowdown: float = 1.0) -> float:
        """Send a message ``times`` times, each after the arrival of the one before; return the last arrival."""
        if not num_bytes:
            return now_s
        carrying_s, alpha_s = num_bytes * self._cost.beta_s_per_byte * slowdown, self._cost.alpha_s
        begin_s = max(now_s - self._burst_credit_s, self._free_s)
        self._free_s = begin_s + times * carrying_s
        self.sent_bytes += num_bytes * times
        # Each of the following messages begins with the credit of a latency's idleness.
        following_s = alpha_s + max(0.0, carrying_s - min(self._burst_credit_s, alpha_s))
        return max(now_s, begin_s + carrying_s) + alpha_s + (times - 1) * following_s


class Processor:
    """Cores of one worker: lanes are served first come, first served; the training thread shares a core with them."""

    def __init__(self, cores: int = 1) -> None:
        self._free_s = [0.0] * cores  # per core

    def work(self, now_s: float, seconds: float) -> float:
        """Do a lane's work on the core that is free first; return its end."""
        if not seconds:
            return now_s
        core = self._free_s.index(min(self._free_s))
        self._free_s[core] = max(now_s, self._free_s[core]) + seconds
        return self._free_s[core]

    def work_in_timeslices(self, now_s: float, seconds: float) -> float:
        """Do the training thread's work; return its end. While lanes have work, each side has half of the core."""
        ahead_s = max(0.0, min(self._free_s) - now_s)
        self.work(now_s, seconds)
        return now_s + seconds + min(ahead_s, seconds)


def timeslices(seconds: float) -> Iterator[float]:
    """Cut long work into equal parts, between which other work runs."""
    count = min(_MAX_TIMESLICES, math.ceil(seconds / _TIMESLICE_S))
    return itertools.repeat(seconds / max(1, count), count)


@dataclass
class Slice:
    """A part of a collective that travels by itself."""

    rounds: Rounds
    work_s: float = 0.0  # computed by its lane before it begins, such as selecting and encoding
    slowdown: float = 1.0  # time of its bytes, relative to the link
    byte_s: float | None = None  # of the processor; None: the host's


class Host:
    """A worker's links and processor, which its lanes share."""

    def __init__(self, network: Network, costs: Costs) -> None:
        self.between = Link(network.link, network.burst_credit_s)
        self.inside = Link(network.inside or network.link)
        self.processor = Processor(costs.cores)
        self.worked_s = 0.0  # by the processor, for communication
        self._node_size = network.node_size
        self._costs = costs

    def work(self, now_s: float, seconds: float) -> float:
        """Do a lane's work; return its end."""
        self.worked_s += seconds
        return self.processor.work(now_s, seconds)

    def send(self, now_s: float, each: Round, times: int, part: Slice) -> float:
        """Run one round of a slice ``times`` times; return the end."""
        own_bytes = each.between_bytes / self._node_size + each.inside_bytes
        byte_s = self._costs.byte_s if part.byte_s is None else part.byte_s
        worked_s = self.work(now_s, times * (each.messages * self._costs.message_s + byte_s * own_bytes))
        between_s = self.between.send(now_s, each.between_bytes, times, part.slowdown)
        return max(worked_s, between_s, self.inside.send(now_s, each.inside_bytes, times, part.slowdown))


class SimulatedLane:
    """A stream of communication: one submission after the other, with up to ``window`` slices of it under way."""

    def __init__(self, engine: Engine, host: Host, name: str, window: int = WINDOW) -> None:
        self._engine = engine
        self._host = host
        self._name = name
        self._window = window
        self._waiting: deque[tuple[list[Slice], str, Sequence[Signal], Signal]] = deque()
        self._is_idle = True

    def submit(self, slices: list[Slice], label: str, after: Sequence[Signal] = ()) -> Signal:
        """Send slices after the signals ``after``; return the signal of their arrival."""
        arrived = Signal()
        self._waiting.append((slices, label, after, arrived))
        if self._is_idle:
            self._is_idle = False
            self._engine.start(self._serve())
        return arrived

    def _serve(self) -> Process:
        yield 0.0  # the submitter goes on first
        while self._waiting:
            slices, label, after, arrived = self._waiting.popleft()
            yield from after
            yield from self.send(slices, label)
            self._engine.fire(arrived)
        self._is_idle = True

    def send(self, slices: list[Slice], label: str) -> Process:
        """Send slices as a part of the process that calls it."""
        under_way: deque[Signal] = deque()
        with self._engine.span(self._name, label):
            for part in slices:
                if len(under_way) == self._window:
                    yield under_way.popleft()
                for seconds in timeslices(part.work_s):
                    yield self._host.work(self._engine.now_s, seconds) - self._engine.now_s
                under_way.append(self._engine.start(self._run_rounds(part)))
            yield from under_way

    def _run_rounds(self, part: Slice) -> Process:
        at_once = max(1, -(-sum(each.times for each in part.rounds) // _MAX_EVENTS))
        for each in part.rounds:
            for first in range(0, each.times, at_once):
                times = min(each.times - first, at_once)
                yield self._host.send(self._engine.now_s, each, times, part) - self._engine.now_s


def clock_of(slices: list[Slice], network: Network, lanes: int = 1) -> float:
    """Return the seconds until slices have arrived, the same slices on each lane."""
    engine = Engine()
    host = Host(network, Costs())
    for number in range(lanes):
        SimulatedLane(engine, host, f"lane {number}").submit(slices, "slices")
    engine.run()
    return engine.now_s
