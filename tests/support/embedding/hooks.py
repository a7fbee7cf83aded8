"""Communication hooks beside which tables are tested, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, TopKConfig, TopKState, dear_hook, topk_hook
from tests.support.dear.twins import CONFIG as DEAR_CONFIG

Hook: TypeAlias = Callable[[DistributedDataParallel, torch.optim.Optimizer], Any]  # makes its state, and registers


class UnknownSGD(torch.optim.SGD):
    """Of which nobody knows whether it looks at parameters one by one."""


def beside_dear(**settings: Any) -> Hook:
    def hook(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> DearState:
        state = DearState(ddp, optimizer, replace(DEAR_CONFIG, **settings))
        ddp.register_comm_hook(state, dear_hook)
        return state

    return hook


def beside_topk(pipeline: Literal["forward", "backward"]) -> Hook:
    def hook(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> TopKState:
        config = TopKConfig(density=1.0, timeout_s=20, pipeline=pipeline)
        state = TopKState(ddp, config, optimizer=optimizer if pipeline == "forward" else None)
        ddp.register_comm_hook(state, topk_hook)
        return state

    return hook


HOOKS: dict[str, Hook] = {
    "dear": beside_dear(),
    "dear_inspecting": beside_dear(max_grad_norm=1e9, on_nonfinite="skip"),
    "dear_replicated": beside_dear(update="replicated"),
    "dear_replicated_inspecting": beside_dear(update="replicated", max_grad_norm=1e9, on_nonfinite="skip"),
    "dear_whole_update": beside_dear(update="replicated"),  # of UnknownSGD
    "topk": beside_topk("backward"),
    "topk_forward": beside_topk("forward"),
}
