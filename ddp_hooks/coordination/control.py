"""The thread that agrees with other ranks: it runs cycles, and submits to lanes what they find.

So every lane gets the same work in the same order on all ranks. While nobody asks for anything it sleeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

import torch

from ddp_hooks.comm import LaneError, Lanes, LaneTimeout, Recorder, ThreadWork, Work, mebibytes, see
from ddp_hooks.comm.control import ControlChannel
from ddp_hooks.coordination.config import CoordinatorConfig
from ddp_hooks.coordination.desk import Desk
from ddp_hooks.coordination.execution import Execution, Submission
from ddp_hooks.coordination.fusion import fused
from ddp_hooks.coordination.negotiation import Negotiator, Outcome, Situation
from ddp_hooks.coordination.release import Message, ReleaseQueue
from ddp_hooks.coordination.stats import CoordinationStats

logger = logging.getLogger("ddp_hooks")


class ControlThread:
    """See the module.

    Args:
        desk: what was asked for on this rank.
        lanes: that carry everything.
        channel: on which ranks agree.
        config: of the coordinator, the same on every rank.
        device: where tensors are.
        recorder: where spans are noted.
    """

    def __init__(
        self,
        desk: Desk,
        lanes: Lanes,
        channel: ControlChannel,
        config: CoordinatorConfig,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self.stats = CoordinationStats()
        """Changed while holding the desk's lock, but for cycles."""
        self.ended = threading.Event()
        """That this thread agrees on nothing more."""
        self._desk = desk
        self._channel = channel
        self._config = config
        self._recorder = recorder
        self._execution = Execution(lanes, device, self._note_end)
        self._negotiator = Negotiator(channel.rank, channel.ranks, config.capacity, config.fan_out)
        self._queue = ReleaseQueue(mebibytes(config.credit_mb))
        self._under_way: dict[int, Work] = {}  # messages whose end others wait for
        self._ended_here: set[int] = set()  # of those
        self._told_of_ends: frozenset[int] = frozenset()  # in the latest cycle
        self._told_of_closing = False
        self._thread = threading.Thread(target=self._serve, name="ddp_hooks coordinator", daemon=True)

    def start(self) -> None:
        """Begin to listen to other ranks."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    @torch.no_grad()
    def _serve(self) -> None:
        channel = self._channel
        try:
            while True:
                situation = self._await_reason()
                if situation is None:
                    channel.witness.report_self(str(self._desk.error))
                    channel.let_go()
                    return
                outcome = self._agree(situation)
                self._apply(outcome)
                if outcome.closed or outcome.failure is not None:
                    return
        except LaneError as error:
            self._desk.fail(error)
            if isinstance(error, LaneTimeout):  # of a death there is a note already
                channel.witness.report_self(str(error))
            channel.let_go()  # others may wait for this rank, and not for the one that failed
        except Exception as error:  # anything else is ours; it must reach the callers, and the other ranks, too
            channel.witness.report_self(f"{type(error).__name__}: {error}")
            what = f"{type(error).__name__}: {error}"
            failure = LaneError(f"{channel.describe()} failed: {what}{see('please-report', quoted=error)}")
            failure.__cause__ = error
            self._desk.fail(failure)
            channel.let_go()
        finally:
            self.ended.set()

    def _await_reason(self) -> Situation | None:
        """Sleep until there is a reason for a cycle; None when this rank ends without the others."""
        desk = self._desk
        while True:
            with desk.changed:
                desk.ask_for_held()
                self._refuse_broken_lanes()
                if desk.error is not None:
                    return None
                has_heard = self._channel.has_heard
                rest_s = desk.rest_s(has_heard)
                if rest_s == 0:
                    return self._situation()
            self._channel.sleep(rest_s, has_heard)

    def _refuse_broken_lanes(self) -> None:
        """Nothing more leaves where what has left does not arrive."""
        for work in self._under_way.values() if self._desk.queued else ():
            error = work.error_within(0) if isinstance(work, ThreadWork) else None
            if error is not None:
                self._desk.fail(error)

    def _situation(self) -> Situation:
        desk = self._desk
        is_starving = desk.is_starving
        desk.take_news()
        self._told_of_ends = frozenset(self._ended_here)
        closing = desk.closing and not desk.held and not desk.queued
        self._told_of_closing = closing and not desk.pending
        overdue, expired = desk.late()
        return Situation(
            {name: submission.request for name, submission in desk.pending.items()},
            {name: submission.flags for name, submission in desk.pending.items() if submission.flags},
            overdue,
            expired,
            desk.joined is not None,
            closing,
            self._queue.under_way,
            self._told_of_ends,
            is_starving,
        )

    def _agree(self, situation: Situation) -> Outcome:
        outcome, stats = Outcome(), self.stats
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        self._channel.run(self._negotiator.cycle(situation, outcome), f"cycle {stats.cycles}")
        end_s = time.perf_counter()
        stats.cycles += 1
        stats.control_s += end_s - start_s
        stats.control_cpu_s += time.thread_time() - start_cpu_s
        self._recorder.add("agreement", f"cycle {stats.cycles}", start_s, end_s)
        with self._desk.changed:
            self._desk.note_cycle(start_s, end_s, outcome.somebody_starves)
        return outcome

    def _apply(self, outcome: Outcome) -> None:
        """What was agreed upon becomes work, or errors; in the same order on every rank."""
        desk = self._desk
        with desk.changed:
            if desk.error is not None:
                return
            for name, ranks in outcome.missing.items():
                self._say_who_is_missing(name, ranks)
            for name, reason in outcome.refused.items():
                if (refused := desk.pending.pop(name, None)) is not None:
                    refused.agreement.decide(error=ValueError(reason))
            for name, bits in outcome.answers.items():
                if (asked := desk.pending.pop(name, None)) is not None:
                    (flags,) = asked.tensors
                    answer = [bool(bits >> index & 1) for index in range(flags.numel())]
                    asked.result = (torch.tensor(answer, dtype=torch.bool),)
                    asked.agreement.decide()
            mine = {request.name: desk.pending.pop(request.name, None) for request in outcome.ready}
            if self._negotiator.has_news_of(desk.pending):
                desk.repeat()
            desk.moving.update(name for name, submission in mine.items() if submission is not None)
            self.stats.requests += len(outcome.ready)
            if outcome.all_joined and desk.joined is not None:
                desk.joined.decide()
                desk.joined = None
            leaving = self._release(outcome, mine)
            if desk.closing and not desk.is_awaiting and not self._told_of_closing:
                desk.repeat(is_urgent=True)  # it counts as closing only now
            desk.changed.notify_all()
        for message, submissions in leaving:
            self._start(message, submissions)
        if outcome.failure is not None:
            desk.fail(LaneError(outcome.failure))

    def _release(
        self, outcome: Outcome, mine: Mapping[str, Submission | None]
    ) -> list[tuple[Message, list[Submission | None]]]:
        """What leaves now, of what was agreed upon now and before."""
        queue, config, queued, now_s = self._queue, self._config, self._desk.queued, time.perf_counter()
        queue.end(outcome.ended)
        for number in outcome.ended:
            self._ended_here.discard(number)
            self._under_way.pop(number, None)
        queue.note_priorities(request.priority for request in outcome.ready)
        limit_mb = min(config.fusion_mb, config.credit_mb) if queue.holds_back else config.fusion_mb
        for message in queue.add(fused(outcome.ready, mebibytes(limit_mb), config.mix_groups)):
            queued[message.number] = submissions = [mine[request.name] for request in message.requests]
            for submission in submissions:
                if submission is not None:
                    submission.agreed_s = now_s
        leaving = [(message, queued.pop(message.number)) for message in queue.take()]
        if queued and self._ended_here - self._told_of_ends:
            self._desk.repeat(is_urgent=True)  # what waits was not there when this ended
        return leaving

    def _start(self, message: Message, submissions: Sequence[Submission | None]) -> None:
        work = self._execution.start(message, submissions)
        self.stats.note_message(sum(request.nbytes for request in message.requests))
        if message.number in self._queue.under_way:
            self._under_way[message.number] = work
        for submission in submissions:
            if submission is not None:
                submission.agreement.decide(work)

    def _say_who_is_missing(self, name: str, ranks: Sequence[int]) -> None:
        pending = self._desk.pending
        if name in pending:
            waited_s = time.perf_counter() - pending[name].asked_s
            logger.warning("waited %.0f s for %s: ranks %s have not asked for it", waited_s, name, ranks)
        elif self._channel.ranks[self._channel.rank] in ranks:
            logger.warning("other ranks wait for %s, which this rank has not asked for", name)

    def _note_end(self, number: int, submissions: Sequence[Submission]) -> None:
        """On a lane's thread."""
        desk, stats = self._desk, self.stats
        with desk.changed:
            if number in self._queue.under_way:
                self._ended_here.add(number)
                if desk.queued:
                    desk.tell(is_urgent=True)
            for each in submissions:
                desk.moving.discard(each.request.name)
                stats.waited_for_data_s += each.asked_s - each.began_s
                stats.waited_for_others_s += each.agreed_s - each.asked_s
                stats.queued_s += each.started_s - each.agreed_s
                stats.moved_s += each.ended_s - each.started_s
        for each in submissions:
            name = each.request.name
            self._recorder.add("waits for data", name, each.began_s, each.asked_s)
            self._recorder.add("waits for others", name, each.asked_s, each.agreed_s)
            self._recorder.add("waits for a lane", name, each.agreed_s, each.started_s)
            self._recorder.add("moves", name, each.started_s, each.ended_s)
