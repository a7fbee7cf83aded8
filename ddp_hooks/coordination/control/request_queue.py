"""Requests of this rank that have not left, shared by all its threads; callers wait for results on any thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from ddp_hooks.comm import LaneError, LaneTimeout, see
from ddp_hooks.coordination.control.channel import ControlChannel
from ddp_hooks.coordination.control.cycle_policy import WAITING_TOO_LONG_S, CycleFacts, CyclePolicy
from ddp_hooks.coordination.control.submission import Agreement, PartialGroup, Submission

logger = logging.getLogger("ddp_hooks")

_CHECK_LANES_S = 0.5
_POLL_S = 1.0  # between two questions about failures of other ranks


class RequestQueue:
    """Requests by name, in the order in which they were made.

    Callers hold :attr:`changed`, except for :meth:`wait_for` and :meth:`fail`.
    """

    def __init__(self, policy: CyclePolicy, channel: ControlChannel, timeout_s: float, warning_s: float) -> None:
        self.changed = threading.Condition()
        self.pending: dict[str, Submission] = {}  # without a decision
        self.partial_groups: dict[str, PartialGroup] = {}
        self.blocked: dict[str, Submission] = {}  # follow requests that are not done
        self.queued: dict[int, list[Submission | None]] = {}  # agreed, by number of a message that has not left
        self.moving: set[str] = set()  # names of requests that are agreed and have not ended
        self.joined: Agreement | None = None  # this rank has no more data
        self.closing = False
        self.error: LaneError | None = None
        self._policy = policy
        self._channel = channel
        self._timeout_s = timeout_s
        self._warning_s = warning_s
        self._facts = CycleFacts()  # without threads that wait
        self._num_waiting = 0  # threads that wait for a decision
        self._waiting_since_s = math.inf
        self._is_announced = False  # other ranks know that these threads wait too long
        self._due_s = math.inf  # nothing is late before; maybe nothing is late then

    def raise_if_ended(self) -> None:
        """Raise RuntimeError after ``close()``, and the error that has ended all requests."""
        if self.closing:
            raise RuntimeError(f"this coordinator was closed: make a new one{see('the-state-was-closed')}")
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error

    def refuse(self, name: str) -> None:
        """Raise as :meth:`raise_if_ended`, and ValueError if a request of this name is not done."""
        self.raise_if_ended()
        if any(name in each for each in (self.pending, self.partial_groups, self.blocked, self.moving)):
            raise ValueError(f"{name} was asked for already, and is not done: wait for it first, or name it otherwise")

    def submit(self, submission: Submission) -> None:
        """Add a request, which is pending as soon as all requests that it follows are done."""
        request = submission.request
        if all(each.done for each in submission.after):
            self.pending[request.name] = submission
            self.notify(request.known_nbytes)
        else:
            self.blocked[request.name] = submission
            self._channel.wake()
        self._watch(submission.asked_s)

    def begin_group(self, group: PartialGroup) -> None:
        self.partial_groups[group.agreement.name] = group
        self._watch(group.began_s)

    def release_blocked(self) -> None:
        """Make requests pending that follow done ones; fail those that follow failed ones, or wait too long."""
        now_s = time.perf_counter()
        for name, submission in list(self.blocked.items()):
            lacking = [each for each in submission.after if not each.done]
            error = next((each.error for each in lacking if each.error is not None), None)
            waited_s = now_s - submission.began_s
            if error is None and lacking and waited_s >= self._timeout_s:
                names = [each.name for each in lacking]
                error = LaneTimeout(
                    f"{name} was to follow {names}, not done after {waited_s:.0f} s{see('a-wait-timed-out')}"
                )
            if error is not None:
                del self.blocked[name]
                submission.agreement.decide(error=error)
                self.changed.notify_all()
            elif not lacking:
                submission.asked_s = now_s
                self.pending[name] = self.blocked.pop(name)
                self._watch(now_s)
                self.request_cycle()

    @property
    def has_unsent(self) -> bool:
        return bool(self.pending or self.blocked or self.queued)

    def notify(self, nbytes: float = math.inf, is_urgent: bool = False) -> None:
        """Note something new for other ranks; wake the control thread if its plans may change."""
        facts, min_bytes = self._facts, self._policy.min_bytes
        is_first = facts.first_request_s == math.inf
        is_enough = facts.pending_bytes < min_bytes <= facts.pending_bytes + nbytes
        facts.last_request_s = time.perf_counter()
        facts.first_request_s = min(facts.first_request_s, facts.last_request_s)
        facts.pending_bytes += nbytes
        facts.is_blocked = facts.is_blocked or is_urgent
        if is_first or is_urgent or is_enough:
            self._channel.wake()

    def request_cycle(self, is_urgent: bool = False) -> None:
        """Ask for another cycle, without debouncing; on the control thread."""
        facts = self._facts
        if facts.first_request_s == math.inf:
            facts.first_request_s = facts.last_request_s = 0.0
        facts.pending_bytes = math.inf
        facts.is_blocked = facts.is_blocked or is_urgent

    def facts(self) -> CycleFacts:
        is_waiting = self._num_waiting > 0
        is_untold = is_waiting and bool(self.pending) and not self._is_announced
        return replace(
            self._facts,
            is_blocked=is_waiting or self._facts.is_blocked,
            blocked_since_s=self._waiting_since_s if is_untold else math.inf,
        )

    def delay_s(self, peer_has_begun: bool) -> float:
        """Return the seconds in which the control thread has nothing to do, if nothing changes; 0: a cycle is due."""
        now_s = time.perf_counter()
        if now_s >= self._due_s:
            self._due_s = self._next_due_s()
        delay_s = min(self._policy.delay_s(self.facts(), now_s, peer_has_begun), max(0.0, self._due_s - now_s))
        # A lane that fails does not wake this thread, and neither does the first member of a group.
        return min(delay_s, _CHECK_LANES_S if self.queued or self.blocked else self._warning_s)

    @property
    def waiting_too_long(self) -> bool:
        """True if a thread is blocked for so long that other ranks are to know."""
        return self._num_waiting > 0 and time.perf_counter() >= self._waiting_since_s + WAITING_TOO_LONG_S

    def begin_cycle(self) -> None:
        """Note that a cycle announces everything."""
        self._is_announced = self._is_announced or self.waiting_too_long
        self._facts = CycleFacts()

    def end_cycle(self, start_s: float, end_s: float, any_waiting_too_long: bool) -> None:
        self._facts.others_wait = any_waiting_too_long
        self._facts.last_cycle_s, self._facts.cycle_length_s = end_s, end_s - start_s

    def take_late(self) -> tuple[list[str], list[str]]:
        """Return pending names to warn of, and pending names that have timed out; log groups that are not complete."""
        now_s = time.perf_counter()
        if now_s < self._due_s:
            return [], []
        overdue = [name for name, each in self.pending.items() if now_s >= self._warning_due_s(each.asked_s, each)]
        expired = [name for name, each in self.pending.items() if now_s >= each.asked_s + self._timeout_s]
        for name in overdue:
            self.pending[name].warned_s = now_s
        for name, group in self.partial_groups.items():
            if now_s >= self._warning_due_s(group.began_s, group):
                group.warned_s = now_s
                lacking = [each for each in group.names if each not in group.members]
                logger.warning("waited %.0f s for %s, which lacks %s here", now_s - group.began_s, name, lacking)
        self._due_s = self._next_due_s()
        return overdue, expired

    def _watch(self, since_s: float) -> None:
        self._due_s = min(self._due_s, since_s + min(self._warning_s, self._timeout_s))

    def _warning_due_s(self, since_s: float, late: Submission | PartialGroup) -> float:
        return max(since_s, late.warned_s) + self._warning_s

    def _next_due_s(self) -> float:
        due_s = [self._warning_due_s(each.asked_s, each) for each in self.pending.values()]
        due_s += [each.asked_s + self._timeout_s for each in self.pending.values()]
        due_s += [self._warning_due_s(group.began_s, group) for group in self.partial_groups.values()]
        due_s += [each.began_s + self._timeout_s for each in self.blocked.values()]
        return min(due_s, default=math.inf)

    def wait_for(self, agreement: Agreement, timeout_s: float | None = None) -> None:
        """Wait for a result; raise its error.

        Waits for a decision end after ``1.25 * timeout_s + 1``; the control thread names missing ranks earlier.
        """
        if not agreement.is_decided:
            with self.waiting():
                self._wait_for_decision(agreement, self._timeout_s if timeout_s is None else timeout_s)
        if agreement.work is not None:
            try:
                agreement.work.wait()
            except LaneError as error:
                self.fail(error)
                raise
        elif (refusal := agreement.error) is not None:
            raise type(refusal)(str(refusal)) from refusal

    def _wait_for_decision(self, agreement: Agreement, timeout_s: float) -> None:
        failures, name, start_s, warned = self._channel.failures, agreement.name, time.monotonic(), False
        while not agreement.wait(_POLL_S):
            failure = failures.failure_during(f"{name} cannot be done")
            if failure is not None and not agreement.is_decided:
                self.fail(failure)  # the control thread may hear of it much later
                raise failure
            waited_s, state = time.monotonic() - start_s, self._channel.describe()
            if waited_s >= self._warning_s and not warned and not state.endswith("idle"):
                warned = True
                logger.warning("waited %.0f s for %s; %s. %s", waited_s, name, state, failures.report_wait(state))
            if waited_s >= timeout_s * 1.25 + _POLL_S:
                hint = failures.report_wait(state)
                raise LaneTimeout(f"waited {waited_s:.0f} s for {name}; {state}. {hint}{see('a-wait-timed-out')}")
        if warned and agreement.error is None:
            failures.end_wait()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the calling thread as blocked."""
        with self.changed:
            if not self._num_waiting:
                self._waiting_since_s, self._is_announced = time.perf_counter(), False
            self._num_waiting += 1
            if self.pending or self._facts.first_request_s < math.inf:
                self._channel.wake()
        try:
            yield
        finally:
            with self.changed:
                self._num_waiting -= 1

    def fail(self, error: LaneError) -> None:
        """End all requests that have not left; the first error counts."""
        with self.changed:
            self.error = self.error or error
            ended: list[Submission | PartialGroup] = [*self.pending.values(), *self.partial_groups.values()]
            ended += self.blocked.values()
            ended += [each for queued in self.queued.values() for each in queued if each is not None]
            agreements = [each.agreement for each in ended] + ([self.joined] if self.joined is not None else [])
            for names in (self.pending, self.partial_groups, self.blocked, self.queued):
                names.clear()
            self.joined = None
            self.changed.notify_all()
            self._channel.wake()
        for agreement in agreements:
            agreement.decide(error=error)


class Handle:
    """Requested collective; ``result`` returns its result when that is there."""

    def __init__(self, queue: RequestQueue, agreement: Agreement, result: Callable[[], Tensor]) -> None:
        self.queue = queue
        self.agreement = agreement
        self._result = result

    @property
    def label(self) -> str:
        """Name of the request."""
        return self.agreement.name

    @property
    def done(self) -> bool:
        """True if :meth:`wait` returns at once."""
        return self.agreement.done

    @property
    def error(self) -> Exception | None:
        """Error that :meth:`wait` raises, if it is known already."""
        return self.agreement.error

    def wait(self) -> Tensor:
        """Return the result when it is there.

        Raises:
            ValueError: on every rank, if ranks request different collectives under one name.
            LaneError: another rank died, closed its coordinator, or did not make the request in time.
            LaneTimeout: the collective did not end in time.
        """
        self.queue.wait_for(self.agreement)
        return self._result()
