"""Named collectives in any order, from any thread: ranks agree what is next, and everybody does the same.

What is asked for lies on a :class:`~ddp_hooks.coordination.desk.Desk`, from which a thread of its own takes it; see
:mod:`ddp_hooks.coordination.control`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable, Mapping, Sequence
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
    Span,
    Work,
    agree,
    at_exit,
    mebibytes,
    profile_link,
    see,
)
from ddp_hooks.comm.control import ControlChannel
from ddp_hooks.coordination.config import CoordinatorConfig
from ddp_hooks.coordination.control import ControlThread
from ddp_hooks.coordination.desk import Begun, Desk
from ddp_hooks.coordination.execution import Submission
from ddp_hooks.coordination.handle import Agreement, Handle
from ddp_hooks.coordination.request import Operation, Request, spec_of
from ddp_hooks.coordination.stats import CoordinationStats

logger = logging.getLogger("ddp_hooks")

_KNOWN = 2  # times the cache's capacity, and a few: requests that are kept, as they are the same in every step
_WORTH_S = 0.01  # of moving what was agreed upon, for which it is worth agreeing while nobody waits
_MIB = 1 << 20
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
        agree(entries, problem, group, "the set-up of Coordinator", config)
        self.recorder = Recorder(self.config.trace)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self._group_of = {member: name for name, members in self.groups.items() for member in members}
        self._known: dict[Hashable, Request] = {}
        device = torch.device(device)
        self._lanes, worth_bytes = _make_lanes(group, self.config, device, self.recorder)
        assert self._lanes.witness is not None, "on CPUs there is one"
        try:
            self._channel = ControlChannel(group, self.config.timeout_s, self._lanes.witness)
        except LaneError as error:
            self._lanes.witness.report_self(str(error))
            self._lanes.abandon(error)
            raise
        self._desk = Desk(self.config, self.groups, self._channel.wake, worth_bytes)
        self._control = ControlThread(self._desk, self._lanes, self._channel, self.config, device, self.recorder)
        self._before = self._lanes.traffic  # what measuring the link has moved
        self._handle = at_exit(self.close, self._abandon, self._is_stuck)
        self._control.start()

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
        with self._desk.changed:
            self._desk.raise_if_ended()
            if self._desk.joined is not None:
                raise RuntimeError(f"this rank has joined already, on another thread{see('a-rank-is-missing')}")
            agreement = self._desk.joined = self._new_agreement(JOIN, timeout_s=None)
            self._desk.tell()
        agreement.wait()

    def stats(self) -> CoordinationStats:
        """Totals so far, on this rank."""
        control, moved = self._channel.traffic, self._lanes.traffic - self._before
        with self._desk.changed:
            return replace(
                self._control.stats,
                message_sizes=dict(self._control.stats.message_sizes),
                control_bytes=control.sent_bytes,
                control_messages=self._channel.num_sent,
                sent_bytes=moved.sent_bytes,
                received_bytes=moved.received_bytes,
            )

    def timeline(self) -> list[Span]:
        """What was waited for and moved, in order of start; needs ``CoordinatorConfig(trace=True)``."""
        return self.recorder.snapshot()

    def close(self, farewell_s: float = 10.0) -> None:
        """Finish what was asked for, and end; collective.

        Waits at most ``farewell_s`` for ranks that do not close, or do not ask for what is pending here; that fails.
        """
        deadline_s = time.monotonic() + farewell_s
        with self._desk.changed:
            if self._desk.closing:
                return
            self._desk.closing = True
            self._desk.tell(is_urgent=True)
            # What is pending is done when others ask for it, or fails because they close, too.
            self._desk.changed.wait_for(lambda: not self._desk.is_awaiting or self._desk.error is not None, farewell_s)
            names = self._desk.awaited
        ended = self._control.ended.wait(max(0.0, deadline_s - time.monotonic()))
        # Those that still wait for something shall know why.
        lacking = f" after {farewell_s:g} s; other ranks have not asked for {', '.join(names[:5])}" if names else ""
        if names and self._desk.error is None:
            logger.error("close() gives up%s", lacking)
        self._desk.fail(LaneError(f"this coordinator was closed{lacking}{see('the-state-was-closed')}"))
        if not ended:
            self._channel.let_go()
        self._control.join(farewell_s)
        self._lanes.close(farewell_s)
        self._close_channel()
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
        desk = self._desk
        with desk.changed:
            desk.raise_if_ended()
            desk.refuse_twice(name)
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
            desk.ask(submission, after)
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
        if len(self._known) >= _KNOWN * self.config.capacity + 32:
            self._known.clear()
        self._known[key] = request
        return request

    def _add_to_group(self, group: str, name: str, tensor: Tensor, mean: bool, priority: int) -> Handle:
        self._request(name, "all_reduce", [(name, tensor)], mean, priority=priority)  # to be refused by itself
        desk = self._desk
        with desk.changed:
            desk.raise_if_ended()
            if group not in desk.begun:
                desk.refuse_twice(group)
                agreement = self._new_agreement(group)
                desk.begin(group, Begun({}, agreement, mean, priority, tensor.dtype, time.perf_counter()))
            begun = desk.begun[group]
            if name in begun.members:
                raise ValueError(f"{name} was asked for already, and {group} is not complete: wait for it first")
            if (mean, priority, tensor.dtype) != (begun.mean, begun.priority, begun.dtype):
                raise ValueError(
                    f"{name} was asked for with mean={mean}, priority={priority}, {tensor.dtype}, and others of "
                    f"{group} with mean={begun.mean}, priority={begun.priority}, {begun.dtype}: a group has one of each"
                )
            begun.members[name] = tensor
            if len(begun.members) == len(self.groups[group]):
                self._complete(group, desk.begun.pop(group))
        return Handle(begun.agreement, lambda: tensor)

    def _complete(self, group: str, begun: Begun) -> None:
        named = [(name, begun.members[name]) for name in self.groups[group]]
        request = self._request(group, "all_reduce", named, begun.mean, priority=begun.priority, grouped=True)
        tensors, asked_s = [tensor for _, tensor in named], time.perf_counter()
        self._desk.ask(Submission(request, tensors, begun.agreement, began_s=begun.began_s, asked_s=asked_s))

    def _new_agreement(self, name: str, timeout_s: float | None = -1.0) -> Agreement:
        config = self.config
        return Agreement(
            name,
            self._channel.witness,
            self._channel.describe,
            self._desk.fail,
            self._desk.being_waited_for,
            config.timeout_s if timeout_s == -1.0 else timeout_s,
            config.stall_warning_s,
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    def _abandon(self, error: BaseException) -> None:
        self._lanes.abandon(error)
        self._desk.fail(LaneError(f"this rank ends: {type(error).__name__}: {error}{see('a-rank-died', quoted=error)}"))
        self._control.join(2.0)
        self._close_channel()

    def _close_channel(self) -> None:
        if self._control.is_alive:
            self._channel.let_go()
            self._control.join(2.0)
        if not self._control.is_alive:
            self._channel.close()

    def _is_stuck(self) -> bool:
        return self._lanes.stuck or self._control.is_alive


def _result_of(submission: Submission) -> Tensor:
    if submission.result is not None:
        result: Tensor = submission.result[0]
        return result
    return submission.tensors[0] if submission.tensors else torch.empty(0)


def _make_lanes(
    group: dist.ProcessGroup, config: CoordinatorConfig, device: torch.device, recorder: Recorder
) -> tuple[Lanes, int]:
    """And the bytes that keep the link busy for :data:`_WORTH_S`, or are one message of its."""
    settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
    lanes = Lanes(group, 1, device, settings, recorder)
    link = LinkProfile(None, 1, _MIB)
    if config.lanes is None or config.slice_mb is None:
        link = profile_link(lanes)
    settings.slice_bytes = link.message_bytes if config.slice_mb is None else mebibytes(config.slice_mb)
    lanes.grow(config.lanes or link.num_lanes)
    worth_bytes = settings.slice_bytes if link.goodput_bytes_s is None else int(link.goodput_bytes_s * _WORTH_S)
    return lanes, min(worth_bytes, _MIB)


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
