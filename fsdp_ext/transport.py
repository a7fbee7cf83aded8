"""The lanes that carry a process group's gathers and reduce-scatters: apart, so that neither waits for the other."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist

from ddp_hooks.comm import Lanes, LaneSettings, LinkProfile, Recorder, Traffic, mebibytes, profile_link
from fsdp_ext.config import ExtConfig


class Transport:
    """Sets of lanes over one group of ranks, on a CPU backend.

    Args:
        group: the ranks. Creating a transport is collective over them: one short measurement, and new groups.
        config: lanes and sizes of messages.
        device: where the tensors are.
        recorder: where lanes note spans.
    """

    def __init__(self, group: dist.ProcessGroup, config: ExtConfig, device: torch.device, recorder: Recorder) -> None:
        settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
        self.group = group
        self.world_size = dist.get_world_size(group)
        self._recorder, self._device, self._settings = recorder, device, settings
        self.gathers = Lanes(group, 1, device, settings, recorder)
        self.scatters = Lanes(group, 1, device, settings, recorder)
        self.link = LinkProfile(None, 1, 1 << 20)
        if config.lanes is None or config.slice_mb is None:
            self.link = profile_link(self.gathers)
        self.message_bytes = self.link.message_bytes if config.slice_mb is None else mebibytes(config.slice_mb)
        """Of gathers the largest."""
        settings.slice_bytes = self.message_bytes
        # Of encoded tensors, elements per slice: with int8 a message is then about as large as others.
        self.slice_numel = max(1, self.message_bytes // config.block_numel) * config.block_numel
        self._lanes = [self.gathers, self.scatters]
        for lanes in self._lanes:
            lanes.grow(config.lanes or self.link.num_lanes)

    @cached_property
    def early(self) -> Lanes:
        """For what begins on every rank when it can; made, collectively, when it is needed first."""
        settings = replace(self._settings, tag_by_label=True)
        lanes = Lanes(self.group, len(self.scatters), self._device, settings, self._recorder)
        self._lanes.append(lanes)
        return lanes

    @property
    def traffic(self) -> Traffic:
        """The totals of all lanes."""
        return sum((lanes.traffic for lanes in self._lanes), Traffic())

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still waits for another rank after the lanes were told to end."""
        return any(lanes.stuck for lanes in self._lanes)

    def close(self) -> None:
        """Finish what was submitted, and end the lanes; collective."""
        for lanes in self._lanes:
            lanes.close()

    def abandon(self, error: BaseException) -> None:
        """This rank ends because of ``error``."""
        for lanes in self._lanes:
            lanes.abandon(error)


def equal_bounds(numel: int, world_size: int) -> tuple[int, ...]:
    """FSDP2 pads, so that all ranges are of one length."""
    return tuple(numel // world_size * rank for rank in range(world_size + 1))
