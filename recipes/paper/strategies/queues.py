"""Queues of simulated work: of anything, and of collectives that lanes take by priority."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from ddp_hooks.planning.events import Engine, Process, Signal, SimulatedLane, Slice
from ddp_hooks.planning.simulation import Run

T = TypeVar("T")


class Queue(Generic[T]):
    """Items that some processes put and others take."""

    def __init__(self, engine: Engine) -> None:
        self.items: list[T] = []
        self._engine = engine
        self._changed = Signal()

    def put(self, item: T) -> None:
        """Add an item."""
        self.items.append(item)
        changed, self._changed = self._changed, Signal()
        self._engine.fire(changed)

    def wait(self) -> Process:
        """Wait until there is an item."""
        while not self.items:
            yield self._changed

    def take_all(self) -> list[T]:
        """Remove and return all items."""
        items, self.items = self.items, []
        return items


class _Submission(NamedTuple):
    priority: float
    slices: list[Slice]
    label: str
    arrived: Signal


class PriorityLanes:
    """Streams of communication: whichever is free takes the submission with the lowest priority value."""

    def __init__(self, run: Run, count: int = 1) -> None:
        self._engine = run.engine
        self._queue = Queue[_Submission](run.engine)
        for lane in run.lanes(count, window=1):
            run.engine.start(self._serve(lane))

    def submit(self, slices: list[Slice], label: str, priority: float) -> Signal:
        """Send slices; return the signal of their arrival."""
        submission = _Submission(priority, slices, label, Signal())
        self._queue.put(submission)
        return submission.arrived

    def _serve(self, lane: SimulatedLane) -> Process:
        while True:
            yield from self._queue.wait()
            waiting = self._queue.items
            submission = waiting.pop(min(range(len(waiting)), key=lambda i: waiting[i].priority))
            yield from lane.send(submission.slices, submission.label)
            self._engine.fire(submission.arrived)
