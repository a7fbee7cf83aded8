"""Collectives by name, requested in any order and from any thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    LaneError,
    Lanes,
    LaneSettings,
    LinkProfile,
    Recorder,
    Round,
    Span,
    ThreadWork,
    Work,
    agree,
    at_exit,
    mebibytes,
    profile_link,
    see,
)
from ddp_hooks.coordination.config import CoordinatorConfig
from ddp_hooks.coordination.control.channel import ControlChannel
from ddp_hooks.coordination.control.cycle_policy import CyclePolicy
from ddp_hooks.coordination.control.executor import all_gather_rows, all_to_all_rows, broadcast_tensor
from ddp_hooks.coordination.control.request_queue import Handle, RequestQueue
from ddp_hooks.coordination.control.submission import Agreement, PartialGroup, Submission
from ddp_hooks.coordination.control.thread import ControlThread
from ddp_hooks.coordination.grouping import group_by_name
from ddp_hooks.coordination.request import Operation, Request, spec_of
from ddp_hooks.coordination.stats import CoordinationStats

logger = logging.getLogger("ddp_hooks")

_REQUESTS_PER_ENTRY = 2  # kept requests per entry of the response cache; steps repeat them
_WORTH_S = 0.01  # of moving bytes: worth a cycle while no thread waits
_LOOK_S = 0.5  # between two looks at work of others
_MIB = 1 << 20


class Coordinator:
    """Collectives by name; each is done when all ranks have requested it, in any order, from any thread.

        coordinator = Coordinator()
        handle = coordinator.all_reduce(gradient, name="layer3.weight", mean=True)
        …
        handle.wait()

    Ranks agree once on the meaning of a name: operation, shape, type, root, group and priority. Later a bit says that a
    rank has made the request, until it requests something else under that name. A name may be used again when its
    request is done.

    All methods that return a :class:`Handle` raise ValueError if this rank's request is wrong or of a name that is not
    done, RuntimeError after :meth:`close`, and LaneError or LaneTimeout after a failure.

    Args:
        group: the ranks; None: all of them. Creating a coordinator is collective.
        config: settings.
        groups: names of tensors that travel together, by the name of the group. A group is requested when all its
            members are.

    Raises:
        ValueError: on every rank, if settings or groups differ.
        LaneError: ranks cannot connect.
        LaneTimeout: a rank did not come to connect.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        config: CoordinatorConfig | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.config = config if config is not None else CoordinatorConfig()
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise ValueError(f"torch.distributed is not initialised{see('set-up-is-refused')}")
        self.groups = {name: tuple(members) for name, members in (groups or {}).items()}
        entries = {"config": self.config, "groups": self.groups, "torch": torch.__version__}
        problem, self._group_of = None, dict[str, str]()
        try:
            self._group_of = group_by_name(self.groups)
        except ValueError as error:
            problem = str(error)
        if not isinstance(self.config, CoordinatorConfig):
            problem = f"config must be a CoordinatorConfig(...), got {type(config).__name__}"
        agree(entries, problem, group, "the set-up of Coordinator", config)
        self.recorder = Recorder(self.config.trace)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._requests: dict[Hashable, Request] = {}
        self._lanes, min_bytes = _make_lanes(group, self.config, self.recorder)
        self._set_up_traffic = self._lanes.traffic
        failures = self._lanes.failures
        try:
            self._channel = ControlChannel(group, self.config.timeout_s, failures)
        except LaneError as error:
            failures.report_self(str(error))
            self._lanes.abandon(error)
            raise
        policy = CyclePolicy(self.config.cycle_ms / 1000, min_bytes)
        self._queue = RequestQueue(policy, self._channel, self.config.timeout_s, self.config.stall_warning_s)
        self._control = ControlThread(self._queue, self._lanes, self._channel, self.config, self.recorder)
        self._handle = at_exit(self.close, self._abandon, self._is_stuck)
        self._control.thread.start()

    def all_reduce(self, tensor: Tensor, name: str, mean: bool = False, priority: int = 0) -> Handle:
        """Sum ``tensor``, of the same shape and type on all ranks, in place.

        ``mean`` divides the sum by the number of ranks, including ranks that have joined. Of agreed requests that have
        not left, the largest ``priority`` leaves first, the same on all ranks; see ``CoordinatorConfig(credit_mb=…)``.
        A member of one of :attr:`groups` travels with its group.
        """
        group = self._group_of.get(name)
        if group is not None:
            return self._add_to_group(group, name, tensor, mean, priority)
        return self._ask("all_reduce", name, [(name, tensor)], mean=mean, priority=priority)

    def grouped_all_reduce(
        self, tensors: Sequence[Tensor], names: Sequence[str], name: str, mean: bool = False, priority: int = 0
    ) -> Handle:
        """All-reduce tensors of one type as one request, ``name``; the handle returns the first of them."""
        named = list(zip(names, tensors, strict=True))
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) != 1:
            raise ValueError(f"{name}: a group has tensors of one type, got {dtypes or 'none'}")
        return self._ask("all_reduce", name, named, mean=mean, priority=priority, grouped=True)

    def broadcast(self, tensor: Tensor, name: str, root: int = 0, priority: int = 0) -> Handle:
        """Copy the contiguous ``tensor`` of rank ``root`` of the group to all ranks, in place."""
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: broadcast takes a contiguous tensor, got strides {tensor.stride()}")
        if not 0 <= root < self.world_size:
            raise ValueError(f"{name}: root must be a rank below {self.world_size}, got {root}")
        algorithm = broadcast_tensor(tensor, self.rank, self.world_size, root)
        return self._ask("broadcast", name, [(name, tensor)], algorithm=algorithm, root=root, priority=priority)

    def all_gather(self, tensor: Tensor, name: str, priority: int = 0) -> Handle:
        """Gather the rows of all ranks, (n, …), to (sum of n, …); n may differ by rank."""
        if not tensor.dim():
            raise ValueError(f"{name}: all_gather takes rows, got a number: pass tensor.view(1)")
        algorithm = all_gather_rows(tensor.contiguous(), self.rank, self.world_size)
        return self._ask("all_gather", name, [(name, tensor)], algorithm=algorithm, priority=priority)

    def reduce_scatter(self, tensor: Tensor, name: str, mean: bool = False, priority: int = 0) -> Handle:
        """Sum (P * n, …) over all ranks, and return n rows of it to each; ``tensor`` stays as it is."""
        if tensor.dim() == 0 or tensor.shape[0] % self.world_size:
            raise ValueError(
                f"{name}: reduce_scatter takes rows that divide by {self.world_size} ranks, got {tuple(tensor.shape)}"
            )
        return self._ask("reduce_scatter", name, [(name, tensor)], mean=mean, priority=priority)

    def all_to_all(self, tensor: Tensor, name: str, splits: Sequence[int] | None = None, priority: int = 0) -> Handle:
        """Send every rank its rows of ``tensor``, and return the rows for this rank, in the order of ranks.

        ``tensor``, (sum of splits, …), begins with ``splits[0]`` rows for rank 0; ``splits=None``: equal numbers.
        """
        rows = tensor.shape[0] if tensor.dim() else 0
        chosen = list(splits) if splits is not None else [rows // self.world_size] * self.world_size
        if len(chosen) != self.world_size or sum(chosen) != rows or min(chosen) < 0 or not tensor.dim():
            raise ValueError(
                f"{name}: splits must be {self.world_size} numbers of rows that add up to {rows}, got {chosen}"
            )
        algorithm = all_to_all_rows(tensor.contiguous(), chosen, self.rank, self.world_size)
        return self._ask("all_to_all", name, [(name, tensor)], algorithm=algorithm, priority=priority)

    def exchange(
        self, algorithm: Algorithm, name: str, priority: int = 0, after: Sequence[Work | Handle] = ()
    ) -> Handle:
        """Run an algorithm of your own, :data:`ddp_hooks.comm.Algorithm`, when all ranks have requested theirs.

        The request is made when the work ``after`` of this rank is done.
        """
        if not all(hasattr(each, "done") for each in after):
            raise ValueError(f"{name}: after takes handles and work of lanes, got {list(after)}")
        return self._ask("exchange", name, [], priority=priority, algorithm=algorithm, after=after)

    def any(self, flags: Tensor, name: str, priority: int = 0) -> Handle:
        """Return for each of the ``flags``, (n,), if it is set on any rank; takes a bit per flag, and no lane."""
        if flags.dim() != 1:
            raise ValueError(f"{name}: any takes flags in one row, (n,), got {tuple(flags.shape)}")
        bits = sum(1 << index for index, flag in enumerate(flags.tolist()) if flag)
        return self._ask("any", name, [(name, flags)], priority=priority, flags=bits)

    def join(self) -> None:
        """Stand in with zeros for all-reduces of other ranks until all ranks have joined: this rank has no more data.

        Raises:
            RuntimeError: after :meth:`close`, or if another thread of this rank has joined.
            LaneError: another rank died, or a request timed out.
        """
        with self._queue.changed:
            self._queue.raise_if_ended()
            if self._queue.joined is not None:
                raise RuntimeError(f"this rank has joined already, on another thread{see('a-rank-is-missing')}")
            agreement = self._queue.joined = Agreement("join()")
            self._queue.notify()
        self._queue.wait_for(agreement, math.inf)

    def stats(self) -> CoordinationStats:
        """Return totals of this rank so far."""
        control, moved = self._channel.traffic, self._lanes.traffic - self._set_up_traffic
        with self._queue.changed:
            return replace(
                self._control.stats,
                message_sizes=dict(self._control.stats.message_sizes),
                control_bytes=control.sent_bytes,
                control_messages=self._channel.num_sent,
                sent_bytes=moved.sent_bytes,
                received_bytes=moved.received_bytes,
            )

    def timeline(self) -> list[Span]:
        """Return spans of waits and moves, in order of start; needs ``CoordinatorConfig(trace=True)``."""
        return self.recorder.snapshot()

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish all requests, and end; collective.

        Waits at most ``timeout_s`` for ranks that do not close, or do not make this rank's pending requests, which
        then fail.
        """
        deadline_s, queue = time.monotonic() + timeout_s, self._queue
        with queue.changed:
            if queue.closing:
                return
            queue.closing = True
            queue.notify(is_urgent=True)
            # A pending request is done when other ranks make it, or fails because they close, too.
            queue.changed.wait_for(lambda: not queue.has_unsent or queue.error is not None, timeout_s)
            names = [*queue.pending, *queue.blocked]
        self._control.thread.join(max(0.0, deadline_s - time.monotonic()))
        lacking = f" after {timeout_s:g} s; other ranks have not asked for {', '.join(names[:5])}" if names else ""
        if names and queue.error is None:
            logger.error("close() gives up%s", lacking)
        queue.fail(LaneError(f"this coordinator was closed{lacking}{see('the-state-was-closed')}"))
        self._end_control(timeout_s)
        self._lanes.close(timeout_s)
        if not self._is_stuck():
            self._handle.remove()

    def _ask(
        self,
        operation: Operation,
        name: str,
        named: Sequence[tuple[str, Tensor]],
        flags: int = 0,
        algorithm: Generator[Round, None, Tensor | None] | None = None,
        after: Sequence[Work | Handle] = (),
        **settings: Any,
    ) -> Handle:
        request = self._request(operation, name, named, **settings)
        tensors, followed = [tensor for _, tensor in named], [self._followed(work) for work in after if not work.done]
        with self._queue.changed:
            self._queue.refuse(name)
            now_s = time.perf_counter()
            submission = Submission(request, tensors, Agreement(name), now_s, now_s, flags, algorithm, followed)
            self._queue.submit(submission)
        return Handle(self._queue, submission.agreement, lambda: submission.output)

    def _followed(self, work: Work | Handle) -> Agreement:
        """Return an agreement that is decided when ``work`` is done."""
        if isinstance(work, Handle) and work.queue is self._queue:
            return work.agreement
        agreement = Agreement(work.label)

        def wait() -> None:
            error: Exception | None = None
            try:
                if isinstance(work, ThreadWork):  # its wait() would report that this rank waits
                    while not work.done and error is None:
                        error = work.error_within(_LOOK_S)
                else:
                    work.wait()
            except Exception as failure:
                error = failure
            agreement.decide(error=error)
            self._channel.wake()

        # Work of others calls nobody when it is done.
        threading.Thread(target=wait, name=f"ddp_hooks wait for {work.label}", daemon=True).start()
        return agreement

    def _request(
        self,
        operation: Operation,
        name: str,
        named: Sequence[tuple[str, Tensor]],
        mean: bool = False,
        root: int = -1,
        priority: int = 0,
        grouped: bool = False,
    ) -> Request:
        """Return the request for other ranks: a kept one if there is, as equal requests are found by identity."""
        if not isinstance(name, str):
            raise TypeError(f"names are texts, got {name!r}")
        for member, tensor in named:
            if not isinstance(member, str):
                raise TypeError(f"names are texts, got {member!r}")
            if not tensor.is_cpu:
                raise ValueError(
                    f"{name}: tensors are coordinated on CPUs only so far, got one on {tensor.device}: use "
                    f"DistributedDataParallel there"
                )
        key = (name, operation, mean, root, priority, grouped, *((n, t.shape, t.dtype) for n, t in named))
        if (known := self._requests.get(key)) is not None:
            return known
        if mean and not all(tensor.is_floating_point() or tensor.is_complex() for _, tensor in named):
            raise ValueError(f"{name}: means are of floating-point numbers, got {named[0][1].dtype}")
        if len(self._requests) >= _REQUESTS_PER_ENTRY * self.config.capacity + 32:
            self._requests.clear()
        specs = tuple(spec_of(n, tensor, operation) for n, tensor in named)
        # JSON takes Python's numbers only.
        self._requests[key] = Request(name, operation, specs, bool(mean), int(root), int(priority), grouped)
        return self._requests[key]

    def _add_to_group(self, group: str, name: str, tensor: Tensor, mean: bool, priority: int) -> Handle:
        self._request("all_reduce", name, [(name, tensor)], mean, priority=priority)  # raises if it is wrong
        queue, kind = self._queue, f"mean={bool(mean)}, priority={int(priority)}, {tensor.dtype}"
        with queue.changed:
            if group in queue.partial_groups:
                queue.raise_if_ended()
            else:
                queue.refuse(group)
                queue.begin_group(PartialGroup(self.groups[group], Agreement(group), kind, time.perf_counter()))
            partial = queue.partial_groups[group]
            partial.add(name, tensor, kind)
            if len(partial.members) == len(partial.names):
                del queue.partial_groups[group]
                named = [(member, partial.members[member]) for member in partial.names]
                request = self._request("all_reduce", group, named, mean, priority=priority, grouped=True)
                tensors, now_s = [tensor for _, tensor in named], time.perf_counter()
                queue.submit(Submission(request, tensors, partial.agreement, partial.began_s, now_s))
        return Handle(queue, partial.agreement, lambda: tensor)

    def _abandon(self, error: BaseException) -> None:
        self._lanes.abandon(error)
        text = f"{type(error).__name__}: {error}"
        self._queue.fail(LaneError(f"this rank ends: {text}{see('a-rank-died', quoted=error)}"))
        self._control.thread.join(2.0)
        self._end_control(2.0)

    def _end_control(self, timeout_s: float) -> None:
        if self._control.thread.is_alive():
            self._channel.abort()
            self._control.thread.join(timeout_s)
        if not self._control.thread.is_alive():
            self._channel.close()

    def _is_stuck(self) -> bool:
        return self._lanes.stuck or self._control.thread.is_alive()


def _make_lanes(group: dist.ProcessGroup, config: CoordinatorConfig, recorder: Recorder) -> tuple[Lanes, int]:
    """Make lanes; return them, and the bytes that are worth a cycle while no thread waits."""
    settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
    lanes = Lanes(group, 1, torch.device("cpu"), settings, recorder)
    is_measured = config.lanes is None or config.slice_mb is None
    link = profile_link(lanes) if is_measured else LinkProfile(None, 1, _MIB)
    settings.slice_bytes = link.message_bytes if config.slice_mb is None else mebibytes(config.slice_mb)
    lanes.grow(config.lanes or link.num_lanes)
    min_bytes = settings.slice_bytes if link.goodput_bytes_s is None else int(link.goodput_bytes_s * _WORTH_S)
    return lanes, min(min_bytes, _MIB)
