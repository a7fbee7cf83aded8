"""What was asked for and has not come, and when ranks are to agree on it again: shared by all threads of a rank."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_hooks.comm import LaneError, LaneTimeout, ThreadWork, Work, see
from ddp_hooks.coordination.config import CoordinatorConfig
from ddp_hooks.coordination.execution import Submission
from ddp_hooks.coordination.handle import Agreement, Handle

logger = logging.getLogger("ddp_hooks")

_QUIET = 0.25  # of a cycle's pause, in which nothing new comes
_REST = 2.0  # times what the latest cycle took: so agreeing takes a third of the time at most, where it is slow
_LONGEST_REST_S = 0.02
_PATIENCE_S = 0.25  # what nobody waits for, and little of it, may lie so long
_STARVES_S = 0.02  # who has waited so long tells the others
_JOINING_S = 0.001  # who is waited for by another rank's control thread completes its news no longer
_LONGEST_JOINING_S = 0.005
_LOOK_S = 0.001  # how often it is seen whether work that is to be followed is done
_CHECK_S = 0.5  # how often whether lanes have failed that others wait for


@dataclass
class Begun:
    """A group of which some members are there; the first one says how it is to be reduced."""

    members: dict[str, Tensor]
    agreement: Agreement
    mean: bool
    priority: int
    dtype: torch.dtype
    began_s: float
    warned_s: float = 0.0


@dataclass
class Held:
    """To be asked for when other work is done."""

    submission: Submission
    after: Sequence[Work | Handle]

    def failure(self, waited_s: float, timeout_s: float) -> Exception | None:
        """Why it will never be asked for, if so."""
        for work in self.after:
            error = work.error if isinstance(work, Handle) else None
            error = work.error_within(0) if isinstance(work, ThreadWork) else error
            if error is not None:
                return error
        if waited_s < timeout_s:
            return None
        lacking = [work.label for work in self.after if not work.done]
        name = self.submission.request.name
        return LaneTimeout(f"{name} was to follow {lacking}, not done after {waited_s:.0f} s{see('a-wait-timed-out')}")


class Desk:
    """Everything but :meth:`being_waited_for` and :meth:`fail` is called while holding :attr:`changed`.

    Args:
        config: pauses between cycles, and when something is late.
        groups: members by the group's name.
        wake: makes the control thread look again.
        worth_bytes: so much news is worth a cycle while nobody waits.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        groups: Mapping[str, Sequence[str]],
        wake: Callable[[], None],
        worth_bytes: int = 0,
    ) -> None:
        self._config = config
        self._groups = groups
        self._wake = wake
        self._worth_bytes = worth_bytes
        self.changed = threading.Condition()
        self.pending: dict[str, Submission] = {}  # asked for, and not agreed upon
        self.begun: dict[str, Begun] = {}  # groups that are not complete
        self.held: dict[str, Held] = {}  # to be asked for when other work is done
        self.queued: dict[int, list[Submission | None]] = {}  # agreed upon, by the message that has not left
        self.moving: set[str] = set()  # agreed upon, and not done
        self.joined: Agreement | None = None
        self.closing = False
        self.error: LaneError | None = None
        self._has_news = False
        self._news_bytes: float = 0  # that can move when it is agreed upon; infinite if nobody knows
        self._is_urgent = False  # somebody waits for the next cycle, who is not counted here:
        self._num_waiting = 0  # threads that do nothing until something is agreed upon
        self._waiting_since_s = 0.0
        self._has_told_of_waiting = False  # since then
        self._others_starve = False  # in the latest cycle
        self._first_news_s = self._latest_news_s = 0.0
        self._last_cycle_s = self._rest_s = self._slow_s = 0.0
        self._due_s = float("inf")  # when something will have waited so long that the others are to be asked

    # -- asking --------------------------------------------------------------------------------------------------------

    def raise_if_ended(self) -> None:
        """Nothing more can be asked for."""
        if self.closing:
            raise RuntimeError(f"this coordinator was closed: make a new one{see('the-state-was-closed')}")
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error

    def refuse_twice(self, name: str) -> None:
        """A name means one thing at a time."""
        if any(name in each for each in (self.pending, self.begun, self.held, self.moving)):
            raise ValueError(f"{name} was asked for already, and is not done: wait for it first, or name it otherwise")

    def ask(self, submission: Submission, after: Sequence[Work | Handle] = ()) -> None:
        """Ask for it, when all work is done that it is to follow."""
        name = submission.request.name
        if all(work.done for work in after):
            self.pending[name] = submission
            self.tell(nbytes=submission.request.known_nbytes)
        else:
            self.held[name] = Held(submission, tuple(after))
            self._wake()
        self._note_due(submission.asked_s)

    def begin(self, group: str, begun: Begun) -> None:
        """The first of its members is there."""
        self.begun[group] = begun
        self._note_due(begun.began_s)

    @property
    def is_awaiting(self) -> bool:
        """Whether something that was asked for has not left."""
        return bool(self.pending or self.held or self.queued)

    @property
    def awaited(self) -> list[str]:
        """The names of what was asked for and has not been agreed upon."""
        return [*self.pending, *self.held]

    @contextmanager
    def being_waited_for(self) -> Iterator[None]:
        """A thread does nothing meanwhile, so that what is to be agreed upon is agreed upon soon."""
        with self.changed:
            if not self._num_waiting:
                self._waiting_since_s, self._has_told_of_waiting = time.perf_counter(), False
            self._num_waiting += 1
            if self._has_news or self.pending:
                self._wake()
        try:
            yield
        finally:
            with self.changed:
                self._num_waiting -= 1

    # -- when to agree -------------------------------------------------------------------------------------------------

    def tell(self, is_urgent: bool = False, nbytes: float = float("inf")) -> None:
        """There is news; the control thread wakes for the first, and looks for more by itself.

        It wakes for what makes a cycle worth it, too.
        """
        self._latest_news_s = time.perf_counter()
        was_worth = self._news_bytes >= self._worth_bytes
        self._news_bytes += nbytes
        wakes = not self._has_news or is_urgent or (not was_worth and self._news_bytes >= self._worth_bytes)
        if not self._has_news:
            self._has_news, self._first_news_s = True, self._latest_news_s
        self._is_urgent = self._is_urgent or is_urgent
        if wakes:
            self._wake()

    def repeat(self, is_urgent: bool = False) -> None:
        """A cycle has left something to be said in another one."""
        self._has_news, self._news_bytes = True, float("inf")
        self._is_urgent = self._is_urgent or is_urgent

    def begin_s(self, has_heard: bool) -> float:
        """When the next cycle is due; ``has_heard`` another rank begin it.

        News are complete a while after the last ones, so that what is asked for in a loop is one cycle's, or when
        somebody waits, and asks for nothing more. While nobody waits, on any rank, cycles rest in between, and little
        news is left lying: moving it will not take long.
        """
        if not self._has_news:
            tells = self._num_waiting > 0 and bool(self.pending) and not self._has_told_of_waiting
            return 0.0 if has_heard else self._waiting_since_s + _STARVES_S if tells else float("inf")
        pause_s = max(self._config.cycle_ms / 1000, self._slow_s)
        if has_heard:
            pause_s = min(pause_s, max(_JOINING_S, self._slow_s))
        complete_s = min(self._latest_news_s + pause_s * _QUIET, self._first_news_s + pause_s)
        if has_heard:
            return 0.0 if self.is_awaited else complete_s
        if self.is_awaited or self._others_starve:
            return max(complete_s, self._last_cycle_s + pause_s)
        if self._news_bytes < self._worth_bytes:
            complete_s = max(complete_s, self._first_news_s + _PATIENCE_S)
        return max(complete_s, self._last_cycle_s + self._rest_s)

    @property
    def is_awaited(self) -> bool:
        """Whether a thread of this rank does nothing until something is agreed upon."""
        return self._num_waiting > 0 or self._is_urgent

    @property
    def is_starving(self) -> bool:
        """Whether it has done nothing for so long that it is others who are late: what they ask for shall not lie."""
        return self._num_waiting > 0 and time.perf_counter() >= self._waiting_since_s + _STARVES_S

    def rest_s(self, has_heard: bool) -> float:
        """How long nothing is to be done, if nothing changes; 0 where a cycle is due now."""
        now_s = time.perf_counter()
        if now_s >= self._due_s:
            self._due_s = self._next_due_s()
        begin_s = min(self._due_s, self.begin_s(has_heard))
        # Nobody tells of work of other lanes that is done, nor a lane that it has failed.
        look_s = _LOOK_S if self.held else _CHECK_S if self.queued else self._config.stall_warning_s
        return max(0.0, min(begin_s - now_s, look_s))

    def take_news(self) -> None:
        """A cycle begins, which tells others everything."""
        self._has_told_of_waiting = self._has_told_of_waiting or self.is_starving
        self._has_news = self._is_urgent = False
        self._news_bytes = 0

    def note_cycle(self, start_s: float, end_s: float, somebody_starves: bool) -> None:
        """It has ended; ``somebody_starves``, on some rank, for this one or the next."""
        self._last_cycle_s = end_s
        self._slow_s = min(_LONGEST_JOINING_S, end_s - start_s)
        self._rest_s = max(self._config.cycle_ms / 1000, min(_LONGEST_REST_S, _REST * (end_s - start_s)))
        self._others_starve = somebody_starves

    # -- what takes long -----------------------------------------------------------------------------------------------

    def late(self) -> tuple[list[str], list[str]]:
        """What is overdue, and what has taken too long; says which groups are not complete."""
        now_s, config = time.perf_counter(), self._config
        if now_s < self._due_s:
            return [], []
        overdue = [
            name for name, s in self.pending.items() if now_s - max(s.asked_s, s.warned_s) >= config.stall_warning_s
        ]
        expired = [name for name, s in self.pending.items() if now_s - s.asked_s >= config.timeout_s]
        for name in overdue:
            self.pending[name].warned_s = now_s
        for name, begun in self.begun.items():
            if now_s - max(begun.began_s, begun.warned_s) >= config.stall_warning_s:
                begun.warned_s = now_s
                lacking = [member for member in self._groups[name] if member not in begun.members]
                logger.warning("waited %.0f s for %s, which lacks %s here", now_s - begun.began_s, name, lacking)
        self._due_s = self._next_due_s()
        return overdue, expired

    def ask_for_held(self) -> None:
        """What was to follow other work, and can; or never will, because that has failed, or takes too long."""
        for name, held in list(self.held.items()):
            submission, now_s = held.submission, time.perf_counter()
            error = held.failure(now_s - submission.began_s, self._config.timeout_s)
            if error is None and not all(work.done for work in held.after):
                continue
            del self.held[name]
            if error is not None:
                submission.agreement.decide(error=error)
                self.changed.notify_all()
                continue
            submission.asked_s = now_s
            self.pending[name] = submission
            self._note_due(now_s)
            self.repeat()

    def _note_due(self, asked_s: float) -> None:
        self._due_s = min(self._due_s, asked_s + min(self._config.stall_warning_s, self._config.timeout_s))

    def _next_due_s(self) -> float:
        config = self._config
        due_s = [max(begun.began_s, begun.warned_s) + config.stall_warning_s for begun in self.begun.values()]
        due_s += [
            min(max(each.asked_s, each.warned_s) + config.stall_warning_s, each.asked_s + config.timeout_s)
            for each in self.pending.values()
        ]
        return min(due_s, default=float("inf"))

    # -- the end -------------------------------------------------------------------------------------------------------

    def fail(self, error: LaneError) -> None:
        """End everything that waits; the first error counts."""
        with self.changed:
            self.error = self.error or error
            waiting = [submission.agreement for submission in self.pending.values()]
            waiting += [begun.agreement for begun in self.begun.values()]
            waiting += [held.submission.agreement for held in self.held.values()]
            waiting += [each.agreement for queued in self.queued.values() for each in queued if each is not None]
            waiting += [self.joined] if self.joined is not None else []
            for names in (self.pending, self.begun, self.held, self.queued):
                names.clear()
            self.joined = None
            self.changed.notify_all()
            self._wake()
        for agreement in waiting:
            agreement.decide(error=error)
