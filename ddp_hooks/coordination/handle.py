"""What a caller holds of something that was asked for: to wait for it, on any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from ddp_hooks.comm import LaneError, LaneTimeout, ThreadWork, Work, see
from ddp_hooks.comm.failure import FailureStore

logger = logging.getLogger("ddp_hooks")

_POLL_S = 1.0  # how often a wait asks whether another rank has failed
_deciding = threading.Lock()  # of all agreements: held for a moment, and made but once


class Agreement:
    """Becomes work when all ranks have asked for the same, or an error.

    Args:
        name: of the request.
        witness: who knows of ranks that failed.
        describe: says where the control thread is, for messages.
        fail: told of an error of the work, which ends everything.
        being_waited_for: is entered while a thread waits for a decision.
        timeout_s: after so much longer than this a wait ends in any case; the control thread names ranks that are
            missing, and ends what takes too long, before. None: a wait may take as long as it takes.
        stall_warning_s: after so long it is logged if another rank does not answer the control thread.
    """

    def __init__(
        self,
        name: str,
        witness: FailureStore,
        describe: Callable[[], str],
        fail: Callable[[LaneError], None],
        being_waited_for: Callable[[], AbstractContextManager[None]],
        timeout_s: float | None,
        stall_warning_s: float,
    ) -> None:
        self.name = name
        self._witness = witness
        self._describe = describe
        self._fail = fail
        self._being_waited_for = being_waited_for
        self._timeout_s = timeout_s
        self._stall_warning_s = stall_warning_s
        self._is_decided = False
        self._decided: threading.Event | None = None  # for those that wait: most agreements nobody waits for
        self._work: Work | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether a wait would return at once, with a result."""
        return self._is_decided and self._error is None and (self._work is None or self._work.done)

    @property
    def error(self) -> Exception | None:
        """What a wait would raise at once."""
        if self._error is None and isinstance(self._work, ThreadWork):
            return self._work.error_within(0)
        return self._error

    def decide(self, work: Work | None = None, error: Exception | None = None) -> None:
        """Let those that wait go on; the first decision counts."""
        with _deciding:
            if not self._is_decided:
                self._work, self._error = work, error
                self._is_decided = True
                if self._decided is not None:
                    self._decided.set()

    def wait(self) -> None:
        """Return when the result is there."""
        if not self._is_decided:
            with self._being_waited_for():
                self._wait_for_a_decision()
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error
        if self._work is not None:
            try:
                self._work.wait()
            except LaneError as error:
                self._fail(error)
                raise

    def _wait_for_a_decision(self) -> None:
        with _deciding:
            if self._is_decided:
                return
            decided = self._decided = self._decided or threading.Event()
        start_s, warned = time.monotonic(), False
        while not decided.wait(_POLL_S):
            failure = self._witness.failure_during(f"{self.name} cannot be done")
            if failure is not None and not self._is_decided:
                self._fail(failure)  # the control thread may hear of it much later
                raise failure
            waited_s = time.monotonic() - start_s
            if waited_s >= self._stall_warning_s and not warned and not self._describe().endswith("idle"):
                warned = True
                hint = self._witness.report_wait(self._describe())
                logger.warning("waited %.0f s for %s; %s. %s", waited_s, self.name, self._describe(), hint)
            if self._timeout_s is not None and waited_s >= self._timeout_s * 1.25 + _POLL_S:
                hint = self._witness.report_wait(self._describe())
                raise LaneTimeout(
                    f"waited {waited_s:.0f} s for {self.name}; {self._describe()}. {hint}{see('a-wait-timed-out')}"
                )
        if warned and self._error is None:
            self._witness.end_wait()


class Handle:
    """A collective that was asked for.

    Args:
        agreement: that it waits for.
        result: makes what :meth:`wait` returns, when it is there.
    """

    def __init__(self, agreement: Agreement, result: Callable[[], Tensor]) -> None:
        self._agreement = agreement
        self._result = result

    @property
    def label(self) -> str:
        """The request's name."""
        return self._agreement.name

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._agreement.done

    @property
    def error(self) -> Exception | None:
        """What :meth:`wait` would raise at once, if it is known already."""
        return self._agreement.error

    def wait(self) -> Tensor:
        """The result.

        Raises:
            ValueError: on every rank, if ranks have asked for different things under one name.
            LaneError: another rank died, closed its coordinator, or did not ask for it in time.
        """
        self._agreement.wait()
        return self._result()
