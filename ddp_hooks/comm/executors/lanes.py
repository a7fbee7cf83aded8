"""All lanes of one group: gathers go to all of them, other work in turn, the same on every rank."""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm.accounting import Recorder, Traffic
from ddp_hooks.comm.algorithms.collectives import Partition, ring_all_gather
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.comm.executors.small import SmallExchange
from ddp_hooks.comm.executors.stream_lane import StreamLane
from ddp_hooks.comm.executors.thread_lane import LIVENESS_TAG, SMALL_SUMS, LaneSettings, Part, ThreadLane, special_tag
from ddp_hooks.comm.executors.work import Work, WorkGroup
from ddp_hooks.comm.exit_handler import while_all_live
from ddp_hooks.comm.failure import FailureStore, LaneError, is_lost_connection, shortened
from ddp_hooks.comm.meeting import broadcast_object, call_named, gather_objects
from ddp_hooks.comm.nodes import Nodes
from ddp_hooks.comm.torch_compat.distributed import backend_of, default_store, destroy_group, new_group_like
from ddp_hooks.comm.validation import see

logger = logging.getLogger("ddp_hooks")

_SMALL = (1 << 9) + 1  # kind of exchange that nobody else has
_LONGEST_PAUSE_S = 0.1  # between two looks at streams that are to end
_EXPLAIN_S = 10.0  # for ranks to learn who died
_FAREWELL_S = 2.0  # for messages under way when an error ends this rank

Lane: TypeAlias = ThreadLane | StreamLane
"""Ordered stream of communication beside the training thread, with its own process group."""


class Lanes:
    """A number of lanes over the ranks of one group; gathers go to all of them, other work in turn.

    Every rank submits the same work in the same order; nothing else is needed for agreement. Creating and growing lanes
    is collective over ``group``.
    """

    failures: FailureStore  #: reports of ranks that failed

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_lanes: int,  # >= 1
        device: torch.device,  # of the tensors
        settings: LaneSettings,
        recorder: Recorder,
        backend: str | None = None,  # None: the one that the group uses for such a device
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.backend = backend or backend_of(group, device)
        self.native = self.backend == "nccl"
        self._device = device
        self._settings = settings
        self._recorder = recorder
        self._lanes: list[Lane] = []
        self._groups: list[dist.ProcessGroup] = []
        self._small: list[ThreadLane] = []  # a lane of its own for small sums, when there is the first
        self._small_numbers = itertools.count()
        self._submitted = 0
        self._ending: list[threading.Thread] = []
        self._stuck_streams = False
        # At exit, close() or abandon() come first.
        weakref.finalize(self, _end, self._lanes, self._small).atexit = False
        self.grow(num_lanes)

    def grow(self, num_lanes: int) -> None:
        """Add lanes until there are ``num_lanes``; collective."""
        for index in range(len(self), num_lanes):
            name = f"ddp_hooks lane {index}"
            make = partial(new_group_like, self.group, self.backend, self._settings.timeout_s, name)
            # A thread has a CUDA device of its own, which NCCL would take.
            group = make() if self.native else while_all_live(make, self.group, f"the making of {name}")
            self._groups.append(group)
            if index == 0:
                ranks = dist.get_process_group_ranks(group)
                store, messages = default_store(), group if self.backend == "gloo" else None
                self.failures = FailureStore(store, group.group_name, ranks[self.rank], ranks, messages)
            if self.native:
                self._lanes.append(StreamLane(group, self._device))
            else:
                self._lanes.append(ThreadLane(index, group, self._settings, self.failures, self._recorder))

    def __len__(self) -> int:
        return len(self._lanes)

    @property
    def node_size(self) -> int:
        """Ranks per node of collectives on two levels; 1: one level."""
        return self._settings.node_size

    @property
    def nodes(self) -> Nodes:
        """Place of this rank among the nodes of collectives on two levels."""
        return Nodes(self.world_size, self.rank, self._settings.node_size)

    @property
    def traffic(self) -> Traffic:
        """Totals of all lanes."""
        return sum((lane.traffic for lane in (*self._lanes, *self._small)), Traffic())

    def gather_objects(self, item: Any, what: str) -> list[Any]:
        """Return every rank's ``item``, as :func:`~ddp_hooks.comm.gather_objects` does; not for normal steps."""
        return gather_objects(item, self.group, what, self._settings)

    def broadcast_object(self, item: Any, what: str) -> Any:
        """Return the first rank's ``item`` on every rank; see :func:`~ddp_hooks.comm.broadcast_object`."""
        return broadcast_object(item, self.group, what, self._settings)

    def reduce_small(self, value: Tensor, what: str, largest: bool = False) -> Tensor:
        """Return the sum of ``value`` over the ranks, in their order, or its largest elements; collective.

        For a few numbers in a step, of the same shape and dtype on every rank, none NaN for ``largest``. On CPUs one
        round of P - 1 messages per rank, which do not queue behind other work. Raises as :meth:`gather_objects` does;
        ``what`` is the call as users know it, the same on every rank.
        """
        what = call_named(what)
        if self.world_size == 1:
            return value.clone()
        first = self._lanes[0]
        if isinstance(first, StreamLane):
            result = value.clone()
            first.all_reduce(result, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, what).wait()
            return result
        if not self._small:
            # Beside the first lane, on its connections: tags keep their messages apart.
            self._small.append(ThreadLane(SMALL_SUMS, self._groups[0], self._settings, self.failures, self._recorder))
        exchange = SmallExchange(value.detach().cpu(), what, self.rank, self.world_size)
        tag = special_tag(_SMALL, next(self._small_numbers))
        self._small[0].run(exchange.run(), what, tag=tag).wait()
        return exchange.result(dist.get_process_group_ranks(self.group), largest).to(value.device)

    def reduce_scatter(self, partitions: Sequence[Partition], label: str, divisor: int = 1) -> Work:
        """Sum every partition over the ranks and divide, in place. Rank r gets its range; the rest is undefined."""
        return self.next_lane().reduce_scatter(partitions, label, divisor)

    def all_gather(self, partitions: Sequence[Partition], label: str, after: Collection[Work] = ()) -> Work:
        """Copy rank r's range of every partition from rank r to all ranks, in place, once ``after`` is complete.

        On CPUs every lane moves some slices. So gathers end one after the other, as a forward needs them.
        """
        if self.native:
            return self.next_lane().all_gather(partitions, label, after)
        return self._spread(lambda lane, part: lane.all_gather(partitions, label, after, part))

    def spread_reduce_scatter(self, partition: Partition, label: str, divisor: int = 1) -> Work:
        """Reduce-scatter on all lanes, each of which moves some slices; for work that is waited for at once."""
        return self._spread(lambda lane, part: lane.reduce_scatter([partition], label, divisor, part))

    def run_in_turn(self, starts: Sequence[Callable[[], Algorithm]], label: str) -> Work:
        """Run any algorithms as the slices of one piece of work on the next lane; each is made when its turn comes."""
        lane = self.next_lane()
        if isinstance(lane, ThreadLane):
            return lane.run_several(starts, label)
        return lane.run((exchanges for start in starts for exchanges in start()), label)

    def _spread(self, submit: Callable[[ThreadLane, Part], Work]) -> Work:
        lanes = [lane for lane in self._lanes[: len(self)] if isinstance(lane, ThreadLane)]
        size, turn = len(lanes), self._submitted  # the next lane gets the first slice, which may be the only one
        self._submitted += 1
        return WorkGroup([submit(lane, ((index - turn) % size, size)) for index, lane in enumerate(lanes)])

    def run(self, algorithm: Algorithm, label: str, after: Collection[Work] = (), tag: int | None = None) -> Work:
        """Run any algorithm once ``after``, work of these lanes that was submitted before, is complete.

        A ``tag`` from :func:`special_tag` keeps its messages apart from all others, even where ranks differ in order.
        """
        return self.next_lane().run(algorithm, label, after, tag)

    def next_lane(self) -> Lane:
        """Return the next lane in turn, the same on every rank, for pieces of work that follow each other."""
        lane = self._lanes[self._submitted % len(self)]
        self._submitted += 1
        return lane

    def close(self, farewell_s: float = 10.0) -> None:
        """Finish the submitted work on all ranks and end the lanes; wait at most ``farewell_s`` for other ranks.

        Streams may take until ``timeout_s``. Where a rank died, or does not come, work on streams is cut short, because
        NCCL waits for the other side before it gives connections back.
        """
        deadline_s = time.monotonic() + farewell_s
        together = False
        if self._end_threads(deadline_s) and self._end_streams():
            # Through the store: a thread that waited in the backend for a rank that is late could not be woken.
            together = self.failures.exit_barrier(max(deadline_s, time.monotonic() + farewell_s / 2))
        self.failures.close()
        self._lanes.clear()
        self._small.clear()
        while self._groups:
            destroy_group(self._groups.pop(), abort=self.native and not together)

    def _end_streams(self) -> bool:
        """Wait for work on streams; return True if it ended. Without the ranks that died it does not."""
        streams = [lane for lane in self._lanes if isinstance(lane, StreamLane)]
        start_s, pause_s, warned = time.monotonic(), 0.0001, False
        while not all(lane.is_idle for lane in streams):
            waited_s = time.monotonic() - start_s
            failure = self.failures.first_failure() if pause_s >= _LONGEST_PAUSE_S else None
            if failure is not None or waited_s >= self._settings.timeout_s:
                self._stuck_streams = True
                hint = failure or self.failures.report_wait("close()")
                logger.error("close() cuts short what is under way after %.0f s: %s", waited_s, hint)
                return False
            if waited_s >= self._settings.stall_warning_s and not warned:
                warned = True
                logger.warning("waited %.0f s in close(): %s", waited_s, self.failures.report_wait("close()"))
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        if warned:
            self.failures.end_wait()
        return True

    def _explain(self, error: BaseException | None) -> str | None:
        """Return a sentence on the rank that was lost first, if ``error`` is a lost connection of another group."""
        lane = self._lanes[0] if self._lanes else None
        if not isinstance(lane, ThreadLane) or not is_lost_connection(error):
            return None
        tokens = [torch.zeros(1, dtype=torch.uint8) for _ in range(self.world_size)]
        # Neighbours of a dead rank know at once that it is dead, the others learn from them. Ranks may be at different
        # places of the lane's order: a tag of its own keeps the check apart.
        check = ring_all_gather(tokens, self.rank)
        work = lane.run(check, "a liveness check after a lost connection", tag=LIVENESS_TAG)
        deadline_s = time.monotonic() + _EXPLAIN_S
        failure = None
        while not work.done and failure is None and time.monotonic() < deadline_s:
            broken = work.error_within(0.25)
            if broken is not None:
                return str(broken)
            failure = self.failures.first_failure()
        failure = failure or self.failures.first_failure()
        return None if failure is None else f"{failure}{see('a-rank-died', quoted=failure)}"

    def annotate(self, error: BaseException | None, what: str) -> None:
        """Log the rank that was lost if ``error`` is a lost connection of ``what``, and note it on the error."""
        explanation = self._explain(error)
        if error is not None and explanation is not None:
            logger.error("%s lost a connection: %s", what, explanation)
            if sys.version_info >= (3, 11):
                error.add_note(explanation)

    def abandon(self, error: BaseException) -> None:
        """Report that this rank ends because of ``error``, and wait a little for messages under way.

        A thread that returned from the backend while the interpreter ends would abort the process.
        """
        explanation = self._explain(error)
        if explanation is not None:
            logger.error("this process ends with a lost connection: %s", explanation)
        elif not isinstance(error, LaneError):
            self.failures.report_self(shortened(f"{type(error).__name__}: {error}"))
        self._end_threads(time.monotonic() + _FAREWELL_S, unfinished=True)

    @property
    def stuck(self) -> bool:
        """True if a lane still waits for another rank, in the backend, after the lanes were told to end."""
        return self._stuck_streams or any(thread.is_alive() for thread in self._ending)

    def _end_threads(self, deadline_s: float, unfinished: bool = False) -> bool:
        """End the lanes' threads; return True if all of them ended in time."""
        self._ending = [thread for lane in (*self._lanes, *self._small) if (thread := lane.close(unfinished))]
        for thread in self._ending:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self.stuck


def _end(*lanes: Sequence[Lane]) -> None:
    """End the threads of lanes whose owner is gone without closing them, before the interpreter ends."""
    for lane in itertools.chain(*lanes):
        thread = lane.close()
        if thread is not None:
            atexit.register(thread.join, 10.0)
