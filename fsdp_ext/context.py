"""State that the communication objects of one model share: settings, lanes, memory and counters."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Lanes, LaneSettings, LinkProfile, Recorder, Stall, mebibytes, profile_link
from fsdp_ext.config import ExtConfig
from fsdp_ext.deferred import PendingReductions

_MIB = 1 << 20
_POOL_BYTES = 64 * _MIB


@dataclass
class ExtStats:
    """Totals on this rank since :func:`~fsdp_ext.extend`, of the groups that lanes serve; 0 on NCCL, which has its own.

    Args:
        gathers, reduce_scatters: collectives that were submitted.
        all_reduces: over replicas (HSDP), that were submitted.
        deferred: reduce-scatters that ended with the backward, instead of being waited for one by one.
        early: reduce-scatters that were waited for, and had begun before FSDP2 asked for them.
        sent_bytes, received_bytes: payload of all messages.
        comm_s: seconds in which lanes were at work, added over lanes.
        gather_stall_s: seconds that forwards and backwards waited for parameters.
        reduce_scatter_stall_s: seconds that backwards waited for gradients.
    """

    gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0
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


class Pool:
    """Memory on the CPU that comes back when the last tensor that uses it is gone; some of it is kept for later use.

    FSDP2 allocates memory for every collective and frees it soon. Large blocks come from the kernel, which clears each
    page first: with BERT-base on four ranks that costs an eighth of all processor time.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Any]] = defaultdict(list)  # MiB -> arrays of bytes
        self._free_bytes = 0
        self._lock = threading.RLock()  # memory comes back on any thread, also while this one takes some

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes < _MIB:  # allocated quickly
            return torch.empty(numel, dtype=dtype)
        num_mib = -(-nbytes // _MIB)
        with self._lock:
            free = self._free[num_mib]
            self._free_bytes -= num_mib * _MIB if free else 0
            block = free.pop() if free else torch.empty(num_mib * _MIB, dtype=torch.uint8).numpy()
        lent = block[:nbytes]  # an array of its own, which the memory of tensors keeps alive
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype)

    def _give_back(self, block: Any) -> None:
        with self._lock:
            if self._free_bytes + block.nbytes <= _POOL_BYTES:
                self._free[block.nbytes // _MIB].append(block)
                self._free_bytes += block.nbytes


class Transport:
    """Lanes over one group of ranks, on a CPU backend; creating them is collective, with one short measurement."""

    def __init__(self, group: dist.ProcessGroup, config: ExtConfig, recorder: Recorder) -> None:
        settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
        self._group, self._settings, self._recorder = group, settings, recorder
        self.lanes: list[Lanes] = []
        self.gathers, self.scatters = (self._add_lanes(1, settings) for _ in range(2))
        link = LinkProfile(None, 1, _MIB)
        if config.lanes is None or config.slice_mb is None:
            link = profile_link(self.gathers)
        self.goodput_bytes_s = link.goodput_bytes_s
        self.message_bytes = link.message_bytes if config.slice_mb is None else mebibytes(config.slice_mb)
        settings.slice_bytes = self.message_bytes
        for lanes in self.lanes:
            lanes.grow(config.lanes or link.num_lanes)

    @cached_property
    def tagged_scatters(self) -> Lanes:
        """Lanes whose messages meet by label, not by order; made, collectively, at the first use."""
        return self._add_lanes(len(self.scatters), replace(self._settings, tag_by_label=True))

    def _add_lanes(self, number: int, settings: LaneSettings) -> Lanes:
        self.lanes.append(Lanes(self._group, number, torch.device("cpu"), settings, self._recorder))
        return self.lanes[-1]


class ExtContext:
    def __init__(self, config: ExtConfig) -> None:
        self.config = config
        self.counts = ExtStats()  # collectives only
        self.recorder = Recorder(config.trace)
        self.gather_stall, self.scatter_stall = Stall(), Stall()
        limit_bytes = None if config.pending_mb is None else mebibytes(config.pending_mb)
        self.pending = PendingReductions(limit_bytes, self.scatter_stall, self.recorder)
        self.pool = Pool()
        self.transports: dict[tuple[int, ...], Transport] = {}  # by ranks
        self.averages_replicas = False
        """True once FSDP2 was seen to leave its all-reduce to the extension; the same on all ranks."""
        self.is_advised = False
        """True once a message told how to leave out all-reduces over replicas."""
        self.is_closing = False
        self._num_turns = 0
        self._last_owner: object = None  # of a gradient that was ready

    def transport_of(self, group: dist.ProcessGroup) -> Transport:
        """Return the lanes of these ranks; made, collectively, at their first collective."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self.transports:
            self.transports[ranks] = Transport(group, self.config, self.recorder)
        return self.transports[ranks]

    def lanes(self) -> list[Lanes]:
        return [lanes for transport in self.transports.values() for lanes in transport.lanes]

    def turn_of(self, owner: object) -> int:
        """Return the number of the owner's turn, which begins now unless the last gradient was the owner's, too."""
        if self._last_owner is not owner:
            self._last_owner = owner
            self._num_turns += 1
        return self._num_turns
