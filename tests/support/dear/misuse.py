"""A small model under DeAR, to misuse."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from tests.support.dear.twins import CONFIG, WholeNumbers, whole_batches


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def wrapped(world_size: int, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(WholeNumbers(world_size), **{"gradient_as_bucket_view": True, **options})


def trained(
    rank: int, world_size: int, num_steps: int = 3, config: DearConfig = CONFIG
) -> tuple[DistributedDataParallel, Any, DearState]:
    """A model after some steps under DeAR, with gathers still under way."""
    ddp = wrapped(world_size, bucket_cap_mb=0.05)
    optimizer = sgd(ddp)
    state = DearState(ddp, optimizer, config)
    ddp.register_comm_hook(state, dear_hook)
    for step in range(num_steps):
        optimizer.zero_grad()
        ddp(*whole_batches(rank, world_size, step)).backward()
        optimizer.step()
    return ddp, optimizer, state


class Wrapping(torch.optim.Optimizer):
    """As timm's Lookahead: it leaves out the constructor of torch's optimizers, and with it their hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)
