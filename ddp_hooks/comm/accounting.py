"""Accounting of lanes and waits: bytes, rounds, busy seconds, stalls, and spans for a timeline."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ddp_hooks.comm.algorithms.exchange import Recv, Send

KEPT_STEPS, KEPT_SPANS = 100, 50_000
"""Number of last steps, and of spans, that a :class:`Recorder` keeps: about 12 MB."""


class Span(NamedTuple):
    """Span of time on ``track``, from ``start_s`` to ``end_s`` of ``time.perf_counter()``."""

    track: str
    name: str
    start_s: float
    end_s: float


@dataclass
class Traffic:
    """Running totals of one lane, or of several added up."""

    sent_bytes: int = 0
    received_bytes: int = 0
    rounds: int = 0
    busy_s: float = 0.0  # seconds in which the lane had work under way

    def __add__(self, other: Traffic) -> Traffic:
        sent, received = self.sent_bytes + other.sent_bytes, self.received_bytes + other.received_bytes
        return Traffic(sent, received, self.rounds + other.rounds, self.busy_s + other.busy_s)

    def __sub__(self, other: Traffic) -> Traffic:
        sent, received = self.sent_bytes - other.sent_bytes, self.received_bytes - other.received_bytes
        return Traffic(sent, received, self.rounds - other.rounds, self.busy_s - other.busy_s)

    def count(self, exchange: Send | Recv) -> None:
        if isinstance(exchange, Recv):
            self.received_bytes += exchange.tensor.nbytes
        else:
            self.sent_bytes += exchange.tensor.nbytes


@dataclass
class Recorder:
    """Collects spans of the last :data:`KEPT_STEPS` steps, at most :data:`KEPT_SPANS`, if ``enabled``; thread-safe."""

    enabled: bool = False
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=KEPT_SPANS))
    _num_added: int = 0
    _added_before: deque[int] = field(default_factory=lambda: deque([0], maxlen=KEPT_STEPS), repr=False)  # each step
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, track: str, name: str, start_s: float, end_s: float) -> None:
        if self.enabled:
            with self._lock:
                self.spans.append(Span(track, name, start_s, end_s))
                self._num_added += 1

    def end_step(self) -> None:
        """End a step, and drop the spans of old steps."""
        if self.enabled:
            with self._lock:
                kept = self._num_added - self._added_before[0]
                while len(self.spans) > kept:
                    self.spans.popleft()
                self._added_before.append(self._num_added)

    @contextmanager
    def measure(self, track: str, name: str, count: Callable[[float], None]) -> Iterator[None]:
        """Record the time inside, also for torch's profiler, and ``count`` its seconds."""
        start_s = time.perf_counter()
        try:
            with torch.profiler.record_function(f"ddp_hooks {track}: {name}"):
                yield
        finally:
            end_s = time.perf_counter()
            count(end_s - start_s)
            self.add(track, name, start_s, end_s)

    def snapshot(self) -> list[Span]:
        """Return the spans in order of their start."""
        with self._lock:
            return sorted(self.spans, key=lambda span: span.start_s)


@dataclass
class Stall:
    """Seconds that the training thread spent waiting for communication, in total."""

    seconds: float = 0.0

    def measure(self, recorder: Recorder, name: str) -> AbstractContextManager[None]:
        """Count the time inside as a stall, and record it as ``name``."""
        return recorder.measure("wait", name, self._add)

    def _add(self, seconds: float) -> None:
        self.seconds += seconds


def mebibytes(amount: float) -> int:
    """Convert MiB to whole bytes."""
    return int(amount * (1 << 20))
