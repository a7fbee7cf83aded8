"""A search of the tuner with real clocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_ext import TuneConfig, restore, shard_by_size, tune
from tests.support.devices import rank_device
from tests.support.fsdp_ext.twins import CONFIG, WholeNumbers


def grouped(model: nn.Module, block_mb: float, **options: Any) -> nn.Module:
    return shard_by_size(model, list(model.get_submodule("blocks").children()), block_mb, **options)


def tuned_for_real(rank: int, world_size: int, profile: str, first_mb: float = 1.0) -> dict[str, Any]:
    def build(block_mb: float) -> nn.Module:
        torch.manual_seed(3)
        return grouped(WholeNumbers(world_size).to(rank_device()), block_mb, first_mb=first_mb)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(7 + rank).backward()

    tuner = TuneConfig(
        block_mb=(0.001, 0.05), prefetch=(1, 2), max_trials=3, dropped_steps=2, steps_per_trial=1, profile=profile
    )
    found = tune(build, step, CONFIG, tuner)
    model = build(found.block_mb)
    extension = found.apply(model)
    before = [value.full_tensor().clone() for value in model.parameters()]  # type: ignore[attr-defined]
    step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    changed = any(
        not torch.equal(a, b.full_tensor())  # type: ignore[attr-defined]
        for a, b in zip(before, model.parameters(), strict=True)
    )
    restore(model)
    return {"found": found, "extended": extension is not None, "changed": changed}
