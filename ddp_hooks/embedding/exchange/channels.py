"""Channels of sharded tables: one lane for urgent exchanges, one for delayed rows, and their cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Algorithm, Lanes, LaneSettings, Recorder, Stall, Work, gather_objects, special_tag
from ddp_hooks.comm.executors.small import SmallExchange
from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.stats import Kind, Tally
from ddp_hooks.embedding.table import Table

_KINDS = get_args(Kind)
_NAMES_PER_TABLE = 4  # names of one kind that a coordinator knows; fewer are in flight
# Priorities with a coordinator, whose gradients have priority 0.
_DELAYED, _URGENT = -1, 1


class Exchanger(Protocol):
    """Part of :class:`ddp_hooks.coordination.Coordinator` that tables use."""

    def exchange(self, algorithm: Algorithm, name: str, priority: int = 0, after: Sequence[Any] = ()) -> Any:
        """Run the algorithm when all ranks have asked for theirs; return a handle to wait for."""


class Channels:
    """Runs the exchanges of tables, each kind in its lane, in the order of submission; creation is collective."""

    def __init__(self, group: dist.ProcessGroup, config: TableConfig, tables: Sequence[Table]) -> None:
        self.group = group
        self.config = config
        self.tally = Tally()
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.recorder = Recorder(False)
        self.lanes: list[Lanes] = []
        self._counts: dict[Kind, int] = defaultdict(int)
        self._open(tables[0].weight.device)

    def _open(self, device: torch.device) -> None:
        settings = LaneSettings(timeout_s=self.config.timeout_s, stall_warning_s=self.config.stall_warning_s)
        self.urgent = Lanes(self.group, 1, device, settings, self.recorder)
        self.patient = Lanes(self.group, 1, device, settings, self.recorder)
        self.lanes = [self.urgent, self.patient]
        self._control = self.urgent  # for numbers that the host needs
        if device.type != "cpu":
            self._control = Lanes(self.group, 1, torch.device("cpu"), settings, self.recorder, backend="gloo")
            self.lanes.append(self._control)

    def run(self, kind: Kind, algorithm: Algorithm, label: str, after: Sequence[Work] = ()) -> Work:
        """Submit an exchange that begins when the work in ``after`` is done."""
        # Each kind has its own tags: ranks that submit different kinds time out, instead of exchanging wrong data.
        lanes = {"id": self._control, "delayed": self.patient}.get(kind, self.urgent)
        tag = special_tag(_KINDS.index(kind), self._counts[kind])
        self._counts[kind] += 1
        return lanes.run(self.tally.counted(kind, algorithm), label, after, tag)

    def reduce_small(self, value: Tensor, what: str, largest: bool = False) -> Tensor:
        return self.urgent.reduce_small(value, what, largest)

    def meet(self) -> None:
        """Wait until every rank has made the same call; errors name the calls."""
        gather_objects(None, self.group, "an exchange of whole tables", self.config)

    def wait(self, work: Work, stall: Stall) -> None:
        with nullcontext() if work.done else stall.measure(self.recorder, work.label):
            work.wait()

    def close(self) -> None:
        for lanes in self.lanes:
            lanes.close()

    def abandon(self, error: BaseException) -> None:
        for lanes in self.lanes:
            lanes.abandon(error)

    def is_stuck(self) -> bool:
        return any(lanes.stuck for lanes in self.lanes)


class CoordinatedChannels(Channels):
    """Exchanges through a coordinator, by priority: urgent ones before gradients, delayed rows after them."""

    def __init__(
        self, group: dist.ProcessGroup, config: TableConfig, tables: Sequence[Table], coordinator: Exchanger
    ) -> None:
        self._coordinator = coordinator
        self._name = tables[0].name  # distinguishes these tables from other users of the coordinator
        self._num_names = _NAMES_PER_TABLE * max(4, len(tables))
        self._requested: dict[str, Any] = {}
        super().__init__(group, config, tables)

    def _open(self, device: torch.device) -> None:
        pass  # the coordinator has lanes

    def run(self, kind: Kind, algorithm: Algorithm, label: str, after: Sequence[Work] = ()) -> Any:
        name = f"{kind} {self._counts[kind] % self._num_names} of {self._name}"
        self._counts[kind] += 1
        if name in self._requested:
            self._requested[name].wait()  # a name can be used again when its exchange is done
        priority = _DELAYED if kind == "delayed" else _URGENT
        handle = self._coordinator.exchange(self.tally.counted(kind, algorithm), name, priority, after)
        self._requested[name] = handle
        return handle

    def reduce_small(self, value: Tensor, what: str, largest: bool = False) -> Tensor:
        small = SmallExchange(value.cpu(), what, self.rank, self.world_size)
        self._coordinator.exchange(small.run(), f"{what} of {self._name}", _URGENT).wait()
        return small.result(self.ranks, largest).to(value.device)

    def close(self) -> None:
        while self._requested:
            self._requested.popitem()[1].wait()
