"""Named collectives in any order, from any thread: ranks agree what is next, and everybody does the same.

A thread of its own runs the cycles of :mod:`ddp_hooks.coordination.negotiation`, and submits what they find to lanes,
so that every lane gets the same work in the same order on all ranks. While nobody asks for anything it sleeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    LaneError,
    Lanes,
    LaneSettings,
    LaneTimeout,
    LinkProfile,
    Recorder,
    Span,
    ThreadWork,
    Work,
    agree,
    at_exit,
    mebibytes,
    profile_link,
    see,
)
from ddp_hooks.comm.control import ControlChannel
from ddp_hooks.coordination.config import CoordinatorConfig
from ddp_hooks.coordination.execution import Execution, Submission
from ddp_hooks.coordination.fusion import fused
from ddp_hooks.coordination.handle import Agreement, Handle
from ddp_hooks.coordination.negotiation import Negotiator, Outcome, Situation
from ddp_hooks.coordination.release import Message, ReleaseQueue
from ddp_hooks.coordination.request import Operation, Request, spec_of
from ddp_hooks.coordination.stats import CoordinationStats

logger = logging.getLogger("ddp_hooks")

_QUIET = 0.25  # of a cycle's pause, in which nothing new comes
_REST = 2.0  # times what the latest cycle took: so agreeing takes a third of the time at most, however slow it is
_MAX_KNOWN = 8192  # requests that are made only once, as they are the same in every step
_LOOK_S = 0.001  # how often it is seen whether work that is to be followed is done
_CHECK_S = 0.5  # how often whether lanes have failed that others wait for
JOIN = "join()"
"""What messages call the end of a rank's data."""


class Coordinator:
    """Collectives by name; each is done when all ranks have asked for it, whatever the order, and by whichever thread.

        coordinator = Coordinator()
        handle = coordinator.all_reduce(gradient, name="layer3.weight", mean=True)
        …
        handle.wait()

    Ranks agree once on what a name means: operation, shape, type, root, group and priority. From then on a bit says
    that a rank has it, until it asks for something else under that name. Names may be used again when they are done.

    Args:
        group: the ranks; None: all of them. Creating a coordinator is collective over it.
        config: the settings.
        device: where tensors are.
        groups: tensors that travel together, by the group's name: the names of its members. None of them goes before
            all of them are there, on all ranks.

    Raises:
        ValueError: on every rank, if settings or groups differ.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        config: CoordinatorConfig | None = None,
        device: torch.device | str = "cpu",
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.config = config if config is not None else CoordinatorConfig()
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise ValueError(f"torch.distributed is not initialised{see('set-up-is-refused')}")
        self.groups = {name: tuple(members) for name, members in (groups or {}).items()}
        entries = {"config": self.config, "groups": self.groups, "torch": torch.__version__}
        problem = _problem_of(self.config, self.groups, torch.device(device))
        agree(entries, problem, group, "the set-up of Coordinator")
        self.recorder = Recorder(self.config.trace)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._group_of = {member: name for name, members in self.groups.items() for member in members}
        self._changed = threading.Condition()
        self._pending: dict[str, Submission] = {}  # asked for, and not agreed upon
        self._begun: dict[str, _Begun] = {}  # groups that are not complete
        self._held: dict[str, _Held] = {}  # to be asked for when other work is done
        self._queued: dict[int, list[Submission | None]] = {}  # agreed upon, by the message that has not left
        self._moving: set[str] = set()  # agreed upon, and not done
        self._under_way: dict[int, Work] = {}  # messages whose end others wait for
        self._ended_here: set[int] = set()  # of those
        self._told_of_ends: frozenset[int] = frozenset()  # in the latest cycle
        self._told_of_closing = False
        self._has_news = False
        self._num_waiting = 0  # threads that do nothing until something is agreed upon
        self._is_urgent = False  # the next cycle, likewise
        self._due_s = float("inf")  # when something will have waited so long that the others are to be asked
        self._known: dict[Hashable, Request] = {}
        self._joined: Agreement | None = None
        self._closing = False
        self._ended = threading.Event()
        self._error: LaneError | None = None
        self._stats = CoordinationStats()
        self._lanes = _make_lanes(group, self.config, torch.device(device), self.recorder)
        assert self._lanes.witness is not None, "on CPUs there is one"
        self._channel = ControlChannel(group, self.config.timeout_s, self._lanes.witness, self._wake)
        self._execution = Execution(self._lanes, torch.device(device), self._note_end)
        self._queue = ReleaseQueue(mebibytes(self.config.credit_mb))  # of the control thread
        self._negotiator = Negotiator(self.rank, self._channel.ranks, self.config.capacity, self.config.fan_out)
        self._last_cycle_s = self._rest_s = self._first_news_s = self._latest_news_s = 0.0
        self._before = self._lanes.traffic  # what measuring the link has moved
        self._handle = at_exit(self.close, self._abandon, self._is_stuck)
        self._thread = threading.Thread(target=self._serve, name="ddp_hooks coordinator", daemon=True)
        self._thread.start()

    # -- what can be asked for -----------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, name: str, mean: bool = False, priority: int = 0) -> Handle:
        """Sum ``tensor`` over all ranks, in place; with ``mean`` divide by their number, also if some have joined.

        Of what was agreed upon and has not left yet, the largest ``priority`` leaves first, the same on all ranks; see
        ``CoordinatorConfig(credit_mb=…)``.

        A member of one of :attr:`groups` travels with its group, which is asked for when all of it is there.
        """
        group = self._group_of.get(name)
        if group is None:
            return self._ask("all_reduce", name, [(name, tensor)], mean=mean, priority=priority)
        return self._add_to_group(group, name, tensor, mean, priority)

    def grouped_all_reduce(
        self, tensors: Sequence[Tensor], names: Sequence[str], name: str, mean: bool = False, priority: int = 0
    ) -> Handle:
        """All-reduce several tensors as one request, ``name``: all of them or none. The result is the first of them."""
        named = list(zip(names, tensors, strict=True))
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(f"{name}: a group has tensors of one type, got {dtypes or 'none'}")
        return self._ask("all_reduce", name, named, mean=mean, priority=priority, grouped=True)

    def broadcast(self, tensor: Tensor, name: str, root: int = 0, priority: int = 0) -> Handle:
        """Copy rank ``root``'s tensor to all ranks of the group, in place; it must lie in one piece."""
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: broadcast takes a contiguous tensor, got strides {tensor.stride()}")
        if not 0 <= root < self.world_size:
            raise ValueError(f"{name}: root must be a rank below {self.world_size}, got {root}")
        return self._ask("broadcast", name, [(name, tensor)], root=root, priority=priority)

    def all_gather(self, tensor: Tensor, name: str, priority: int = 0) -> Handle:
        """Everybody's rows, (n, …), one below the other, (sum of n, …); n may differ."""
        if not tensor.dim():
            raise ValueError(f"{name}: all_gather takes rows, got a number: pass tensor.view(1)")
        return self._ask("all_gather", name, [(name, tensor.contiguous())], priority=priority)

    def reduce_scatter(self, tensor: Tensor, name: str, mean: bool = False, priority: int = 0) -> Handle:
        """Of the sum of all ranks' (P * n, …) this rank's n rows; ``tensor`` stays as it is."""
        if tensor.dim() == 0 or tensor.shape[0] % self.world_size:
            raise ValueError(
                f"{name}: reduce_scatter takes rows that divide by {self.world_size} ranks, got {tuple(tensor.shape)}"
            )
        return self._ask("reduce_scatter", name, [(name, tensor)], mean=mean, priority=priority)

    def all_to_all(self, tensor: Tensor, name: str, splits: Sequence[int] | None = None, priority: int = 0) -> Handle:
        """Send each rank its rows of ``tensor``, (sum of splits, …), and receive those for this one, in ranks' order.

        Args:
            tensor: first the rows for rank 0, and so on.
            name: of the request.
            splits: numbers of rows by rank; None: equal ones.
            priority: see :meth:`all_reduce`.
        """
        rows = tensor.shape[0] if tensor.dim() else 0
        chosen = list(splits) if splits is not None else [rows // self.world_size] * self.world_size
        if len(chosen) != self.world_size or sum(chosen) != rows or min(chosen) < 0 or not tensor.dim():
            raise ValueError(
                f"{name}: splits must be {self.world_size} numbers of rows that add up to {rows}, got {chosen}"
            )
        return self._ask("all_to_all", name, [(name, tensor.contiguous())], priority=priority, splits=chosen)

    def exchange(
        self, algorithm: Algorithm, name: str, priority: int = 0, after: Sequence[Work | Handle] = ()
    ) -> Handle:
        """Run an algorithm of one's own, :data:`ddp_hooks.comm.Algorithm`, when all ranks have asked for theirs.

        Args:
            algorithm: this rank's part.
            name: of the request.
            priority: see :meth:`all_reduce`.
            after: it is asked for when this work is done, here.
        """
        return self._ask("exchange", name, [], priority=priority, algorithm=algorithm, after=after)

    def any(self, flags: Tensor, name: str, priority: int = 0) -> Handle:
        """Of every flag, (n,), whether it is set on any rank: a bit each, and no lane."""
        if flags.dim() != 1:
            raise ValueError(f"{name}: any takes flags in one row, (n,), got {tuple(flags.shape)}")
        submission_flags = sum(1 << index for index, flag in enumerate(flags.tolist()) if flag)
        return self._ask("any", name, [(name, flags)], priority=priority, flags=submission_flags)

    def join(self) -> None:
        """This rank has no more data: stand in with zeros for what others all-reduce, until all ranks have joined."""
        with self._changed:
            self._raise_if_ended()
            if self._joined is not None:
                raise RuntimeError(f"this rank has joined already, on another thread{see('a-rank-is-missing')}")
            agreement = self._joined = self._new_agreement(JOIN, timeout_s=None)
            self._tell()
        agreement.wait()

    def stats(self) -> CoordinationStats:
        """Totals so far, on this rank."""
        control, moved = self._channel.traffic, self._lanes.traffic - self._before
        with self._changed:
            return replace(
                self._stats,
                message_sizes=dict(self._stats.message_sizes),
                control_bytes=control.sent_bytes,
                control_messages=self._channel.num_sent,
                sent_bytes=moved.sent_bytes,
                received_bytes=moved.received_bytes,
            )

    def timeline(self) -> list[Span]:
        """What was waited for and moved, in order of start; needs ``CoordinatorConfig(trace=True)``."""
        return self.recorder.snapshot()

    def close(self, farewell_s: float = 10.0) -> None:
        """Finish what was asked for, and end; collective. Waits at most ``farewell_s`` for ranks that do not close."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._tell()
            # What is pending is done when others ask for it, or fails because they close, too.
            self._changed.wait_for(lambda: not self._is_awaiting or self._error is not None)
        ended = self._ended.wait(farewell_s)
        # Those that still wait for something shall know why.
        self._fail(LaneError(f"this coordinator was closed{see('the-state-was-closed')}"))
        if not ended:
            self._channel.let_go()
        self._thread.join(farewell_s)
        self._lanes.close(farewell_s)
        self._channel.close(farewell_s)
        if not self._is_stuck():
            self._handle.remove()

    # -- asking --------------------------------------------------------------------------------------------------------

    def _ask(
        self,
        operation: Operation,
        name: str,
        named: Sequence[tuple[str, Tensor]],
        splits: Sequence[int] = (),
        flags: int = 0,
        algorithm: Algorithm | None = None,
        after: Sequence[Work | Handle] = (),
        **settings: Any,
    ) -> Handle:
        request = self._request(name, operation, named, **settings)
        with self._changed:
            self._raise_if_ended()
            self._refuse_twice(name)
            now_s = time.perf_counter()
            submission = Submission(
                request,
                [t for _, t in named],
                self._new_agreement(name),
                list(splits),
                flags,
                algorithm,
                began_s=now_s,
                asked_s=now_s,
            )
            if all(work.done for work in after):
                self._pending[name] = submission
                self._tell()
            else:
                self._held[name] = _Held(submission, tuple(after))
                self._changed.notify_all()
            self._note_due(now_s)
        return Handle(submission.agreement, lambda: _result_of(submission))

    def _request(
        self,
        name: str,
        operation: Operation,
        named: Sequence[tuple[str, Tensor]],
        mean: bool = False,
        root: int = -1,
        priority: int = 0,
        grouped: bool = False,
    ) -> Request:
        """What other ranks are told; whatever numbers the caller has, as JSON takes them."""
        for each in (name, *(n for n, _ in named)):
            if not isinstance(each, str):
                raise TypeError(f"names are texts, got {each!r}")
        key = (name, operation, mean, root, priority, grouped, *((n, t.shape, t.dtype) for n, t in named))
        if (known := self._known.get(key)) is not None:
            return known
        if mean and not all(tensor.is_floating_point() or tensor.is_complex() for _, tensor in named):
            raise ValueError(f"{name}: means are of floating-point numbers, got {named[0][1].dtype}")
        specs = tuple(spec_of(n, tensor, operation) for n, tensor in named)
        request = Request(name, operation, specs, bool(mean), int(root), int(priority), grouped)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = request
        return request

    def _refuse_twice(self, name: str) -> None:
        if any(name in each for each in (self._pending, self._begun, self._held, self._moving)):
            raise ValueError(f"{name} was asked for already, and is not done: wait for it first, or name it otherwise")

    def _add_to_group(self, group: str, name: str, tensor: Tensor, mean: bool, priority: int) -> Handle:
        with self._changed:
            self._raise_if_ended()
            if group not in self._begun:
                self._refuse_twice(group)
                agreement = self._new_agreement(group)
                now_s = time.perf_counter()
                self._begun[group] = _Begun({}, agreement, mean, priority, tensor.dtype, now_s)
                self._note_due(now_s)
            begun = self._begun[group]
            if name in begun.members:
                raise ValueError(f"{name} was asked for already, and {group} is not complete: wait for it first")
            if (mean, priority, tensor.dtype) != (begun.mean, begun.priority, begun.dtype):
                raise ValueError(
                    f"{name} was asked for with mean={mean}, priority={priority}, {tensor.dtype}, and others of "
                    f"{group} with mean={begun.mean}, priority={begun.priority}, {begun.dtype}: a group has one of each"
                )
            begun.members[name] = tensor
            if len(begun.members) == len(self.groups[group]):
                self._complete(group, self._begun.pop(group))
        return Handle(begun.agreement, lambda: tensor)

    def _complete(self, group: str, begun: _Begun) -> None:
        named = [(name, begun.members[name]) for name in self.groups[group]]
        request = self._request(group, "all_reduce", named, begun.mean, priority=begun.priority, grouped=True)
        tensors, asked_s = [tensor for _, tensor in named], time.perf_counter()
        self._pending[group] = Submission(request, tensors, begun.agreement, began_s=begun.began_s, asked_s=asked_s)
        self._tell()

    def _new_agreement(self, name: str, timeout_s: float | None = -1.0) -> Agreement:
        config = self.config
        return Agreement(
            name,
            self._channel.witness,
            self._channel.describe,
            self._fail,
            self._being_waited_for,
            config.timeout_s if timeout_s == -1.0 else timeout_s,
            config.stall_warning_s,
        )

    def _raise_if_ended(self) -> None:
        if self._closing:
            raise RuntimeError(f"this coordinator was closed: make a new one{see('the-state-was-closed')}")
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error

    @property
    def _is_awaiting(self) -> bool:
        """Whether something that was asked for has not left."""
        return bool(self._pending or self._held or self._queued)

    @contextmanager
    def _being_waited_for(self) -> Iterator[None]:
        """A thread does nothing meanwhile, so that what is to be agreed upon is agreed upon soon."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_waiting -= 1

    def _tell(self, is_urgent: bool = False) -> None:
        """There is news; the control thread wakes for the first, and looks for more by itself."""
        self._latest_news_s = time.perf_counter()
        wakes = not self._has_news or is_urgent
        if not self._has_news:
            self._has_news, self._first_news_s = True, self._latest_news_s
        self._is_urgent = self._is_urgent or is_urgent
        if wakes:
            self._changed.notify_all()

    def _note_due(self, asked_s: float) -> None:
        """Something new was asked for."""
        self._due_s = min(self._due_s, asked_s + min(self.config.stall_warning_s, self.config.timeout_s))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- the control thread --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _serve(self) -> None:
        try:
            while True:
                self._channel.listen(self._negotiator.vector_nbytes_with(len(self._queue.under_way)))
                situation = self._await_reason()
                if situation is None:
                    self._channel.witness.confess(str(self._error))
                    self._channel.let_go()
                    return
                outcome, start_s, start_cpu_s = Outcome(), time.perf_counter(), time.thread_time()
                self._channel.run(self._negotiator.cycle(situation, outcome), f"cycle {self._stats.cycles}")
                self._last_cycle_s = time.perf_counter()
                self._rest_s = max(self.config.cycle_ms / 1000, _REST * (self._last_cycle_s - start_s))
                self._stats.cycles += 1
                self._stats.control_s += self._last_cycle_s - start_s
                self._stats.control_cpu_s += time.thread_time() - start_cpu_s
                self.recorder.add("agreement", f"cycle {self._stats.cycles}", start_s, self._last_cycle_s)
                self._apply(outcome)
                if outcome.closed or outcome.failure is not None:
                    return
        except LaneError as error:
            self._fail(error)
            self._channel.let_go()  # others may wait for this rank, and not for the one that failed
        except Exception as error:  # anything else is ours; it must reach the callers, and the other ranks, too
            self._channel.witness.confess(f"{type(error).__name__}: {error}")
            what = f"{type(error).__name__}: {error}"
            failure = LaneError(f"{self._channel.describe()} failed: {what}{see('please-report', quoted=error)}")
            failure.__cause__ = error
            self._fail(failure)
            self._channel.let_go()
        finally:
            self._ended.set()

    def _await_reason(self) -> Situation | None:
        """Sleep until there is a reason for a cycle; None when this rank ends without the others."""
        with self._changed:
            while self._error is None:
                self._ask_for_held()
                self._refuse_broken_lanes()
                if self._error is not None:
                    return None
                now_s = time.perf_counter()
                if now_s >= self._due_s:
                    self._due_s = self._next_due_s()
                begin_s = min(self._due_s, self._begin_s(self._channel.has_heard))
                if now_s >= begin_s:
                    break
                # Nobody tells of work of other lanes that is done, nor a lane that it has failed.
                look_s = _LOOK_S if self._held else _CHECK_S if self._queued else self.config.stall_warning_s
                self._changed.wait(min(begin_s - now_s, look_s))
            if self._error is not None:
                return None
            return self._situation()

    def _begin_s(self, has_heard: bool) -> float:
        """When the next cycle is due; ``has_heard`` another rank begin it.

        News are complete a while after the last ones, so that what is asked for in a loop is one cycle's, or when
        somebody waits, and asks for nothing more. While nobody waits, cycles may rest in between.
        """
        if not self._has_news:
            return 0.0 if has_heard else float("inf")
        pause_s, is_awaited = self.config.cycle_ms / 1000, self._num_waiting > 0 or self._is_urgent
        complete_s = min(self._latest_news_s + pause_s * _QUIET, self._first_news_s + pause_s)
        if has_heard:
            return 0.0 if is_awaited else complete_s
        return max(complete_s, self._last_cycle_s + (pause_s if is_awaited else self._rest_s))

    def _ask_for_held(self) -> None:
        """What was to follow other work, and can; or never will, because that has failed, or takes too long."""
        for name, held in list(self._held.items()):
            submission, now_s = held.submission, time.perf_counter()
            error = held.failure(now_s - submission.began_s, self.config.timeout_s)
            if error is None and not all(work.done for work in held.after):
                continue
            del self._held[name]
            if error is not None:
                submission.agreement.decide(error=error)
                self._changed.notify_all()
                continue
            submission.asked_s = now_s
            self._pending[name] = submission
            self._has_news = True

    def _refuse_broken_lanes(self) -> None:
        """Nothing more leaves where what has left does not arrive."""
        for work in self._under_way.values() if self._queued else ():
            error = work.error_within(0) if isinstance(work, ThreadWork) else None
            if error is not None:
                self._fail(error)

    def _next_due_s(self) -> float:
        """When something will have waited for so long that the others are to be asked."""
        config = self.config
        due_s = [max(begun.began_s, begun.warned_s) + config.stall_warning_s for begun in self._begun.values()]
        due_s += [
            min(max(each.asked_s, each.warned_s) + config.stall_warning_s, each.asked_s + config.timeout_s)
            for each in self._pending.values()
        ]
        return min(due_s, default=float("inf"))

    def _situation(self) -> Situation:
        self._has_news = self._is_urgent = False
        self._told_of_ends = frozenset(self._ended_here)
        closing = self._closing and not self._held and not self._queued
        self._told_of_closing = closing and not self._pending
        now_s = time.perf_counter()
        overdue, expired = self._late(now_s) if now_s >= self._due_s else ([], [])
        return Situation(
            {name: submission.request for name, submission in self._pending.items()},
            {name: submission.flags for name, submission in self._pending.items() if submission.flags},
            overdue,
            expired,
            self._joined is not None,
            closing,
            self._queue.under_way,
            self._told_of_ends,
        )

    def _late(self, now_s: float) -> tuple[list[str], list[str]]:
        """What is overdue, and what has taken too long; says which groups are not complete."""
        config = self.config
        overdue = [
            name for name, s in self._pending.items() if now_s - max(s.asked_s, s.warned_s) >= config.stall_warning_s
        ]
        expired = [name for name, s in self._pending.items() if now_s - s.asked_s >= config.timeout_s]
        for name in overdue:
            self._pending[name].warned_s = now_s
        for name, begun in self._begun.items():
            if now_s - max(begun.began_s, begun.warned_s) >= config.stall_warning_s:
                begun.warned_s = now_s
                lacking = [member for member in self.groups[name] if member not in begun.members]
                logger.warning("waited %.0f s for %s, which lacks %s here", now_s - begun.began_s, name, lacking)
        self._due_s = self._next_due_s()
        return overdue, expired

    def _apply(self, outcome: Outcome) -> None:
        """What was agreed upon becomes work, or errors; in the same order on every rank."""
        with self._changed:
            if self._error is not None:
                return
            for name, ranks in outcome.missing.items():
                self._say_who_is_missing(name, ranks)
            for name, reason in outcome.refused.items():
                if (refused := self._pending.pop(name, None)) is not None:
                    refused.agreement.decide(error=ValueError(reason))
            for name, bits in outcome.answers.items():
                if (asked := self._pending.pop(name, None)) is not None:
                    (flags,) = asked.tensors
                    answer = [bool(bits >> index & 1) for index in range(flags.numel())]
                    asked.result = (torch.tensor(answer, dtype=torch.bool),)
                    asked.agreement.decide()
            mine = {request.name: self._pending.pop(request.name, None) for request in outcome.ready}
            if self._negotiator.has_news_of({name: each.request for name, each in self._pending.items()}):
                self._has_news = True
            self._moving.update(name for name, submission in mine.items() if submission is not None)
            self._stats.requests += len(outcome.ready)
            if outcome.all_joined and self._joined is not None:
                self._joined.decide()
                self._joined = None
            leaving = self._release(outcome, mine)
            if self._closing and not self._is_awaiting and not self._told_of_closing:
                self._has_news = True  # it counts as closing only now
            self._changed.notify_all()
        for message, submissions in leaving:
            self._start(message, submissions)
        if outcome.failure is not None:
            self._fail(LaneError(outcome.failure))

    def _release(
        self, outcome: Outcome, mine: Mapping[str, Submission | None]
    ) -> list[tuple[Message, list[Submission | None]]]:
        """What leaves now, of what was agreed upon now and before."""
        queue, config, now_s = self._queue, self.config, time.perf_counter()
        queue.end(outcome.ended)
        for number in outcome.ended:
            self._ended_here.discard(number)
            self._under_way.pop(number, None)
        queue.note_priorities(request.priority for request in outcome.ready)
        limit_mb = min(config.fusion_mb, config.credit_mb) if queue.holds_back else config.fusion_mb
        for message in queue.add(fused(outcome.ready, mebibytes(limit_mb), config.mix_groups)):
            self._queued[message.number] = submissions = [mine[request.name] for request in message.requests]
            for submission in submissions:
                if submission is not None:
                    submission.agreed_s = now_s
        leaving = [(message, self._queued.pop(message.number)) for message in queue.take()]
        if self._queued and self._ended_here - self._told_of_ends:
            self._has_news = self._is_urgent = True  # what waits was not there when this ended
        return leaving

    def _start(self, message: Message, submissions: Sequence[Submission | None]) -> None:
        work = self._execution.start(message, submissions)
        self._stats.note_message(sum(request.nbytes for request in message.requests))
        if message.number in self._queue.under_way:
            self._under_way[message.number] = work
        for submission in submissions:
            if submission is not None:
                submission.agreement.decide(work)

    def _say_who_is_missing(self, name: str, ranks: Sequence[int]) -> None:
        if name in self._pending:
            waited_s = time.perf_counter() - self._pending[name].asked_s
            logger.warning("waited %.0f s for %s: ranks %s have not asked for it", waited_s, name, ranks)
        elif self._channel.ranks[self.rank] in ranks:
            logger.warning("other ranks wait for %s, which this rank has not asked for", name)

    def _note_end(self, number: int, submissions: Sequence[Submission]) -> None:
        with self._changed:
            stats = self._stats
            if number in self._queue.under_way:
                self._ended_here.add(number)
                if self._queued:
                    self._tell(is_urgent=True)
            for each in submissions:
                self._moving.discard(each.request.name)
                stats.waited_for_data_s += each.asked_s - each.began_s
                stats.waited_for_others_s += each.agreed_s - each.asked_s
                stats.queued_s += each.started_s - each.agreed_s
                stats.moved_s += each.ended_s - each.started_s
        for each in submissions:
            name = each.request.name
            self.recorder.add("waits for data", name, each.began_s, each.asked_s)
            self.recorder.add("waits for others", name, each.asked_s, each.agreed_s)
            self.recorder.add("waits for a lane", name, each.agreed_s, each.started_s)
            self.recorder.add("moves", name, each.started_s, each.ended_s)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _fail(self, error: LaneError) -> None:
        """End everything that waits; the first error counts."""
        with self._changed:
            self._error = self._error or error
            waiting = [submission.agreement for submission in self._pending.values()]
            waiting += [begun.agreement for begun in self._begun.values()]
            waiting += [held.submission.agreement for held in self._held.values()]
            waiting += [each.agreement for queued in self._queued.values() for each in queued if each is not None]
            waiting += [self._joined] if self._joined is not None else []
            for names in (self._pending, self._begun, self._held, self._queued):
                names.clear()
            self._joined = None
            self._changed.notify_all()
        for agreement in waiting:
            agreement.decide(error=error)

    def _abandon(self, error: BaseException) -> None:
        self._lanes.abandon(error)
        self._fail(LaneError(f"this rank ends: {type(error).__name__}: {error}{see('a-rank-died', quoted=error)}"))
        self._thread.join(2.0)
        self._channel.close(2.0)

    def _is_stuck(self) -> bool:
        return self._lanes.stuck or self._channel.stuck or self._thread.is_alive()


@dataclass
class _Begun:
    """A group of which some members are there; the first one says how it is to be reduced."""

    members: dict[str, Tensor]
    agreement: Agreement
    mean: bool
    priority: int
    dtype: torch.dtype
    began_s: float
    warned_s: float = 0.0


@dataclass
class _Held:
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


def _result_of(submission: Submission) -> Tensor:
    if submission.result is not None:
        result: Tensor = submission.result[0]
        return result
    return submission.tensors[0] if submission.tensors else torch.empty(0)


def _make_lanes(group: dist.ProcessGroup, config: CoordinatorConfig, device: torch.device, recorder: Recorder) -> Lanes:
    settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
    lanes = Lanes(group, 1, device, settings, recorder)
    link = LinkProfile(None, 1, 1 << 20)
    if config.lanes is None or config.slice_mb is None:
        link = profile_link(lanes)
    settings.slice_bytes = link.message_bytes if config.slice_mb is None else mebibytes(config.slice_mb)
    lanes.grow(config.lanes or link.num_lanes)
    return lanes


def _problem_of(config: object, groups: Mapping[str, Sequence[str]], device: torch.device) -> str | None:
    if not isinstance(config, CoordinatorConfig):
        return f"config must be a CoordinatorConfig(...), got {type(config).__name__}"
    if device.type != "cpu":
        return f"tensors are coordinated on CPUs only so far, got device {device}: use DistributedDataParallel there"
    seen: dict[str, str] = {}
    for name, members in groups.items():
        if not members:
            return f"group {name} is empty: leave it out"
        for member in members:
            if member in seen:
                return f"{member} is in groups {seen[member]} and {name}: name it once"
            seen[member] = name
    return None
