"""What tables talk through: one lane for what is urgent, one for what can wait, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Algorithm, Lanes, LaneSettings, Recorder, Stall, Work, gather_objects, special_tag
from ddp_hooks.comm.executors.small import SmallExchange
from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.stats import Kind, Tally

_KINDS = get_args(Kind)
_NAMES_PER_TABLE = 4  # of requests of one kind that a coordinator knows; fewer are under way
_CAN_WAIT = -1
"""The priority of delayed rows with a coordinator: below that of gradients, 0."""
_IS_WAITED_FOR = 1
"""And of all else: above it."""


class Exchanger(Protocol):
    """What of :class:`ddp_hooks.coordination.Coordinator` tables need."""

    def exchange(self, algorithm: Algorithm, name: str, priority: int = 0, after: Sequence[Any] = ()) -> Any:
        """Run the algorithm when all ranks have asked for theirs; returns what is waited for."""


class Channels:
    """Runs the exchanges of tables, each kind in its lane, in the order in which they are submitted.

    Args:
        group: the ranks. Creating the lanes is collective over it.
        device: of the tables.
        config: timeouts.

    Attributes:
        rank, world_size: of the group.
        ranks: its global ranks.
        tally: bytes and waits so far.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, config: TableConfig) -> None:
        self.group = group
        self.config = config
        self.tally = Tally()
        self.ranks = dist.get_process_group_ranks(group)
        self.recorder = Recorder(False)
        self._counts: dict[Kind, int] = defaultdict(int)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._open(device, LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s))

    def _open(self, device: torch.device, settings: LaneSettings) -> None:
        self.urgent = Lanes(self.group, 1, device, settings, self.recorder)
        self.patient = Lanes(self.group, 1, device, settings, self.recorder)
        self._control = self.urgent  # for numbers that the host needs
        if device.type != "cpu":
            self._control = Lanes(self.group, 1, torch.device("cpu"), settings, self.recorder, backend="gloo")

    @property
    def lanes(self) -> list[Lanes]:
        """Of its own, all of them."""
        return list(dict.fromkeys((self.urgent, self.patient, self._control)))

    def run(self, kind: Kind, algorithm: Algorithm, label: str, after: Sequence[Work] = ()) -> Work:
        """Submit an exchange, to begin when other work is done.

        Kinds never meet: where ranks have parted, messages of another kind would be taken for theirs, or end the
        process. So they wait, and say for what.
        """
        lanes = {"id": self._control, "order": self._control, "delayed": self.patient}.get(kind, self.urgent)
        tag = special_tag(_KINDS.index(kind), self._counts[kind])
        self._counts[kind] += 1
        return lanes.run(self.tally.counted(kind, algorithm), label, after, tag)

    def reduce_small(self, value: Tensor, what: str, largest: bool = False) -> Tensor:
        """A few numbers' sum over the ranks, or their largest; see :meth:`ddp_hooks.comm.Lanes.reduce_small`."""
        return self.urgent.reduce_small(value, what, largest)

    def meet(self) -> None:
        """Wait until every rank has come here, in the same call: see :func:`ddp_hooks.comm.calling`.

        Before an exchange of whole tables. A lane that waits knows of a message that is missing, not of the call.
        """
        gather_objects(None, self.group, "an exchange of whole tables", self.config)

    def run_now(self, algorithm: Algorithm, label: str) -> None:
        """Exchange whole tables, and wait."""
        self.run("columns", algorithm, label).wait()

    def wait(self, work: Work, stall: Stall) -> None:
        """Wait for an exchange, and count how long."""
        if work.done:
            work.wait()
            return
        with stall.measure(self.recorder, work.label):
            work.wait()

    def annotate(self, error: BaseException | None) -> None:
        """Say who was lost first, if that is what the error is about."""
        for lanes in self.lanes:
            lanes.annotate(error, "forward")

    def close(self) -> None:
        """Finish what was submitted, and end."""
        for lanes in self.lanes:
            lanes.close()

    def abandon(self, error: BaseException) -> None:
        """This rank ends because of ``error``."""
        for lanes in self.lanes:
            lanes.abandon(error)

    def is_stuck(self) -> bool:
        """Whether a lane still waits for another rank after it was told to end."""
        return any(lanes.stuck for lanes in self.lanes)


@dataclass
class _Asked:
    """An exchange that a coordinator was asked for."""

    label: str
    handle: Any

    @property
    def done(self) -> bool:
        return bool(self.handle.done)

    def wait(self) -> None:
        self.handle.wait()


class CoordinatedChannels(Channels):
    """Exchanges through a coordinator, by priority among all that it moves: what is waited for before gradients, what
    was delayed after them.

    Args:
        group, device, config: see :class:`Channels`.
        coordinator: of the same ranks.
        name: tells these tables from others of the coordinator.
        num_tables: how many they are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        config: TableConfig,
        coordinator: Exchanger,
        name: str,
        num_tables: int,
    ) -> None:
        self._coordinator = coordinator
        self._name = name
        self._num_names = _NAMES_PER_TABLE * max(4, num_tables)
        self._asked: dict[str, _Asked] = {}
        super().__init__(group, device, config)

    def _open(self, device: torch.device, settings: LaneSettings) -> None:
        """Lanes are the coordinator's."""

    @property
    def lanes(self) -> list[Lanes]:
        return []

    def run(self, kind: Kind, algorithm: Algorithm, label: str, after: Sequence[Work] = ()) -> Work:
        """Ask for an exchange, when other work is done."""
        name = f"{kind} {self._counts[kind] % self._num_names} of {self._name}"
        self._counts[kind] += 1
        if name in self._asked:
            self._asked[name].wait()  # a name can be used again when it is done
        priority = _CAN_WAIT if kind == "delayed" else _IS_WAITED_FOR
        handles = [work.handle if isinstance(work, _Asked) else work for work in after]
        handle = self._coordinator.exchange(self.tally.counted(kind, algorithm), name, priority, handles)
        self._asked[name] = asked = _Asked(label, handle)
        return asked

    def reduce_small(self, value: Tensor, what: str, largest: bool = False) -> Tensor:
        """Through the coordinator, of which its ``what`` is the name."""
        small = SmallExchange(value.cpu(), what, self.rank, self.world_size)
        self._coordinator.exchange(small.run(), f"{what} of {self._name}", _IS_WAITED_FOR).wait()
        return small.result(self.ranks, largest).to(value.device)

    def close(self) -> None:
        """Finish what was asked for; the coordinator goes on."""
        while self._asked:
            self._asked.popitem()[1].wait()
