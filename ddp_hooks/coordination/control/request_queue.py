"""Requests of this rank that have not left, shared by all its threads."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ddp_hooks.comm import LaneError, ThreadWork, Work, see
from ddp_hooks.coordination.control.cycle_policy import WAITING_TOO_LONG_S, CycleFacts, CyclePolicy
from ddp_hooks.coordination.control.stalls import StallMonitor
from ddp_hooks.coordination.control.submission import Blocked, PartialGroup, Submission, error_of
from ddp_hooks.coordination.handle import Agreement, Handle

_CHECK_LANES_S = 0.5
_LOOK_S = 1.0  # between two looks at work of others that may have failed


@dataclass
class _NewRequests:
    """Requests that no cycle has announced; see :class:`CycleFacts`."""

    first_s: float = math.inf
    last_s: float = math.inf
    pending_bytes: float = 0
    is_urgent: bool = False


@dataclass
class _WaitingThreads:
    """Threads that wait for a decision; ``is_announced``: other ranks know that they wait too long."""

    number: int = 0
    since_s: float = math.inf
    is_announced: bool = False


class RequestQueue:
    """Requests by name, in the order in which they were made.

    Callers hold :attr:`changed`, except for :meth:`waiting` and :meth:`fail`.

    Args:
        policy: decides when a cycle begins.
        stalls: decides when a request is late.
        wake: wakes the control thread.
    """

    def __init__(self, policy: CyclePolicy, stalls: StallMonitor, wake: Callable[[], None]) -> None:
        self.changed = threading.Condition()
        self.pending: dict[str, Submission] = {}  # without a decision
        self.partial_groups: dict[str, PartialGroup] = {}
        self.blocked: dict[str, Blocked] = {}
        self.queued: dict[int, list[Submission | None]] = {}  # agreed, by number of a message that has not left
        self.moving: set[str] = set()  # names of requests that are agreed and have not ended
        self.joined: Agreement | None = None  # this rank has no more data
        self.closing = False
        self.error: LaneError | None = None
        self.stalls = stalls
        stalls.pending, stalls.groups, stalls.blocked = self.pending, self.partial_groups, self.blocked
        self._policy = policy
        self._wake = wake
        self._new = _NewRequests()
        self._waiting = _WaitingThreads()
        self._latest = CycleFacts()

    # -- requests ------------------------------------------------------------------------------------------------------

    def raise_if_ended(self) -> None:
        """Raise RuntimeError after ``close()``, and the error that has ended all requests."""
        if self.closing:
            raise RuntimeError(f"this coordinator was closed: make a new one{see('the-state-was-closed')}")
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error

    def refuse_duplicate(self, name: str) -> None:
        """Raise ValueError if a request of this name is not done."""
        if any(name in each for each in (self.pending, self.partial_groups, self.blocked, self.moving)):
            raise ValueError(f"{name} was asked for already, and is not done: wait for it first, or name it otherwise")

    def submit(self, submission: Submission, after: Sequence[Work | Handle] = ()) -> None:
        """Add a request, which is pending as soon as all work of ``after`` is done."""
        request, blocked = submission.request, Blocked(submission, tuple(after))
        if blocked.done:
            self.pending[request.name] = submission
            self.notify(request.known_nbytes)
        else:
            self.blocked[request.name] = blocked
            for work in after:
                if not (isinstance(work, Handle) and work.context is submission.agreement.context):
                    name = f"ddp_hooks wait for {work.label}"
                    threading.Thread(target=self._wake_after, args=(work,), name=name, daemon=True).start()
            self._wake()
        self.stalls.watch(submission.asked_s)

    def _wake_after(self, work: Work | Handle) -> None:
        """Wait for work of others on a thread of its own, because it wakes no other thread."""
        if isinstance(work, ThreadWork):  # its wait() would report that this rank waits, and take the report back
            while not work.done and error_of(work) is None:
                work.error_within(_LOOK_S)
        else:
            with contextlib.suppress(Exception):  # the control thread finds the error
                work.wait()
        self._wake()

    def begin_group(self, name: str, group: PartialGroup) -> None:
        """Add a group without members."""
        self.partial_groups[name] = group
        self.stalls.watch(group.began_s)

    def release_blocked(self) -> None:
        """Make requests pending whose other work is done; fail those whose other work failed or takes too long."""
        now_s = time.perf_counter()
        for name, blocked in list(self.blocked.items()):
            submission, error = blocked.submission, blocked.failure(now_s, self.stalls.timeout_s)
            if error is None and not blocked.done:
                continue
            del self.blocked[name]
            if error is not None:
                submission.agreement.decide(error=error)
                self.changed.notify_all()
                continue
            submission.asked_s = now_s
            self.pending[name] = submission
            self.stalls.watch(now_s)
            self.request_cycle()

    @property
    def has_unsent(self) -> bool:
        """True if a request has not left."""
        return bool(self.pending or self.blocked or self.queued)

    @property
    def undecided(self) -> list[str]:
        """Names of requests without a decision."""
        return [*self.pending, *self.blocked]

    # -- cycles --------------------------------------------------------------------------------------------------------

    def notify(self, nbytes: float = math.inf, is_urgent: bool = False) -> None:
        """Note something new for other ranks; wake the control thread if its plans may change."""
        new, min_bytes = self._new, self._policy.min_bytes
        now_s = time.perf_counter()
        is_first = new.first_s == math.inf
        is_enough = new.pending_bytes < min_bytes <= new.pending_bytes + nbytes
        new.first_s, new.last_s = now_s if is_first else new.first_s, now_s
        new.pending_bytes += nbytes
        new.is_urgent = new.is_urgent or is_urgent
        if is_first or is_urgent or is_enough:
            self._wake()

    def request_cycle(self, is_urgent: bool = False) -> None:
        """Ask for another cycle, without debouncing; on the control thread."""
        new = self._new
        if new.first_s == math.inf:
            new.first_s = new.last_s = 0.0
        new.pending_bytes = math.inf
        new.is_urgent = new.is_urgent or is_urgent

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the calling thread as blocked."""
        with self.changed:
            if not self._waiting.number:
                self._waiting = _WaitingThreads(since_s=time.perf_counter())
            self._waiting.number += 1
            if self.pending or self._new.first_s < math.inf:
                self._wake()
        try:
            yield
        finally:
            with self.changed:
                self._waiting.number -= 1

    def facts(self) -> CycleFacts:
        """Return the facts that decide when the next cycle begins."""
        new, waiting = self._new, self._waiting
        is_waiting = waiting.number > 0
        is_untold = is_waiting and bool(self.pending) and not waiting.is_announced
        return replace(
            self._latest,
            first_request_s=new.first_s,
            last_request_s=new.last_s,
            pending_bytes=new.pending_bytes,
            is_blocked=is_waiting or new.is_urgent,
            blocked_since_s=waiting.since_s if is_untold else math.inf,
        )

    def delay_s(self, peer_has_begun: bool) -> float:
        """Return the seconds in which the control thread has nothing to do, if nothing changes; 0: a cycle is due."""
        now_s = time.perf_counter()
        delay_s = min(self._policy.delay_s(self.facts(), now_s, peer_has_begun), self.stalls.delay_s(now_s))
        # A lane that fails does not wake this thread, and neither does the first member of a group.
        return min(delay_s, _CHECK_LANES_S if self.queued or self.blocked else self.stalls.warning_s)

    @property
    def waiting_too_long(self) -> bool:
        """True if a thread is blocked for so long that other ranks are to know."""
        return self._waiting.number > 0 and time.perf_counter() >= self._waiting.since_s + WAITING_TOO_LONG_S

    def begin_cycle(self) -> None:
        """Note that a cycle announces everything."""
        self._waiting.is_announced = self._waiting.is_announced or self.waiting_too_long
        self._new = _NewRequests()

    def end_cycle(self, start_s: float, end_s: float, any_waiting_too_long: bool) -> None:
        """Note a cycle; ``any_waiting_too_long``: a thread of any rank waits too long."""
        self._latest = CycleFacts(others_wait=any_waiting_too_long, last_cycle_s=end_s, cycle_length_s=end_s - start_s)

    # -- the end -------------------------------------------------------------------------------------------------------

    def fail(self, error: LaneError) -> None:
        """End all requests that have not left; the first error counts."""
        with self.changed:
            self.error = self.error or error
            waiting = [submission.agreement for submission in self.pending.values()]
            waiting += [group.agreement for group in self.partial_groups.values()]
            waiting += [blocked.submission.agreement for blocked in self.blocked.values()]
            waiting += [each.agreement for queued in self.queued.values() for each in queued if each is not None]
            waiting += [self.joined] if self.joined is not None else []
            for names in (self.pending, self.partial_groups, self.blocked, self.queued):
                names.clear()
            self.joined = None
            self.changed.notify_all()
            self._wake()
        for agreement in waiting:
            agreement.decide(error=error)
