"""A small discrete-event engine: processes are generators that wait for seconds to pass, or for each other."""

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
from ddp_hooks.planning.network import Network
from ddp_hooks.planning.patterns import Hop, Pattern

_TURN_S = 3e-3  # of a thread, while others wait for its core
_MOST_TURNS = 256  # that are simulated; of longer work turns are longer


@dataclass
class Signal:
    """Something that happens once, and that processes wait for."""

    happened: bool = False
    waiting: list[Process] = field(default_factory=list)


Process: TypeAlias = Generator["float | Signal", None, None]


class Engine:
    """Runs processes in the order of a clock that starts at 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.spans: list[Span] = []
        self._order = itertools.count()
        self._due: list[tuple[float, int, Process]] = []
        self._ended: dict[Process, Signal] = {}

    def start(self, process: Process) -> Signal:
        """Begin a process, now; returns what tells of its end."""
        ended = self._ended[process] = Signal()
        self._resume(process)
        return ended

    def fire(self, signal: Signal) -> None:
        """Let it happen: who waits for it goes on, now."""
        signal.happened = True
        waiting, signal.waiting = signal.waiting, []
        for process in waiting:
            self._at(self.now_s, process)

    def run(self) -> None:
        """Go on until nothing is left to happen."""
        while self._due:
            self.now_s, _, process = heapq.heappop(self._due)
            self._resume(process)

    @contextmanager
    def span(self, track: str, name: str) -> Iterator[None]:
        """Note what a process did from here to there."""
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
            self._at(self.now_s + wanted, process)  # also of 0 s: who was woken before goes first
            return
        self.fire(self._ended.pop(process))


class Wire:
    """One direction of a link: what is sent follows what was sent before, and arrives a latency later.

    Args:
        cost: seconds per message and per byte.
        credit_s: of idleness that the wire makes up for, see :class:`~ddp_hooks.planning.Network`.
    """

    def __init__(self, cost: AlphaBeta, credit_s: float = 0.0) -> None:
        self._cost = cost
        self._credit_s = credit_s
        self._free_s = 0.0
        self.sent_bytes = 0.0

    def send(self, now_s: float, num_bytes: float, times: int = 1, slowdown: float = 1.0) -> float:
        """When it has arrived, sent ``times`` times in a row, each after the arrival of the one before.

        While it waits for arrivals others may use the wire.
        """
        if not num_bytes:
            return now_s
        carrying_s, alpha_s = num_bytes * self._cost.beta_s_per_byte * slowdown, self._cost.alpha_s
        begin_s = max(now_s - self._credit_s, self._free_s)
        self._free_s = begin_s + times * carrying_s
        self.sent_bytes += num_bytes * times
        # Each of the following ones begins with the credit of a latency's idleness.
        following_s = alpha_s + max(0.0, carrying_s - min(self._credit_s, alpha_s))
        return max(now_s, begin_s + carrying_s) + alpha_s + (times - 1) * following_s


class Processor:
    """What a worker computes with: its lanes, first come, first served, and its training, which takes turns with them.

    Args:
        cores: pieces of work at a time.
    """

    def __init__(self, cores: int = 1) -> None:
        self._free_s = [0.0] * cores  # of each core

    def work(self, now_s: float, seconds: float) -> float:
        """When a lane's work that begins now, or when a core is free, has ended."""
        if not seconds:
            return now_s
        core = self._free_s.index(min(self._free_s))
        self._free_s[core] = max(now_s, self._free_s[core]) + seconds
        return self._free_s[core]

    def work_in_turns(self, now_s: float, seconds: float) -> float:
        """The same of the training: where lanes have work already, each side has half of the core."""
        ahead_s = max(0.0, min(self._free_s) - now_s)
        self.work(now_s, seconds)
        return now_s + seconds + min(ahead_s, seconds)


def turns(seconds: float) -> Iterator[float]:
    """Work that is long, in equal parts, between which others have theirs."""
    count = min(_MOST_TURNS, math.ceil(seconds / _TURN_S))
    return itertools.repeat(seconds / max(1, count), count)


class Host:
    """A worker, and with it all the others: what its lanes share.

    Args:
        network: whose links it sends through.
        message_s, byte_s: seconds of its processor per message and per byte, sent and received.
        cores: of its processor.
    """

    def __init__(self, network: Network, message_s: float = 0.0, byte_s: float = 0.0, cores: int = 1) -> None:
        self.between = Wire(network.link, network.credit_s)
        self.inside = Wire(network.inside or network.link)
        self.processor = Processor(cores)
        self._node_size = network.node_size
        self._message_s = message_s
        self._byte_s = byte_s

    def send(self, now_s: float, hop: Hop, times: int, piece: Slice) -> float:
        """When these rounds of a slice are complete."""
        own_bytes = hop.between_bytes / self._node_size + hop.inside_bytes
        byte_s = self._byte_s if piece.byte_s is None else piece.byte_s
        worked_s = self.processor.work(now_s, times * (hop.messages * self._message_s + byte_s * own_bytes))
        between_s = self.between.send(now_s, hop.between_bytes, times, piece.slowdown)
        return max(worked_s, between_s, self.inside.send(now_s, hop.inside_bytes, times, piece.slowdown))


@dataclass
class Slice:
    """A part of a collective that travels by itself.

    Args:
        pattern: its rounds.
        work_s: seconds in which its lane computes before it begins, such as selecting.
        slowdown: how many times as long as the link alone its bytes take.
        byte_s: seconds of the processor per byte of its messages; None: what moving them takes, with nothing added up.
    """

    pattern: Pattern
    work_s: float = 0.0
    slowdown: float = 1.0
    byte_s: float | None = None


@dataclass
class _Submission:
    slices: list[Slice]
    label: str
    priority: float
    after: Sequence[Signal]
    done: Signal


@dataclass
class Waiting:
    """What lanes are still to send."""

    submissions: list[_Submission] = field(default_factory=list)
    news: Signal = field(default_factory=Signal)
    closed: bool = False


class SimulatedLane:
    """A stream of communication: one submission after the other, of each a few slices at a time.

    Args:
        engine, host: shared by all lanes.
        name: of its track.
        window: slices under way.
        waiting: shared with other lanes that take the submission with the lowest ``priority`` first, whichever of them
            is free; None: this one takes its own, in their order.
        most_events: rounds of a slice that are simulated one by one; of more, neighbours count as one.
    """

    def __init__(
        self,
        engine: Engine,
        host: Host,
        name: str,
        window: int = WINDOW,
        waiting: Waiting | None = None,
        most_events: int = 64,
    ) -> None:
        self._engine = engine
        self._host = host
        self._name = name
        self._window = window
        self._by_priority = waiting is not None
        self._waiting = waiting or Waiting()
        self._most_events = most_events
        engine.start(self._serve())

    def submit(
        self, slices: list[Slice], label: str, priority: float = 0.0, after: Sequence[Signal] = ()
    ) -> Signal:
        """Send them when their turn has come, and ``after`` has happened; returns what tells that all have arrived."""
        done = Signal()
        self._waiting.submissions.append(_Submission(slices, label, priority, after, done))
        self._tell()
        return done

    def close(self) -> None:
        """Take nothing more."""
        self._waiting.closed = True
        self._tell()

    def _tell(self) -> None:
        news, self._waiting.news = self._waiting.news, Signal()
        self._engine.fire(news)

    def _serve(self) -> Process:
        while True:
            while not self._waiting.submissions:
                if self._waiting.closed:
                    return
                yield self._waiting.news
            submission = self._next()
            yield from submission.after
            with self._engine.span(self._name, submission.label):
                yield from self._send(submission.slices)
            self._engine.fire(submission.done)

    def _next(self) -> _Submission:
        waiting = self._waiting.submissions
        if not self._by_priority:
            return waiting.pop(0)
        return waiting.pop(min(range(len(waiting)), key=lambda i: (waiting[i].priority, i)))

    def _send(self, slices: list[Slice]) -> Process:
        under_way: deque[Signal] = deque()
        for piece in slices:
            if len(under_way) == self._window:
                yield under_way.popleft()
            for turn_s in turns(piece.work_s):
                yield self._host.processor.work(self._engine.now_s, turn_s) - self._engine.now_s
            under_way.append(self._engine.start(self._rounds(piece)))
        yield from under_way

    def _rounds(self, piece: Slice) -> Process:
        share = max(1, -(-sum(hop.times for hop in piece.pattern) // self._most_events))
        for hop in piece.pattern:
            left = hop.times
            while left:
                times = min(left, share)
                left -= times
                yield self._host.send(self._engine.now_s, hop, times, piece) - self._engine.now_s


def clock_of(slices: list[Slice], network: Network, lanes: int = 1) -> float:
    """Seconds until slices have arrived, the same ones on each of so many lanes."""
    engine = Engine()
    host = Host(network)
    opened = [SimulatedLane(engine, host, f"lane {i}") for i in range(lanes)]
    for lane in opened:
        lane.submit(slices, "slices")
        lane.close()
    engine.run()
    return engine.now_s
