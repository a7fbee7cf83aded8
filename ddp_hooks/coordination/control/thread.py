"""Control thread: runs negotiation cycles, and submits agreed messages to lanes, in the same order on all ranks.

While no thread requests anything it sleeps.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence

import torch

from ddp_hooks.comm import LaneError, Lanes, LaneTimeout, Recorder, ThreadWork, mebibytes, see
from ddp_hooks.coordination.config import CoordinatorConfig
from ddp_hooks.coordination.control.channel import ControlChannel
from ddp_hooks.coordination.control.executor import Executor
from ddp_hooks.coordination.control.request_queue import RequestQueue
from ddp_hooks.coordination.control.send_queue import Message, SendQueue
from ddp_hooks.coordination.control.submission import Submission
from ddp_hooks.coordination.negotiation.negotiator import CycleInput, CycleResult, Negotiator
from ddp_hooks.coordination.stats import PHASES, CoordinationStats

logger = logging.getLogger("ddp_hooks")


class ControlThread:
    """Thread that negotiates requests of ``queue`` on ``channel``, and moves their tensors on ``lanes``."""

    def __init__(
        self, queue: RequestQueue, lanes: Lanes, channel: ControlChannel, config: CoordinatorConfig, recorder: Recorder
    ) -> None:
        self.thread = threading.Thread(target=self._serve, name="ddp_hooks coordinator", daemon=True)
        self.stats = CoordinationStats()  # changed while holding the queue's lock, except for totals of cycles
        self._queue = queue
        self._channel = channel
        self._recorder = recorder
        self._executor = Executor(lanes, self._note_end)
        self._negotiator = Negotiator(channel.rank, channel.ranks, config.capacity, config.fan_out)
        self._send_queue = SendQueue(mebibytes(config.credit_mb), mebibytes(config.fusion_mb), config.mix_groups)
        self._under_way: dict[int, ThreadWork] = {}  # by message number, where other messages wait for its end
        self._ended_here: set[int] = set()  # numbers of these

    @torch.no_grad()
    def _serve(self) -> None:
        channel, failures = self._channel, self._channel.failures
        try:
            while (cycle_input := self._wait_for_reason()) is not None:
                result = self._run_cycle(cycle_input)
                self._apply(cycle_input, result)
                if result.closed or result.failure is not None:
                    return
            failures.report_self(str(self._queue.error))
        except LaneError as error:
            self._queue.fail(error)
            if isinstance(error, LaneTimeout):  # a death is noted already
                failures.report_self(str(error))
        except Exception as error:  # an error of ours must reach the callers and the other ranks, too
            text = f"{type(error).__name__}: {error}"
            failures.report_self(text)
            failure = LaneError(f"{channel.describe()} failed: {text}{see('please-report', quoted=error)}")
            failure.__cause__ = error
            self._queue.fail(failure)
        channel.abort()  # other ranks may wait for this one, and not for the rank that failed

    def _wait_for_reason(self) -> CycleInput | None:
        """Sleep until a cycle is due; return None if this rank ends without the others."""
        queue, channel = self._queue, self._channel
        while True:
            with queue.changed:
                queue.release_blocked()
                for work in self._under_way.values() if queue.queued else ():  # others wait for the end of these
                    if isinstance(error := work.error_within(0), LaneError):
                        queue.fail(error)
                if queue.error is not None:
                    return None
                peer_has_begun = channel.peer_has_begun
                delay_s = queue.delay_s(peer_has_begun)
                if delay_s == 0:
                    return self._cycle_input()
            channel.sleep(delay_s, ignore_peers=peer_has_begun)

    def _cycle_input(self) -> CycleInput:
        queue = self._queue
        queue.begin_cycle()
        overdue, expired = queue.take_late()
        return CycleInput(
            pending={name: submission.request for name, submission in queue.pending.items()},
            flags={name: submission.flags for name, submission in queue.pending.items() if submission.flags},
            overdue=overdue,
            expired=expired,
            joined=queue.joined is not None,
            closing=queue.closing and not queue.blocked and not queue.queued,
            under_way=tuple(self._send_queue.under_way),
            ended=frozenset(self._ended_here),
            waiting_too_long=queue.waiting_too_long,
        )

    def _run_cycle(self, cycle_input: CycleInput) -> CycleResult:
        result, stats = CycleResult(), self.stats
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        self._channel.run(self._negotiator.cycle(cycle_input, result), f"cycle {stats.cycles}")
        end_s = time.perf_counter()
        stats.cycles += 1
        stats.control_s += end_s - start_s
        stats.control_cpu_s += time.thread_time() - start_cpu_s
        self._recorder.add("agreement", f"cycle {stats.cycles}", start_s, end_s)
        with self._queue.changed:
            self._queue.end_cycle(start_s, end_s, result.any_waiting_too_long)
        return result

    def _apply(self, announced: CycleInput, result: CycleResult) -> None:
        """Turn agreed requests into work or errors, in the same order on every rank."""
        queue, pending, send_queue = self._queue, self._queue.pending, self._send_queue
        with queue.changed:
            now_s = time.perf_counter()
            if queue.error is not None:
                return
            for name, ranks in result.missing.items():
                if name in pending:
                    waited_s = now_s - pending[name].asked_s
                    logger.warning("waited %.0f s for %s: ranks %s have not asked for it", waited_s, name, ranks)
                elif self._channel.ranks[self._channel.rank] in ranks:
                    logger.warning("other ranks wait for %s, which this rank has not asked for", name)
            for name, reason in result.refused.items():
                if (refused := pending.pop(name, None)) is not None:
                    refused.agreement.decide(error=ValueError(reason))
            for name, bits in result.answers.items():
                if (asked := pending.pop(name, None)) is not None:
                    bits_set = [bool(bits >> index & 1) for index in range(asked.tensors[0].numel())]
                    asked.result = torch.tensor(bits_set, dtype=torch.bool)
                    asked.agreement.decide()
            mine = {request.name: pending.pop(request.name, None) for request in result.ready}
            if self._negotiator.has_news_of(pending):
                queue.request_cycle()
            queue.moving.update(name for name, submission in mine.items() if submission is not None)
            self.stats.requests += len(result.ready)
            if result.all_joined and queue.joined is not None:
                queue.joined.decide()
                queue.joined = None
            send_queue.end(result.ended)
            for number in result.ended:
                self._ended_here.discard(number)
                self._under_way.pop(number, None)
            for message in send_queue.add(result.ready):
                queue.queued[message.number] = [mine[request.name] for request in message.requests]
            for submission in mine.values():
                if submission is not None:
                    submission.agreed_s = now_s
            leaving = [(message, queue.queued.pop(message.number)) for message in send_queue.take()]
            if queue.queued and not self._ended_here <= set(announced.ended):
                queue.request_cycle(is_urgent=True)  # messages wait that were not there when these ended
            if queue.closing and not queue.has_unsent and (announced.pending or not announced.closing):
                queue.request_cycle(is_urgent=True)  # this rank closes only now
            queue.changed.notify_all()
        for message, submissions in leaving:
            self._start(message, submissions)
        if result.failure is not None:
            queue.fail(LaneError(f"{result.failure}{see('a-rank-is-missing')}"))

    def _start(self, message: Message, submissions: Sequence[Submission | None]) -> None:
        work = self._executor.start(message, submissions)
        stats, size = self.stats, sum(request.nbytes for request in message.requests).bit_length()
        stats.collectives += 1
        stats.message_sizes[size] = stats.message_sizes.get(size, 0) + 1
        if message.number in self._send_queue.under_way:
            self._under_way[message.number] = work
        for submission in submissions:
            if submission is not None:
                submission.agreement.decide(work)

    def _note_end(self, number: int, submissions: Sequence[Submission]) -> None:
        """Note that a message has ended here; on a lane's thread."""
        queue, now_s = self._queue, time.perf_counter()
        with queue.changed:
            if number in self._send_queue.under_way:
                self._ended_here.add(number)
                if queue.queued:
                    queue.notify(is_urgent=True)
            for each in submissions:
                each.agreement.done = True  # a moment before the lane says so
                queue.moving.discard(each.request.name)
            if queue.blocked:
                self._channel.wake()  # a blocked request may follow this one
        for each in submissions:
            times_s = (each.began_s, each.asked_s, each.agreed_s, each.started_s, now_s)
            for phase, (start_s, end_s) in zip(PHASES, itertools.pairwise(times_s), strict=True):
                self._recorder.add(phase, each.request.name, start_s, end_s)
