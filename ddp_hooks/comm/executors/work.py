"""Work: the handle of a submission, for the training thread to wait for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ddp_hooks.comm.failure import FailureStore, LaneError, LaneTimeout
from ddp_hooks.comm.validation import see

logger = logging.getLogger("ddp_hooks")

_POLL_S = 1.0  # how often a wait asks whether another rank has failed


class Work(Protocol):
    """Handle of a submitted collective."""

    label: str

    @property
    def done(self) -> bool:
        """True if a wait would return at once."""

    def wait(self) -> None:
        """Wait until the result may be used.

        Raises:
            LaneError: the collective failed, or a rank did.
            LaneTimeout: it did not complete within ``timeout_s``.
        """


class ThreadWork:
    """Work of a lane's thread; carries the lane's error to the training thread."""

    def __init__(
        self, label: str, timeout_s: float, stall_warning_s: float, describe: Callable[[], str], failures: FailureStore
    ) -> None:
        self.label = label
        self.finished_s = 0.0  # time.perf_counter() when it was
        self._timeout_s = timeout_s
        self._stall_warning_s = min(stall_warning_s, timeout_s)
        self._describe = describe
        self._failures = failures
        self._finished = threading.Event()
        self._error: LaneError | None = None

    @property
    def done(self) -> bool:
        return self._finished.is_set() and self._error is None

    def finish(self, error: LaneError | None = None) -> None:
        self._error = error
        self.finished_s = time.perf_counter()
        self._finished.set()

    def wait(self, in_lane: bool = False) -> None:
        """Wait; ``in_lane`` without a timeout, as the waiter for the dependent work has its own."""
        if self.done:  # as in most waits, without a lock
            return
        start_s, warned = time.monotonic(), False
        # The backend's own timeout fires first and says more; this one is for a lane that never came to this work.
        give_up_s = self._timeout_s * 1.25 + _POLL_S
        while not self._finished.wait(_POLL_S):
            # A rank whose own connections stand hears of a failure here.
            failure = self._failures.failure_during(f"{self._describe()} cannot end")
            if failure is not None:
                raise failure
            if in_lane:
                continue
            waited_s = time.monotonic() - start_s
            if waited_s >= (give_up_s if warned else self._stall_warning_s):
                place = self._describe()
                text = f"waited {waited_s:.0f} s for {self.label}; {place}. {self._failures.report_wait(place)}"
                if warned:
                    raise LaneTimeout(f"{text}{see('a-wait-timed-out')}")
                warned = True
                logger.warning("%s", text)
        if warned and self._error is None:  # a wait that failed stays on record, for ranks that still wait
            self._failures.end_wait()
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error

    def error_within(self, seconds: float) -> LaneError | None:
        """Return the error that ended the collective; None if it succeeds or has not ended after ``seconds``."""
        self._finished.wait(seconds)
        return self._error


@dataclass(eq=False)
class StreamWork:
    """Work in stream order on an accelerator; waiting makes the current stream wait, not the host."""

    label: str
    device: torch.device
    event: torch.cuda.Event | None = None

    @property
    def done(self) -> bool:
        return self.event is None  # a stream must always be told to wait, even for an event that has passed

    def wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)


class WorkGroup:
    """Several pieces of work that are one collective."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.label = works[0].label
        self.works = works

    @property
    def done(self) -> bool:
        return all(work.done for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
