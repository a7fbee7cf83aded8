"""Optimizers over parameters with masters in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.support.dear.twins import CONFIG, Trainee

MASTERED = replace(CONFIG, master_dtype=torch.float32)


def adamw_over(parameters: list[Any]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 2e-4}]
    return torch.optim.AdamW(groups, lr=1e-4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return adamw_over(list(model.parameters()))


def with_masters(micro_batches: int, twin: Trainee, step: int) -> None:
    """The twin without DeAR keeps its masters by hand."""
    parameters = list(twin.ddp.parameters())
    if step == 0 and twin.state is None:
        twin.memory["masters"] = [p.detach().float().requires_grad_() for p in parameters]
        twin.memory["optimizer"] = adamw_over(twin.memory["masters"])
    twin.optimizer.zero_grad()
    twin.ddp.zero_grad()
    for micro_batch in range(micro_batches - 1):
        with twin.ddp.no_sync():
            twin.loss(100 + 10 * step + micro_batch).backward()
    twin.loss(step).backward()
    if twin.state is not None:
        twin.optimizer.step()
        return
    masters = twin.memory["masters"]
    for master, parameter in zip(masters, parameters, strict=True):
        assert parameter.grad is not None
        master.grad = parameter.grad.float()
    twin.memory["optimizer"].step()
    with torch.no_grad():
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.copy_(master)
