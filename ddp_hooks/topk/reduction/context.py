"""Context: settings, model and lanes that all parts of one state share."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import Lanes, LaneSettings, Recorder, Stall, Work
from ddp_hooks.comm.torch_compat.ddp import managed_parameters
from ddp_hooks.topk.config import TopKConfig


@dataclass
class Context:
    config: TopKConfig
    ddp: DistributedDataParallel  # a weak proxy: the collector does not see that DDP's reducer holds the hook's state
    parameters: list[torch.nn.Parameter]  # reduced by DDP, in a fixed order
    names: list[str]  # of the parameters
    numels: list[int]  # of the parameters
    lanes: Lanes  # groups are reduced here
    early: Lanes | None  # ranks exchange their flags here before any group is reduced; None: on ``lanes``, afterwards
    recorder: Recorder
    stall: Stall = field(default_factory=Stall)  # time that training has waited for the lanes

    @staticmethod
    def open(ddp: DistributedDataParallel, config: TopKConfig, group: dist.ProcessGroup) -> Context:
        """Create the lanes; collective."""
        managed, recorder = managed_parameters(ddp), Recorder(False)
        parameters = list(managed.values())
        settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
        lanes = Lanes(group, config.lanes, parameters[0].device, settings, recorder)
        early = None
        if config.pipeline == "forward" and lanes.world_size > 1:
            early = Lanes(group, 1, parameters[0].device, settings, recorder)
        numels = [parameter.numel() for parameter in parameters]
        proxy = cast(DistributedDataParallel, weakref.proxy(ddp))
        return Context(config, proxy, parameters, list(managed), numels, lanes, early, recorder)

    def wait(self, work: Work) -> None:
        if not work.done:
            with self.stall.measure(self.recorder, work.label):
                work.wait()

    def abandon(self, error: BaseException) -> None:
        for lanes in self._all_lanes:
            lanes.abandon(error)

    def is_stuck(self) -> bool:
        return any(lanes.stuck for lanes in self._all_lanes)

    def close(self) -> None:
        """End the lanes; collective."""
        for lanes in self._all_lanes:
            lanes.close()

    @property
    def _all_lanes(self) -> list[Lanes]:
        return [self.lanes] if self.early is None else [self.lanes, self.early]
