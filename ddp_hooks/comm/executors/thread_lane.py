"""A lane for CPU backends: a thread that runs collectives over point-to-point messages.

gloo's own reduce-scatter moves an all-reduce. The thread takes one piece of work at a time, cut into slices, and keeps
a window of slices under way: while one is added, others travel. It waits for slices in one fixed order, the same on
every rank, so that no two ranks can wait for each other. Between two pieces of work the other lanes keep the link busy.
"""

from __future__ import annotations

import itertools
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm.accounting import Recorder, Traffic
from ddp_hooks.comm.agreement import first_difference, is_checking
from ddp_hooks.comm.algorithms.collectives import Partition, Wire, ring_all_gather
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Send
from ddp_hooks.comm.executors.slices import WINDOW, Slice, all_gather_slices, reduce_scatter_slices
from ddp_hooks.comm.executors.work import ThreadWork, Work, WorkGroup
from ddp_hooks.comm.failure import FailureStore, LaneError, packed, unpacked
from ddp_hooks.comm.validation import see
from ddp_hooks.comm.wire.rounded import DifferenceWire, RoundedWire

# Tags below those of special exchanges are those of slices: two bits for their kind, then a counter.
_TAGS_PER_SLICE_KIND, _TAGS_PER_SPECIAL_KIND = 1 << 28, 1 << 20
_SLICE_KINDS = ("reduce-scatter", "all-gather", "exchange")
LIVENESS_TAG = 1 << 30
"""Tag of the check that all ranks are alive: ranks come to it from different places of a lane's order."""
SMALL_SUMS = "of small sums"
"""Index of the lane that exchanges a few numbers."""
_CHECKING = 1 << 9  # kind of exchange that nobody else has
_LINE_BYTES = 512  # that ranks compare

Part: TypeAlias = tuple[int, int]
"""``(i, n)``: slices i, i + n, i + 2n, … of a collective; other lanes run the others."""
_WHOLE: Part = (0, 1)


@dataclass
class LaneSettings:
    """Settings of lanes.

    Messages of all-gathers have at most ``slice_bytes``, those of reduce-scatters at most
    ``min(slice_bytes / 3, 2 * slice_bytes / (P - 1))``: a lane receives at most ``4 * slice_bytes`` of a
    dtype at a time. Wires that code numbers take memory for what is sent, and to add in, besides.
    """

    slice_bytes: int = 1 << 20
    timeout_s: float = 600.0  #: without progress, after which a wait fails
    stall_warning_s: float = 60.0  #: after which a wait is logged, with what it waits for
    verify: bool = field(default_factory=is_checking)  #: on CPUs ranks compare every collective before it moves
    tag_by_label: bool = False  #: on CPUs ranks that submit in different orders time out, and exchange no wrong data
    node_size: int = 1  #: ranks per node, on CPUs; with more than one, collectives run on two levels


def special_tag(kind: int, number: int) -> int:
    """Return the tag of the ``number``-th exchange of a kind, >= 0, that no other exchange has."""
    return LIVENESS_TAG + 1 + kind * _TAGS_PER_SPECIAL_KIND + number % _TAGS_PER_SPECIAL_KIND


@dataclass
class _Submission:
    kind: str  # of _SLICE_KINDS
    work: ThreadWork
    slices: Iterator[Slice]
    after: Collection[Work] = ()
    content: str | None = None  # for ranks to compare; None: nothing


@dataclass
class _Running:
    """Slice under way, with its messages and the backend's handles."""

    algorithm: Algorithm
    tag: int
    round_index: int = -1
    receiving: list[tuple[Recv | Send, Any]] = field(default_factory=list)  # in this round
    sending: list[tuple[Recv | Send, Any]] = field(default_factory=list)  # in all rounds so far


class ThreadLane:
    """Lane for CPU backends: one thread, one process group; methods are those of :class:`~.lanes.Lanes`."""

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
        self, partitions: Sequence[Partition], label: str, divisor: int = 1, part: Part = _WHOLE
    ) -> ThreadWork:
        settings = self._settings
        slices = reduce_scatter_slices(partitions, self._rank, settings.slice_bytes, divisor, settings.node_size)
        content = f"{_content_of(partitions)}, divided by {divisor}" if settings.verify else None
        return self._submit("reduce-scatter", slices, label, content, part=part)

    def all_gather(
        self, partitions: Sequence[Partition], label: str, after: Collection[Work] = (), part: Part = _WHOLE
    ) -> ThreadWork:
        settings = self._settings
        slices = all_gather_slices(partitions, self._rank, settings.slice_bytes, settings.node_size)
        content = _content_of(partitions) if settings.verify else None
        return self._submit("all-gather", slices, label, content, after, part)

    def run(
        self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None
    ) -> ThreadWork:
        # Ranks come to a liveness check from different places, and small sums carry their call.
        content = None if tag == LIVENESS_TAG or self._index == SMALL_SUMS else ""
        return self._submit("exchange", [_slice_of(lambda: algorithm, tag)], label, content, after)

    def run_several(self, starts: Iterable[Callable[[], Algorithm]], label: str) -> ThreadWork:
        """Run algorithms as the slices of one piece of work; each is made when its turn comes."""
        return self._submit("exchange", map(_slice_of, starts), label, "")

    def close(self, unfinished: bool = False) -> threading.Thread:
        """End when the rest is done, or with ``unfinished`` only messages under way; return the thread that ends."""
        self._stopping = self._stopping or unfinished
        self._submissions.put(None)
        return self._thread

    def describe(self) -> str:
        """Return what the thread waits for, for messages."""
        return f"rank {self._global_ranks[self._rank]}, lane {self._index}: {self._doing}"

    def _submit(
        self,
        kind: str,
        slices: Iterable[Slice],
        label: str,
        content: str | None,
        after: Collection[Work] = (),
        part: Part = _WHOLE,
    ) -> ThreadWork:
        settings, (first, step) = self._settings, part
        name = f"{kind} of {label}"
        work = ThreadWork(name, settings.timeout_s, settings.stall_warning_s, self.describe, self._failures)
        content = content if settings.verify and self._world_size > 1 else None
        self._submissions.put(_Submission(kind, work, itertools.islice(slices, first, None, step), after, content))
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
                    if submission.content is not None:
                        self._verify(submission)
                    with self._recorder.measure(f"lane {self._index}", submission.work.label, self._count_busy):
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
                other.wait(in_lane=True)

    def _verify(self, submission: _Submission) -> None:
        """Raise on all ranks if they are about to move different things."""
        lines = [packed("", _LINE_BYTES) for _ in range(self._world_size)]
        lines[self._rank] = packed(f"{submission.work.label}: {submission.content}", _LINE_BYTES)
        tag = special_tag(_CHECKING, self._num_verified)
        self._num_verified += 1
        exchange = _slice_of(lambda: ring_all_gather(lines, self._rank), tag)
        self._run_slices(_Submission("exchange", submission.work, iter([exchange])))
        texts = [unpacked(line) for line in lines]
        if len(set(texts)) > 1:
            found = first_difference([{"the next collective": text} for text in texts], self._global_ranks)
            raise LaneError(f"collective {self._num_verified} of lane {self._index}: {found}{see('ranks-differ')}")

    def _count_busy(self, seconds: float) -> None:
        self.traffic.busy_s += seconds

    def _run_slices(self, submission: _Submission) -> None:
        label = self._doing = submission.work.label
        window: deque[_Running] = deque()
        if self._settings.tag_by_label:
            # Tags of different labels are far apart, if slices are few; 23 bits of the checksum are left in a tag.
            self._num_slices = zlib.crc32(label.encode()) << 4
        for slot in range(WINDOW):
            self._begin_next(submission, window, slot)
        while window:
            running = window.popleft()
            self.traffic.rounds += 1
            self._complete(running.receiving, f"{label}, round {running.round_index}")
            if self._advance(running):
                window.append(running)
            else:  # then the slice's memory is used again
                self._complete(running.sending, f"{label}, after round {running.round_index}")
                self._begin_next(submission, window, running.tag % WINDOW)

    def _begin_next(self, submission: _Submission, window: deque[_Running], slot: int) -> None:
        """Start the next slice that has anything to send, in the buffer of ``slot``."""
        for piece in submission.slices:
            if self._stopping:
                raise LaneError(f"{self.describe()} was cut short, because this rank ends{see('a-rank-died')}")
            tag = piece.tag
            if tag is None:
                # The slot keeps buffers apart, and the counter slices of one slot. The kind keeps gradients from
                # meeting parameters where one rank has skipped a step: both then wait, and say for what.
                number = (self._num_slices * WINDOW + slot) % _TAGS_PER_SLICE_KIND
                tag = _SLICE_KINDS.index(submission.kind) * _TAGS_PER_SLICE_KIND + number
            self._num_slices += 1
            running = _Running(piece.start(self._scratch_for(piece, slot)), tag)
            if self._advance(running):
                window.append(running)
                return

    def _advance(self, running: _Running) -> bool:
        """Post the slice's next round; False when the slice is complete."""
        next_round = next(running.algorithm, None)
        if next_round is None:
            return False
        running.round_index += 1
        running.receiving = []
        for exchange in next_round:
            receives = isinstance(exchange, Recv)
            post = self._group.recv if receives else self._group.send
            try:
                handle = post([exchange.tensor], exchange.peer, running.tag)
            except RuntimeError as error:
                peer = self._global_ranks[exchange.peer]
                raise self._failures.failure_of(error, peer, self.describe()) from error
            (running.receiving if receives else running.sending).append((exchange, handle))
        return True

    def _complete(self, messages: Iterable[tuple[Recv | Send, Any]], place: str) -> None:
        for exchange, handle in messages:
            way = "from" if isinstance(exchange, Recv) else "to"
            self._doing = f"{place}, {way} rank {self._global_ranks[exchange.peer]}"
            try:
                handle.wait()
            except RuntimeError as error:
                peer = self._global_ranks[exchange.peer]
                raise self._failures.failure_of(error, peer, self.describe()) from error
            self.traffic.count(exchange)

    def _scratch_for(self, piece: Slice, slot: int) -> Tensor:
        buffers = self._scratch.setdefault(piece.dtype, [torch.empty(0, dtype=piece.dtype)] * WINDOW)
        if buffers[slot].numel() < piece.scratch_numel:
            buffers[slot] = torch.empty(piece.scratch_numel, dtype=piece.dtype)
        return buffers[slot]


def _content_of(partitions: Sequence[Partition]) -> str:
    return " + ".join(
        f"{flat.numel()} of {flat.dtype} in {len(bounds) - 1}" + _wire_text(wire)
        for flat, bounds, wire in partitions
    )


def _wire_text(wire: Wire | None) -> str:
    if isinstance(wire, (RoundedWire, DifferenceWire)):
        return f" as {type(wire).__name__} of {wire.codec}"
    return f" as {type(wire).__name__}" if wire else ""


def _slice_of(start: Callable[[], Algorithm], tag: int | None = None) -> Slice:
    return Slice(lambda scratch: start(), 0, torch.uint8, tag)
