"""State that the communication objects of one model share: settings, lanes, memory and counters."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist

from ddp_hooks.comm import (
    LaneError,
    Lanes,
    LaneSettings,
    LinkProfile,
    Recorder,
    Stall,
    Traffic,
    mebibytes,
    profile_link,
)
from fsdp_ext.config import ExtConfig
from fsdp_ext.deferred import PendingReductions
from fsdp_ext.memory import Pool


@dataclass(frozen=True)
class ExtStats:
    """Totals on this rank since :func:`~fsdp_ext.extend`, of the groups that lanes serve; 0 on NCCL, which has its own.

    Args:
        gathers, reduce_scatters: collectives that were submitted.
        deferred: reduce-scatters that ended with the backward, instead of being waited for one by one.
        early: reduce-scatters that were waited for, and had begun before FSDP2 asked for them.
        sent_bytes, received_bytes: payload of all messages.
        comm_s: seconds in which lanes were at work, added over lanes.
        gather_stall_s: seconds that forwards and backwards waited for parameters.
        reduce_scatter_stall_s: seconds that backwards waited for gradients.
    """

    gathers: int = 0
    reduce_scatters: int = 0
    deferred: int = 0
    early: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    comm_s: float = 0.0
    gather_stall_s: float = 0.0
    reduce_scatter_stall_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """Seconds in which the training thread waited for communication."""
        return self.gather_stall_s + self.reduce_scatter_stall_s


@dataclass
class Counts:
    """Collectives so far; see :class:`ExtStats`."""

    gathers: int = 0
    reduce_scatters: int = 0
    deferred: int = 0
    early: int = 0


class GradOrder:
    """Order in which gradients of modules become ready; one for all modules of a model."""

    def __init__(self) -> None:
        self._last: object = None
        self._count = 0

    def turn_of(self, module: object) -> int:
        """Return the number of the module's turn, which begins now unless the last gradient was the module's, too."""
        if self._last is not module:
            self._last = module
            self._count += 1
        return self._count


class Transport:
    """Lanes over one group of ranks, on a CPU backend: gathers and reduce-scatters do not wait for each other.

    Args:
        group: the ranks. Creating a transport is collective over them: one short measurement, and new groups.
        config: lanes and sizes of messages.
        recorder: where lanes note spans.
    """

    def __init__(self, group: dist.ProcessGroup, config: ExtConfig, recorder: Recorder) -> None:
        settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
        self.group = group
        self.world_size = dist.get_world_size(group)
        self._recorder, self._settings = recorder, settings
        self._lanes: list[Lanes] = []
        self.gathers, self.scatters = (self._add_lanes(1, settings) for _ in range(2))
        self.link = LinkProfile(None, 1, 1 << 20)
        if config.lanes is None or config.slice_mb is None:
            self.link = profile_link(self.gathers)
        self.message_bytes = self.link.message_bytes if config.slice_mb is None else mebibytes(config.slice_mb)
        """Largest message of a gather."""
        settings.slice_bytes = self.message_bytes
        # Elements per slice of an encoded tensor: with int8 a message is then about as large as others.
        self.slice_numel = max(1, self.message_bytes // config.block_numel) * config.block_numel
        for lanes in self._lanes:
            lanes.grow(config.lanes or self.link.num_lanes)

    @cached_property
    def tagged_scatters(self) -> Lanes:
        """Lanes whose messages meet by label, not by order; made, collectively, at the first use."""
        return self._add_lanes(len(self.scatters), replace(self._settings, tag_by_label=True))

    @property
    def traffic(self) -> Traffic:
        """Totals of all lanes."""
        return sum((lanes.traffic for lanes in self._lanes), Traffic())

    @property
    def is_stuck(self) -> bool:
        """True if a thread still waits for another rank after the lanes were told to end."""
        return any(lanes.stuck for lanes in self._lanes)

    def close(self) -> None:
        """Finish submitted work, and end the lanes; collective."""
        for lanes in self._lanes:
            lanes.close()

    def abandon(self, error: BaseException) -> None:
        """Tell other ranks that this rank ends because of ``error``."""
        for lanes in self._lanes:
            lanes.abandon(error)

    def _add_lanes(self, number: int, settings: LaneSettings) -> Lanes:
        lanes = Lanes(self.group, number, torch.device("cpu"), settings, self._recorder)
        self._lanes.append(lanes)
        return lanes


class ExtContext:
    """Everything that the communication objects of one model share.

    Args:
        config: settings of the extension.
    """

    def __init__(self, config: ExtConfig) -> None:
        self.config = config
        self.counts = Counts()
        self.recorder = Recorder(config.trace)
        self.gather_stall, self.scatter_stall = Stall(), Stall()
        self.backward_waits: dict[str, float] = defaultdict(float)
        """Seconds that backwards have waited for whole parameters, by module."""
        limit_bytes = None if config.pending_mb is None else mebibytes(config.pending_mb)
        self.pending = PendingReductions(limit_bytes, self.scatter_stall, self.recorder)
        self.pool = Pool()
        self.grad_order = GradOrder()
        self.averages_replicas = False
        """True once FSDP2 was seen to leave its all-reduce to the extension; the same on all ranks."""
        self.is_closing = False
        self._transports: dict[tuple[int, ...], Transport] = {}

    def transport_of(self, group: dist.ProcessGroup) -> Transport:
        """Return the lanes of these ranks; made, collectively, at their first collective."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._transports:
            self._transports[ranks] = Transport(group, self.config, self.recorder)
        return self._transports[ranks]

    @property
    def transports(self) -> list[Transport]:
        """All lanes that were made."""
        return list(self._transports.values())

    def ignored_failures(self) -> contextlib.AbstractContextManager[None]:
        """Suppress failures of gathers that end only to be dropped."""
        return contextlib.suppress(LaneError) if self.is_closing else contextlib.nullcontext()

    def stats(self) -> ExtStats:
        """Return the totals so far."""
        traffic = sum((transport.traffic for transport in self.transports), Traffic())
        return ExtStats(
            **vars(self.counts),
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=traffic.busy_s,
            gather_stall_s=self.gather_stall.seconds,
            reduce_scatter_stall_s=self.scatter_stall.seconds,
        )
