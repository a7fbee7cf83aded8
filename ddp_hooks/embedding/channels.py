"""What tables talk through: one lane for what is urgent, one for what can wait, and what they cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import get_args

import torch
import torch.distributed as dist

from ddp_hooks.comm import Algorithm, Lanes, LaneSettings, Recorder, Stall, Work, special_tag
from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.stats import Kind, Tally

_KINDS = get_args(Kind)


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
        self.tally = Tally()
        self.ranks = dist.get_process_group_ranks(group)
        self.recorder = Recorder(False)
        self._counts: dict[Kind, int] = defaultdict(int)
        settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
        self.urgent = Lanes(group, 1, device, settings, self.recorder)
        self.patient = Lanes(group, 1, device, settings, self.recorder)
        self._control = self.urgent  # for numbers that the host needs
        if device.type != "cpu":
            self._control = Lanes(group, 1, torch.device("cpu"), settings, self.recorder, backend="gloo")
        self.rank, self.world_size = self.urgent.rank, self.urgent.world_size

    @property
    def lanes(self) -> list[Lanes]:
        """All of them."""
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
