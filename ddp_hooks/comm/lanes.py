"""Lanes: ordered streams of communication beside the training thread, each with its own process group.

Every rank submits the same work to the same lane in the same order; nothing else is needed for agreement. On CPU
backends a lane is a thread that runs collectives over point-to-point messages (gloo's own reduce-scatter moves
an all-reduce); on NCCL it is a stream that runs the native ones.

A thread lane takes one piece of work at a time, cut into slices, and keeps a window of slices under way: while one is
added, others travel. It waits for the slices in one fixed order, the same on every rank, so that no two ranks can
wait for each other; between two pieces of work the other lanes keep the link busy.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import queue
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import compat
from ddp_hooks.comm.accounting import Recorder, Traffic
from ddp_hooks.comm.advice import see
from ddp_hooks.comm.collectives import Partition, ring_all_gather
from ddp_hooks.comm.ending import while_all_live
from ddp_hooks.comm.exchange import Algorithm, Recv, Round, Send
from ddp_hooks.comm.failure import LaneError, Witness, is_lost_connection, shortened
from ddp_hooks.comm.meeting import broadcast_object, call_named, gather_objects
from ddp_hooks.comm.slices import WINDOW, Slice, all_gather_slices, reduce_scatter_slices
from ddp_hooks.comm.small import SmallExchange
from ddp_hooks.comm.verifying import content_of, difference, is_verifying, lines_of_all
from ddp_hooks.comm.work import Joined, StreamWork, ThreadWork, Work

logger = logging.getLogger("ddp_hooks")

_FIRST_SPECIAL_TAG = 1 << 30  # tags below are those of slices: two bits for their kind, then a counter
_TAGS_PER_SLICE_KIND = 1 << 28
_SLICE_KINDS = ("reduce-scatter", "all-gather", "exchange")
_ROLL_CALL_TAG = _FIRST_SPECIAL_TAG
_TAGS_PER_KIND = 1 << 20
_VERIFYING, _SMALL = 1 << 9, (1 << 9) + 1  # kinds of exchanges that nobody else has
_SMALL_SUMS = "of small sums"
_LONGEST_PAUSE_S = 0.1  # between two looks at streams that are to end


def special_tag(kind: int, number: int) -> int:
    """A tag for the ``number``-th exchange of a kind, >= 0: it never meets one of another kind, or of none."""
    return _FIRST_SPECIAL_TAG + 1 + kind * _TAGS_PER_KIND + number % _TAGS_PER_KIND


@dataclass
class LaneSettings:
    """How lanes move data.

    Args:
        slice_bytes: largest message of an all-gather; those of reduce-scatters are a third of it, and shrink with P
            so that a lane receives at most four times as much of a dtype at a time.
        timeout_s: after this long without progress a wait fails.
        stall_warning_s: after this long a wait is logged, with what it waits for.
        verify: ranks compare every collective before it moves, on CPUs; see :mod:`ddp_hooks.comm.verifying`.
        tag_by_label: on CPUs messages are told from each other by the label of what they belong to, not by their order:
            what ranks submit in different orders waits until ``timeout_s``, instead of mixing.
        node_size: on CPUs, ranks per node; of more than one, collectives run on two levels.
    """

    slice_bytes: int = 1 << 20
    timeout_s: float = 600.0
    stall_warning_s: float = 60.0
    verify: bool = field(default_factory=is_verifying)
    tag_by_label: bool = False
    node_size: int = 1


class Lane(Protocol):
    """One ordered stream of communication."""

    traffic: Traffic

    def reduce_scatter(self, partitions: Sequence[Partition], label: str, divisor: int = 1) -> Work:
        """Sum every partition over the ranks and divide, in place: of rank r's range; the rest is undefined."""

    def all_gather(
        self,
        partitions: Sequence[Partition],
        label: str,
        after: Collection[Work] = (),
    ) -> Work:
        """Copy rank r's range of every partition from rank r to all ranks, in place.

        Args:
            partitions, label: what travels, and its name for messages.
            after: work of these lanes, submitted before, that this one is to follow.
        """

    def run(self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None) -> Work:
        """Run any algorithm, when what it is to follow is complete.

        With a ``tag`` of its own (see :func:`special_tag`) it meets no other messages, if ranks should part.
        """

    def dismiss(self, unfinished: bool = False) -> threading.Thread | None:
        """Take nothing more, and end when the rest is done; returns the thread that does so, if there is one.

        With ``unfinished`` only the messages that are under way are waited for.
        """


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
    """A lane for CPU backends: one thread, one process group, collectives over isend and irecv."""

    def __init__(
        self, index: int | str, group: dist.ProcessGroup, settings: LaneSettings, witness: Witness, recorder: Recorder
    ) -> None:
        self.traffic = Traffic()
        self._index = index
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._global_ranks = dist.get_process_group_ranks(group)  # messages speak of these
        self._settings = settings
        self._witness = witness
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
        """Reduce-scatters, slice by slice; see :class:`Lane`.

        Of ``part = (i, n)`` only slices i, i + n, i + 2n, …: the others are other lanes'.
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
        """All-gathers, slice by slice, of a part as above; see :class:`Lane`."""
        all_slices = all_gather_slices(partitions, self._rank, self._settings.slice_bytes, self._settings.node_size)
        slices = itertools.islice(all_slices, part[0], None, part[1])
        content = content_of(partitions) if self._settings.verify else ""
        return self._submit("all-gather", slices, label, after, content)

    def run(
        self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None
    ) -> ThreadWork:
        """Run ``algorithm`` as one slice; see :class:`Lane`."""
        # Ranks call the roll from different places, and small sums say themselves which they are.
        content = None if tag == _ROLL_CALL_TAG or self._index == _SMALL_SUMS else ""
        return self._submit("exchange", [Slice(lambda scratch: algorithm, 0, torch.uint8, tag)], label, after, content)

    def run_several(self, starts: Iterable[Callable[[], Algorithm]], label: str, part: tuple[int, int]) -> ThreadWork:
        """Run algorithms as the slices of one piece of work, of a part as above; each is made when its turn comes."""
        slices = (Slice(lambda scratch, start=start: start(), 0, torch.uint8) for start in starts)  # type: ignore[misc]
        return self._submit("exchange", itertools.islice(slices, part[0], None, part[1]), label)

    def dismiss(self, unfinished: bool = False) -> threading.Thread:
        """End when the rest is done; see :class:`Lane`."""
        self._stopping = self._stopping or unfinished
        self._submissions.put(None)
        return self._thread

    def describe(self) -> str:
        """Where this lane is, for messages."""
        return f"rank {self._global_ranks[self._rank]}, lane {self._index}: {self._doing}"

    def _submit(
        self, kind: str, slices: Iterable[Slice], label: str, after: Collection[Work] = (), content: str | None = ""
    ) -> ThreadWork:
        settings = self._settings
        name = f"{kind} of {label}"
        work = ThreadWork(name, settings.timeout_s, settings.stall_warning_s, self.describe, self._witness)
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
        # What was submitted before never waits for what was submitted after it, so lanes cannot wait in a circle.
        for other in itertools.chain.from_iterable(
            each.works if isinstance(each, Joined) else (each,) for each in others
        ):
            assert isinstance(other, ThreadWork)
            if not other.done:
                self._doing = f"{label}, which is to follow {other.label}"
                other.wait_as_a_lane()

    def _verify(self, submission: _Submission) -> None:
        """Raise on all ranks if they are about to move different things."""
        name = submission.work.label
        lines, algorithm = lines_of_all(f"{name}: {submission.content}", self._rank, self._world_size)
        tag = special_tag(_VERIFYING, self._num_verified)
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
            # Far from those of other labels, as far as there are few slices; 23 bits of it are left in a tag.
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
        return self._witness.failure_of(error, self._global_ranks[peer], self.describe())

    def _scratch_for(self, piece: Slice, slot: int) -> Tensor:
        buffers = self._scratch.setdefault(piece.dtype, [torch.empty(0, dtype=piece.dtype)] * WINDOW)
        if buffers[slot].numel() < piece.scratch_numel:
            buffers[slot] = torch.empty(piece.scratch_numel, dtype=piece.dtype)
        return buffers[slot]


class StreamLane:
    """A lane for NCCL: one stream, one process group, native collectives in place on equal ranges.

    The few elements that do not divide evenly travel together, in one small all-reduce or broadcast. The stream verbs
    do nothing on CPU tensors, so that the same code is tested on gloo. One rank calls no collective.
    """

    def __init__(self, index: int, group: dist.ProcessGroup, device: torch.device, recorder: Recorder) -> None:
        self.traffic = Traffic()
        self._index = index
        self._group = group
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._device = device
        self._recorder = recorder
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def reduce_scatter(self, partitions: Sequence[Partition], label: str, divisor: int = 1) -> Work:
        """Native reduce-scatters, and one all-reduce of what does not divide evenly; see :class:`Lane`."""
        with _StreamOrder(self._stream) as order:  # gradients were written on the current stream
            for flat, bounds in partitions:
                body, own = self._body(flat, bounds)
                if own.numel() and self._world_size > 1:
                    compat.reduce_scatter_single(own, body, self._group)
                    if divisor > 1:
                        own.div_(divisor)
            tails = self._tails(partitions)
            if tails:
                joined = torch.cat(tails)
                dist.all_reduce(joined, group=self._group)
                _split_back(joined.div_(divisor) if divisor > 1 else joined, tails)
        self._count(partitions)
        return StreamWork(f"reduce-scatter of {label}", order.event, self._device)

    def all_gather(
        self,
        partitions: Sequence[Partition],
        label: str,
        after: Collection[Work] = (),
    ) -> Work:
        """Native all-gathers, and one broadcast of what does not divide evenly; see :class:`Lane`."""
        with _StreamOrder(self._stream) as order:  # parameters were written on the current stream
            for work in after:
                work.wait()
            for flat, bounds in partitions:
                body, own = self._body(flat, bounds)
                if own.numel() and self._world_size > 1:
                    compat.all_gather_single(body, own, self._group)
            tails = self._tails(partitions)
            if tails:
                joined = torch.cat(tails)
                last = dist.get_global_rank(self._group, self._world_size - 1)
                dist.broadcast(joined, src=last, group=self._group)
                _split_back(joined, tails)
        self._count(partitions)
        return StreamWork(f"all-gather of {label}", order.event, self._device)

    def run(self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None) -> Work:
        """Run ``algorithm`` as batches of point-to-point messages, which have no tags; see :class:`Lane`."""
        with _StreamOrder(self._stream) as order:
            for work in after:
                work.wait()
            for next_round in algorithm:
                operations = [
                    dist.P2POp(
                        dist.irecv if isinstance(exchange, Recv) else dist.isend,
                        exchange.tensor,
                        group=self._group,
                        group_peer=exchange.peer,
                    )
                    for exchange in next_round
                ]
                for request in dist.batch_isend_irecv(operations) if operations else []:
                    request.wait()
                self._count_round(next_round)
        return StreamWork(f"exchange of {label}", order.event, self._device)

    def all_reduce(self, value: Tensor, op: dist.ReduceOp.RedOpType, label: str) -> Work:
        """Reduce a few numbers natively, in place."""
        with _StreamOrder(self._stream) as order:
            if self._world_size > 1:
                dist.all_reduce(value, op, group=self._group)
        return StreamWork(f"sum of {label}", order.event, self._device)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way on the stream."""
        return self._stream is None or self._stream.query()

    def dismiss(self, unfinished: bool = False) -> None:
        """Do nothing: a stream takes no more by itself; see :attr:`is_idle`."""

    def _body(self, flat: Tensor, bounds: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        share = bounds[1] - bounds[0] if self._world_size > 1 else flat.numel()
        return flat[: share * self._world_size], flat[share * self._rank : share * (self._rank + 1)]

    def _tails(self, partitions: Sequence[Partition]) -> list[Tensor]:
        if self._world_size == 1:
            return []
        tails = [flat[bounds[1] * self._world_size :] for flat, bounds in partitions]
        return [tail for tail in tails if tail.numel()]

    def _count_round(self, exchanges: Round) -> None:
        for exchange in exchanges:
            if isinstance(exchange, Recv):
                self.traffic.received_bytes += exchange.tensor.nbytes
            else:
                self.traffic.sent_bytes += exchange.tensor.nbytes
        self.traffic.rounds += 1

    def _count(self, partitions: Sequence[Partition]) -> None:
        nbytes = sum(partition.nbytes for partition in partitions)
        others = self._world_size - 1
        self.traffic.sent_bytes += nbytes * others // self._world_size
        self.traffic.received_bytes += nbytes * others // self._world_size
        self.traffic.rounds += others


def _split_back(joined: Tensor, parts: Sequence[Tensor]) -> None:
    for part, values in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
        part.copy_(values)


class _StreamOrder:
    """Run on ``stream`` what follows the current stream's work; ``event`` marks the end. Does nothing on CPU."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._context = torch.cuda.stream(stream) if stream is not None else None
        self._stream = stream
        self.event: torch.cuda.Event | None = None

    def __enter__(self) -> _StreamOrder:
        if self._stream is not None and self._context is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            self._context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._stream is not None and self._context is not None:
            self.event = self._stream.record_event()
            self._context.__exit__(*exception)


class Lanes:
    """A number of lanes over the ranks of one group; work goes to them in turn, the same on every rank.

    Args:
        group: the ranks; its backend decides the kind of lane. Creating the lanes is collective over it.
        num_lanes: how many, to begin with.
        device: where the tensors will be.
        settings: slices and timeouts.
        recorder: where lanes note spans, for a timeline.
        backend: what carries them; None: what the group uses for such a device.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_lanes: int,
        device: torch.device,
        settings: LaneSettings,
        recorder: Recorder,
        backend: str | None = None,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.backend = backend or compat.backend_of(group, device)
        self.native = self.backend == "nccl"
        self._device = device
        self._settings = settings
        self._recorder = recorder
        self._witness: Witness | None = None
        self._lanes: list[Lane] = []
        self._groups: list[dist.ProcessGroup] = []
        self._small: list[Lane] = []  # a lane of its own for small sums, when there is the first
        self._num_small = 0
        self._submitted = 0
        self._in_use: int | None = None  # lanes that get work; None: all of them
        self._ending: list[threading.Thread] = []
        self._stuck_streams = False
        # At exit, close() or abandon() come first.
        weakref.finalize(self, _dismiss, self._lanes, self._small).atexit = False
        self.grow(num_lanes)

    def grow(self, num_lanes: int) -> None:
        """Add lanes until there are ``num_lanes``; collective."""
        while len(self._lanes) < num_lanes:
            index = len(self._lanes)
            group = self._new_group(f"ddp_hooks lane {index}")
            self._groups.append(group)
            if self._witness is None:
                ranks = dist.get_process_group_ranks(group)
                letters = group if self.backend == "gloo" else None
                self._witness = Witness(compat.default_store(), group.group_name, ranks[self.rank], ranks, letters)
            if self.native:
                self._lanes.append(StreamLane(index, group, self._device, self._recorder))
                continue
            self._lanes.append(ThreadLane(index, group, self._settings, self._witness, self._recorder))

    def _new_group(self, name: str) -> dist.ProcessGroup:
        def make() -> dist.ProcessGroup:
            return compat.new_group_like(self.group, self.backend, self._settings.timeout_s, name)

        # A thread has a CUDA device of its own, which NCCL would take.
        return make() if self.native else while_all_live(make, self.group, f"the making of {name}")

    def __len__(self) -> int:
        """Lanes that get work."""
        return len(self._lanes) if self._in_use is None else self._in_use

    @property
    def witness(self) -> Witness | None:
        """Who knows of ranks that failed."""
        return self._witness

    @property
    def traffic(self) -> Traffic:
        """The totals of all lanes."""
        return sum((lane.traffic for lane in (*self._lanes, *self._small)), Traffic())

    def gather_objects(self, item: Any, what: str) -> list[Any]:
        """Return every rank's ``item``, as :func:`~ddp_hooks.comm.gather_objects` does; not for normal steps."""
        return gather_objects(item, self.group, what, self._settings)

    def broadcast_object(self, item: Any, what: str) -> Any:
        """Return the first rank's ``item``, likewise."""
        return broadcast_object(item, self.group, what, self._settings)

    def reduce_small(self, value: Tensor, what: str, largest: bool = False) -> Tensor:
        """Return the sum of ``value`` over the ranks, in their order, or its largest elements; collective.

        For a few numbers in a step. On CPUs one round of messages, P - 1 per rank, which do not queue behind what
        lanes move.

        Args:
            value: of the same shape and type on every rank; stays as it is.
            what: the call as users know it, the same on every rank; see :func:`~ddp_hooks.comm.calling`.
            largest: take the largest elements instead of sums; of numbers that are not NaN.

        Raises:
            LaneError: a rank died, or ranks have called different things.
            LaneTimeout: some rank has not called this within ``timeout_s``.
        """
        what = call_named(what)
        if self.world_size == 1:
            return value.clone()
        if self.native:
            lane = self._lanes[0]
            assert isinstance(lane, StreamLane)
            result = value.clone()
            lane.all_reduce(result, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, what).wait()
            return result
        if not self._small:
            assert self._witness is not None
            # Beside the first lane, on its connections: tags keep their messages apart.
            self._small.append(ThreadLane(_SMALL_SUMS, self._groups[0], self._settings, self._witness, self._recorder))
        exchange = SmallExchange(value.detach().cpu(), what, self.rank, self.world_size)
        tag = special_tag(_SMALL, self._num_small)
        self._num_small += 1
        self._small[0].run(exchange.run(), what, tag=tag).wait()
        return exchange.result(dist.get_process_group_ranks(self.group), largest).to(value.device)

    def reduce_scatter(self, partitions: Sequence[Partition], label: str, divisor: int = 1) -> Work:
        """:meth:`Lane.reduce_scatter` on the next lane."""
        return self.next_lane().reduce_scatter(partitions, label, divisor)

    def all_gather(
        self,
        partitions: Sequence[Partition],
        label: str,
        after: Collection[Work] = (),
    ) -> Work:
        """:meth:`Lane.all_gather` on the next lane."""
        return self.next_lane().all_gather(partitions, label, after)

    def spread_reduce_scatter(self, partition: Partition, label: str, divisor: int = 1) -> Work:
        """:meth:`Lane.reduce_scatter` on all lanes, each of which moves some slices: for one that is waited for."""
        return self._spread(lambda lane, part: lane.reduce_scatter([partition], label, divisor, part))

    def spread_all_gather(self, partition: Partition, label: str) -> Work:
        """:meth:`Lane.all_gather` on all lanes, likewise; of what is complete: lanes do not wait for each other."""
        return self._spread(lambda lane, part: lane.all_gather([partition], label, part=part))

    def spread_several(self, starts: Sequence[Callable[[], Algorithm]], label: str) -> Work:
        """Any algorithms as one piece of work, each of which some lane makes and runs when its turn comes."""
        return self._spread(lambda lane, part: lane.run_several(starts, label, part))

    def _spread(self, submit: Callable[[ThreadLane, tuple[int, int]], Work]) -> Work:
        lanes = [lane for lane in self._lanes[: len(self)] if isinstance(lane, ThreadLane)]
        return Joined([submit(lane, (index, len(lanes))) for index, lane in enumerate(lanes)])

    def run(self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None) -> Work:
        """:meth:`Lane.run` on the next lane."""
        return self.next_lane().run(algorithm, label, after, tag)

    def next_lane(self) -> Lane:
        """The lane whose turn it is, the same on every rank: for pieces of work that are to follow each other."""
        lane = self._lanes[self._submitted % len(self)]
        self._submitted += 1
        return lane

    def use(self, num_lanes: int) -> None:
        """Give work to the first ``num_lanes`` of them only; the same on every rank, where nothing is under way."""
        if not 1 <= num_lanes <= len(self._lanes):
            raise ValueError(f"use(...) takes 1 to {len(self._lanes)} lanes, got {num_lanes}")
        self._in_use = num_lanes

    def close(self, farewell_s: float = 10.0) -> None:
        """Finish what was submitted, let every rank do the same, and end the lanes; wait at most ``farewell_s``.

        Streams are waited for until ``timeout_s``. Where a rank died, or does not come, what is under way on streams is
        cut short: to give NCCL's connections back otherwise waits for the other side.
        """
        deadline_s = time.monotonic() + farewell_s
        together = False
        if self._end_threads(deadline_s) and self._end_streams() and self._witness is not None:
            # Through the store: a thread that waited in the backend for a rank that is late could not be woken.
            together = self._witness.wait_for_farewells(max(deadline_s, time.monotonic() + farewell_s / 2))
        if self._witness is not None:
            self._witness.close()
        self._lanes.clear()
        self._small.clear()
        while self._groups:
            if self.native and not together:
                compat.abort_group(self._groups.pop())
            else:
                compat.destroy_group(self._groups.pop())

    def _end_streams(self) -> bool:
        """Wait for what streams have under way; whether it ended: without the ranks that died it does not."""
        streams = [lane for lane in self._lanes if isinstance(lane, StreamLane)]
        start_s, pause_s, warned = time.monotonic(), 0.0001, False
        while not all(lane.is_idle for lane in streams):
            waited_s = time.monotonic() - start_s
            assert self._witness is not None
            failure = self._witness.first_failure() if pause_s >= _LONGEST_PAUSE_S else None
            if failure is not None or waited_s >= self._settings.timeout_s:
                self._stuck_streams = True
                hint = failure or self._witness.report_wait("close()")
                logger.error("close() cuts short what is under way after %.0f s: %s", waited_s, hint)
                return False
            if waited_s >= self._settings.stall_warning_s and not warned:
                warned = True
                logger.warning("waited %.0f s in close(): %s", waited_s, self._witness.report_wait("close()"))
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        if warned and self._witness is not None:
            self._witness.end_wait()
        return True

    def explain(self, error: BaseException | None, patience_s: float = 10.0) -> str | None:
        """Who was lost first, if ``error`` says that another group lost a connection; None if not, or not found out.

        Calls the roll on a lane: neighbours of a dead rank know at once, the others learn it from them.
        """
        if self._witness is None or self.native or not self._lanes or not is_lost_connection(error):
            return None
        tokens = [torch.zeros(1, dtype=torch.uint8) for _ in range(self.world_size)]
        lane = self._lanes[0]
        assert isinstance(lane, ThreadLane)
        # Ranks may be at different places of the lane's order: a tag of its own keeps the roll call apart.
        work = lane.run(ring_all_gather(tokens, self.rank), "a roll call after a lost connection", tag=_ROLL_CALL_TAG)
        deadline_s = time.monotonic() + patience_s
        failure = None
        while not work.done and failure is None and time.monotonic() < deadline_s:
            broken = work.error_within(0.25)
            if broken is not None:
                return str(broken)
            failure = self._witness.first_failure()
        failure = failure or self._witness.first_failure()
        return None if failure is None else f"{failure}{see('a-rank-died', quoted=failure)}"

    def annotate(self, error: BaseException | None, what: str) -> None:
        """If ``error`` says that ``what`` lost a connection, find out who was lost; log it, and add it to the error."""
        explanation = self.explain(error)
        if error is not None and explanation is not None:
            logger.error("%s lost a connection: %s", what, explanation)
            compat.add_note(error, explanation)

    def abandon(self, error: BaseException, farewell_s: float = 2.0) -> None:
        """This rank ends because of ``error``: tell the others, and wait a little for what is under way.

        A thread that comes back from the backend while the interpreter ends would abort the process.
        """
        explanation = self.explain(error)
        if explanation is not None:
            logger.error("this process ends with a lost connection: %s", explanation)
        elif self._witness is not None and not isinstance(error, LaneError):
            self._witness.confess(shortened(f"{type(error).__name__}: {error}"))
        self._end_threads(time.monotonic() + farewell_s, unfinished=True)

    @property
    def stuck(self) -> bool:
        """Whether another rank was still waited for, in the backend, after the lanes were told to end."""
        return self._stuck_streams or any(thread.is_alive() for thread in self._ending)

    def _end_threads(self, deadline_s: float, unfinished: bool = False) -> bool:
        """Let the lanes' threads end; whether all of them have in time."""
        self._ending = [thread for lane in (*self._lanes, *self._small) if (thread := lane.dismiss(unfinished))]
        for thread in self._ending:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self.stuck


def _dismiss(*lanes: list[Lane]) -> None:
    """Their owner is gone without having closed them: let threads end by themselves, before the interpreter does."""
    for lane in itertools.chain(*lanes):
        thread = lane.dismiss()
        if thread is not None:
            atexit.register(thread.join, 10.0)
