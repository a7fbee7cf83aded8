"""Result of a request: callers wait for it on any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from ddp_hooks.comm import LaneError, LaneTimeout, ThreadWork, Work, see
from ddp_hooks.comm.failure import FailureStore

logger = logging.getLogger("ddp_hooks")

_POLL_S = 1.0  # between two questions about failures of other ranks
_deciding = threading.Lock()  # one for all agreements: each takes it for a moment


@dataclass(frozen=True)
class WaitContext:
    """Shared by all waits of a coordinator."""

    failures: FailureStore
    describe: Callable[[], str]  # returns the state of the control thread, for messages
    fail: Callable[[LaneError], None]  # ends all requests
    waiting: Callable[[], AbstractContextManager[None]]  # context of a thread that waits for a decision
    timeout_s: float
    stall_warning_s: float


class Agreement:
    """Decision of all ranks about one request: work that moves it, or an error.

    Waits end after ``1.25 * timeout_s + 1`` at the latest; the control thread names missing ranks earlier.
    """

    def __init__(self, name: str, context: WaitContext) -> None:
        self.name = name
        self.context = context
        self._is_decided = False
        self._is_complete = False
        self._decided: threading.Event | None = None  # made by the first thread that waits; most have none
        self._work: Work | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """True if the result is there, so that a wait returns at once."""
        is_complete = self._is_complete or self._work is None or self._work.done
        return self._is_decided and self._error is None and is_complete

    @property
    def error(self) -> Exception | None:
        """Error that a wait would raise at once."""
        return self._error if self._error is not None or self._work is None else error_of(self._work)

    def decide(self, work: Work | None = None, error: Exception | None = None) -> None:
        """Wake threads that wait; only the first decision counts."""
        with _deciding:
            if not self._is_decided:
                self._work, self._error = work, error
                self._is_decided = True
                if self._decided is not None:
                    self._decided.set()

    def complete(self) -> None:
        """Note that the result is there, a moment before the lane says so."""
        self._is_complete = True

    def wait(self) -> None:
        """Wait for the result; raises as :meth:`Handle.wait`."""
        if not self._is_decided:
            with self.context.waiting():
                self._wait_for_decision()
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error
        if self._work is not None:
            try:
                self._work.wait()
            except LaneError as error:
                self.context.fail(error)
                raise

    def _wait_for_decision(self) -> None:
        context, failures = self.context, self.context.failures
        with _deciding:
            if self._is_decided:
                return
            decided = self._decided = self._decided or threading.Event()
        start_s, warned = time.monotonic(), False
        while not decided.wait(_POLL_S):
            failure = failures.failure_during(f"{self.name} cannot be done")
            if failure is not None and not self._is_decided:
                context.fail(failure)  # the control thread may hear of it much later
                raise failure
            waited_s, state = time.monotonic() - start_s, context.describe()
            if waited_s >= context.stall_warning_s and not warned and not state.endswith("idle"):
                warned = True
                hint = failures.report_wait(state)
                logger.warning("waited %.0f s for %s; %s. %s", waited_s, self.name, state, hint)
            if waited_s >= context.timeout_s * 1.25 + _POLL_S:
                hint = failures.report_wait(state)
                raise LaneTimeout(f"waited {waited_s:.0f} s for {self.name}; {state}. {hint}{see('a-wait-timed-out')}")
        if warned and self._error is None:
            failures.end_wait()


class Handle:
    """Requested collective; ``result`` returns its result when that is there."""

    def __init__(self, agreement: Agreement, result: Callable[[], Tensor]) -> None:
        self._agreement = agreement
        self._result = result

    @property
    def label(self) -> str:
        """Name of the request."""
        return self._agreement.name

    @property
    def context(self) -> WaitContext:
        """Shared by all waits of the coordinator that made this handle."""
        return self._agreement.context

    @property
    def done(self) -> bool:
        """True if :meth:`wait` returns at once."""
        return self._agreement.done

    @property
    def error(self) -> Exception | None:
        """Error that :meth:`wait` raises, if it is known already."""
        return self._agreement.error

    def wait(self) -> Tensor:
        """Return the result when it is there.

        Raises:
            ValueError: on every rank, if ranks request different collectives under one name.
            LaneError: another rank died, closed its coordinator, or did not make the request in time.
            LaneTimeout: the collective did not end in time.
        """
        self._agreement.wait()
        return self._result()


def error_of(work: Work | Handle) -> Exception | None:
    """Return the error of work that has failed already."""
    if isinstance(work, ThreadWork):
        return work.error_within(0)
    return work.error if isinstance(work, Handle) else None
