"""A lane for CPU backends: a thread that runs collectives over point-to-point messages.

The thread takes one piece of work at a time, cut into slices, and keeps a window of slices under way: while one is
added, others travel. It waits for slices in one fixed order, the same on every rank, so that no two ranks can wait for
each other. Between two pieces of work the other lanes keep the link busy.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm.accounting import Recorder, Traffic
from ddp_hooks.comm.advice import see
from ddp_hooks.comm.algorithms.collectives import Partition
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Send
from ddp_hooks.comm.collective_check import content_of, difference, lines_of_all
from ddp_hooks.comm.executors.lane import FIRST_SPECIAL_TAG, LaneSettings, special_tag
from ddp_hooks.comm.executors.slices import WINDOW, Slice, all_gather_slices, reduce_scatter_slices
from ddp_hooks.comm.executors.work import ThreadWork, Work, WorkGroup
from ddp_hooks.comm.failure import FailureStore, LaneError

_TAGS_PER_SLICE_KIND = 1 << 28
_SLICE_KINDS = ("reduce-scatter", "all-gather", "exchange")
LIVENESS_TAG = FIRST_SPECIAL_TAG
"""Tag of the check that all ranks are alive: ranks come to it from different places of a lane's order."""
SMALL_SUMS = "of small sums"
"""Index of the lane that exchanges a few numbers."""
_CHECKING = 1 << 9  # kind of exchange that nobody else has


@dataclass
class _Submission:
    kind: str  # of _SLICE_KINDS
    work: ThreadWork
    slices: Iterable[Slice]
    after: Collection[Work]
    content: str | None = ""  # for ranks to compare; None: nothing


class _Running:
    """One slice under way: its generator, the round that it is in, and the backend's handles."""

    def __init__(self, algorithm: Algorithm, tag: int) -> None:
        self.algorithm = algorithm
        self.tag = tag
        self.round_index = -1
        self.receiving: list[tuple[Recv, Any]] = []  # in this round
        self.sending: list[tuple[Send, Any]] = []  # in all rounds so far


class ThreadLane:
    """Lane for CPU backends: one thread, one process group, collectives over point-to-point messages."""

    def __init__(
        self,
        index: int | str,
        group: dist.ProcessGroup,
        settings: LaneSettings,
        failures: FailureStore,
        recorder: Recorder,
    ) -> None:
        self.traffic = Traffic()
        self._index = index
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._global_ranks = dist.get_process_group_ranks(group)  # messages speak of these
        self._settings = settings
        self._failures = failures
        self._recorder = recorder
        self._error: LaneError | None = None
        self._stopping = False  # begin nothing more
        self._doing = "idle"
        self._num_slices = 0
        self._num_verified = 0
        self._scratch: dict[torch.dtype, list[Tensor]] = {}
        self._submissions: queue.SimpleQueue[_Submission | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"ddp_hooks lane {index}", daemon=True)
        self._thread.start()

    def reduce_scatter(
        self, partitions: Sequence[Partition], label: str, divisor: int = 1, part: tuple[int, int] = (0, 1)
    ) -> Work:
        """Reduce-scatter slice by slice; see :class:`~.lane.Lane`.

        With ``part = (i, n)`` only slices i, i + n, i + 2n, …; other lanes run the others.
        """
        settings = self._settings
        slices = reduce_scatter_slices(partitions, self._rank, settings.slice_bytes, divisor, settings.node_size)
        content = f"{content_of(partitions)}, divided by {divisor}" if settings.verify else ""
        return self._submit("reduce-scatter", itertools.islice(slices, part[0], None, part[1]), label, content=content)

    def all_gather(
        self,
        partitions: Sequence[Partition],
        label: str,
        after: Collection[Work] = (),
        part: tuple[int, int] = (0, 1),
    ) -> Work:
        """All-gather slice by slice, a part as above; see :class:`~.lane.Lane`."""
        all_slices = all_gather_slices(partitions, self._rank, self._settings.slice_bytes, self._settings.node_size)
        slices = itertools.islice(all_slices, part[0], None, part[1])
        content = content_of(partitions) if self._settings.verify else ""
        return self._submit("all-gather", slices, label, after, content)

    def run(
        self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None
    ) -> ThreadWork:
        """Run ``algorithm`` as one slice; see :class:`~.lane.Lane`."""
        # Ranks come to a liveness check from different places, and small sums carry their call.
        content = None if tag == LIVENESS_TAG or self._index == SMALL_SUMS else ""
        whole = Slice(lambda scratch: algorithm, 0, torch.uint8, tag)
        return self._submit("exchange", [whole], label, after, content)

    def run_several(self, starts: Iterable[Callable[[], Algorithm]], label: str, part: tuple[int, int]) -> ThreadWork:
        """Run algorithms as the slices of one piece of work, a part as above; each is made when its turn comes."""
        slices = (Slice(lambda scratch, start=start: start(), 0, torch.uint8) for start in starts)  # type: ignore[misc]
        return self._submit("exchange", itertools.islice(slices, part[0], None, part[1]), label)

    def close(self, unfinished: bool = False) -> threading.Thread:
        """End when the rest is done; see :class:`~.lane.Lane`."""
        self._stopping = self._stopping or unfinished
        self._submissions.put(None)
        return self._thread

    def describe(self) -> str:
        """Return the rank, lane, work, round and peer that the thread waits for, for messages."""
        return f"rank {self._global_ranks[self._rank]}, lane {self._index}: {self._doing}"

    def _submit(
        self, kind: str, slices: Iterable[Slice], label: str, after: Collection[Work] = (), content: str | None = ""
    ) -> ThreadWork:
        settings = self._settings
        name = f"{kind} of {label}"
        work = ThreadWork(name, settings.timeout_s, settings.stall_warning_s, self.describe, self._failures)
        self._submissions.put(_Submission(kind, work, slices, after, content))
        return work

    @torch.no_grad()
    def _serve(self) -> None:
        while (submission := self._submissions.get()) is not None:
            if self._error is None and self._stopping:
                self._error = LaneError(
                    f"{self.describe()}: this rank ends, {submission.work.label} was not done{see('a-rank-died')}"
                )
            if self._error is None:
                try:
                    self._wait_for(submission.after, submission.work.label)
                    if self._settings.verify and self._world_size > 1 and submission.content is not None:
                        self._verify(submission)
                    with self._counting(submission.work.label):
                        self._run_slices(submission)
                except LaneError as error:
                    self._error = error
                except Exception as error:  # anything else is ours; it must reach the training thread too
                    self._error = LaneError(
                        f"{self.describe()} failed: {type(error).__name__}: {error}{see('please-report', quoted=error)}"
                    )
                    self._error.__cause__ = error
            self._doing = "idle"
            submission.work.finish(self._error)
        # A work keeps its lane, to ask where it is. So the lane lets go of memory, and of the group with its threads.
        self._scratch.clear()
        del self._group

    def _wait_for(self, others: Collection[Work], label: str) -> None:
        # Work never waits for work submitted after it, so lanes cannot wait in a circle.
        for other in itertools.chain.from_iterable(
            each.works if isinstance(each, WorkGroup) else (each,) for each in others
        ):
            assert isinstance(other, ThreadWork)
            if not other.done:
                self._doing = f"{label}, which is to follow {other.label}"
                other.wait_as_a_lane()

    def _verify(self, submission: _Submission) -> None:
        """Raise on all ranks if they are about to move different things."""
        name = submission.work.label
        lines, algorithm = lines_of_all(f"{name}: {submission.content}", self._rank, self._world_size)
        tag = special_tag(_CHECKING, self._num_verified)
        self._num_verified += 1
        verifying = Slice(lambda scratch: algorithm, 0, torch.uint8, tag)
        self._run_slices(_Submission("exchange", submission.work, [verifying], ()))
        found = difference(lines, self._global_ranks)
        if found is not None:
            raise LaneError(f"collective {self._num_verified} of lane {self._index}: {found}{see('ranks-differ')}")

    @contextmanager
    def _counting(self, label: str) -> Iterator[None]:
        start_s = time.perf_counter()
        try:
            with torch.profiler.record_function(f"ddp_hooks lane {self._index}: {label}"):
                yield
        finally:
            end_s = time.perf_counter()
            self.traffic.busy_s += end_s - start_s
            self._recorder.add(f"lane {self._index}", label, start_s, end_s)

    def _run_slices(self, submission: _Submission) -> None:
        slices = iter(submission.slices)
        window: deque[_Running] = deque()
        self._doing = submission.work.label
        if self._settings.tag_by_label:
            # Tags of different labels are far apart, if slices are few; 23 bits of the checksum are left in a tag.
            self._num_slices = zlib.crc32(submission.work.label.encode()) << 4
        for slot in range(WINDOW):
            self._begin_next(slices, window, submission, slot)
        while window:
            running = window.popleft()
            self._wait(running, submission)
            if self._advance(running):
                window.append(running)
            else:
                self._wait_for_sends(running, submission)
                self._begin_next(slices, window, submission, running.tag % WINDOW)

    def _begin_next(
        self, slices: Iterator[Slice], window: deque[_Running], submission: _Submission, slot: int
    ) -> None:
        """Start the next slice that has anything to send, in the buffer of ``slot``."""
        for piece in slices:
            if self._stopping:
                raise LaneError(f"{self.describe()} was cut short, because this rank ends{see('a-rank-died')}")
            tag = self._next_tag(submission.kind, slot) if piece.tag is None else piece.tag
            self._num_slices += 1
            running = _Running(piece.start(self._scratch_for(piece, slot)), tag)
            if self._advance(running):
                window.append(running)
                return

    def _next_tag(self, kind: str, slot: int) -> int:
        """The tag of the next slice in ``slot``.

        The slot keeps buffers apart, and the counter slices of one slot. The kind keeps gradients from meeting
        parameters where one rank has skipped a step: both then wait, and say for what.
        """
        number = (self._num_slices * WINDOW + slot) % _TAGS_PER_SLICE_KIND
        return _SLICE_KINDS.index(kind) * _TAGS_PER_SLICE_KIND + number

    def _advance(self, running: _Running) -> bool:
        """Post the slice's next round; False when the slice is complete."""
        next_round = next(running.algorithm, None)
        if next_round is None:
            return False
        running.round_index += 1
        running.receiving = []
        for exchange in next_round:
            try:
                if isinstance(exchange, Recv):
                    handle = self._group.recv([exchange.tensor], exchange.peer, running.tag)
                    running.receiving.append((exchange, handle))
                else:
                    handle = self._group.send([exchange.tensor], exchange.peer, running.tag)
                    running.sending.append((exchange, handle))
            except RuntimeError as error:
                raise self._failure(error, exchange.peer) from error
        return True

    def _wait(self, running: _Running, submission: _Submission) -> None:
        """Return when the slice's round is complete."""
        self.traffic.rounds += 1
        place = f"{submission.work.label}, round {running.round_index}"
        for exchange, handle in running.receiving:
            self._doing = f"{place}, from rank {self._global_ranks[exchange.peer]}"
            self._complete(handle, exchange.peer)
            self.traffic.received_bytes += exchange.tensor.nbytes

    def _wait_for_sends(self, running: _Running, submission: _Submission) -> None:
        """Return when the memory of a slice that is complete may be used again."""
        place = f"{submission.work.label}, after round {running.round_index}"
        for exchange, handle in running.sending:
            self._doing = f"{place}, to rank {self._global_ranks[exchange.peer]}"
            self._complete(handle, exchange.peer)
            self.traffic.sent_bytes += exchange.tensor.nbytes

    def _complete(self, handle: Any, peer: int) -> None:
        try:
            handle.wait()
        except RuntimeError as error:
            raise self._failure(error, peer) from error

    def _failure(self, error: RuntimeError, peer: int) -> LaneError:
        return self._failures.failure_of(error, self._global_ranks[peer], self.describe())

    def _scratch_for(self, piece: Slice, slot: int) -> Tensor:
        buffers = self._scratch.setdefault(piece.dtype, [torch.empty(0, dtype=piece.dtype)] * WINDOW)
        if buffers[slot].numel() < piece.scratch_numel:
            buffers[slot] = torch.empty(piece.scratch_numel, dtype=piece.dtype)
        return buffers[slot]
