"""Loops that clip gradients, scale them, or meet gradients that are not finite."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ddp_hooks import GradScaler
from tests.support.dear.twins import CONFIG, Trainee, compare
from tests.support.devices import rank_device
from tests.support.models import MODELS, TOLERANCE
from tests.support.workers import WorkerPools


def clip_norm(norm_type: float, max_norm: float, twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if twin.state is not None:
        total = twin.state.clip_grad_norm_(max_norm, norm_type)
    else:
        total = nn.utils.clip_grad_norm_(twin.ddp.parameters(), max_norm, norm_type)
    twin.losses.append(float(total))
    twin.optimizer.step()


def clip_value(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if twin.state is not None:
        twin.state.clip_grad_value_(1e-3)
    else:
        nn.utils.clip_grad_value_(twin.ddp.parameters(), 1e-3)
    twin.optimizer.step()


def clip_then_think_again(twin: Trainee, step: int) -> None:
    """Between clipping and the step gradients are zeroed, dropped, or added to."""
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if twin.state is not None:
        twin.state.clip_grad_norm_(0.01)
    else:
        nn.utils.clip_grad_norm_(twin.ddp.parameters(), 0.01)
    if step % 6 == 1:
        twin.optimizer.zero_grad()
    elif step % 6 == 2:
        twin.ddp.zero_grad()
    elif step % 6 == 3:
        twin.ddp.zero_grad(set_to_none=False)
    elif step % 6 == 4:
        twin.loss(step + 100).backward()
    twin.optimizer.step()


def clip_while_accumulating(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    for micro_batch in range(3):
        if micro_batch < 2:
            with twin.ddp.no_sync():
                twin.loss(10 * step + micro_batch).backward()
        else:
            twin.loss(10 * step + micro_batch).backward()
    if twin.state is not None:
        twin.state.clip_grad_norm_(0.02)
    else:
        nn.utils.clip_grad_norm_(twin.ddp.parameters(), 0.02)
    twin.optimizer.step()


def clip_by_setting(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if twin.state is None:
        total = nn.utils.clip_grad_norm_(twin.ddp.parameters(), 0.05)
    twin.optimizer.step()
    twin.losses.append(float(total) if twin.state is None else twin.state.stats().grad_norm or math.nan)


def check(workers: WorkerPools, world_size: int, name: str, loop: Any, **changes: Any) -> None:
    model, batches, optimizer = MODELS[name]
    run = partial(compare, config=replace(CONFIG, **changes))
    for outcome in workers(world_size).run(run, model, batches, optimizer, loop, 8):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome
        assert outcome.loss_drop != 0


BAD_STEPS = {2: math.inf, 3: math.nan, 6: -math.inf}


def spoilt_on_one_rank(twin: Trainee, step: int) -> None:
    """Now and then one rank has a bad loss; plain DDP leaves such steps out by hand."""
    twin.optimizer.zero_grad()
    loss = twin.loss(step)
    if step in BAD_STEPS and torch.distributed.get_rank() == step % torch.distributed.get_world_size():
        loss = loss * BAD_STEPS[step]
    loss.backward()
    if twin.state is None:
        gradients = [p.grad for p in twin.ddp.parameters() if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return
    twin.optimizer.step()
    if twin.state is not None:
        assert twin.state.stats().skipped_steps == sum(bad <= step for bad in BAD_STEPS)


class Half(nn.Module):
    """An encoder under autocast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(rank_device().type, dtype=self.dtype):
            return (self.layers(values.float()) - 1).float().square().mean()


def half(dtype: torch.dtype, world_size: int) -> nn.Module:
    return Half(dtype)


def momentum_sgd(fused: bool, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=fused)


def scaled(clip: bool, twin: Trainee, step: int) -> None:
    """As in torch's own examples; now and then a gradient overflows on one rank, which the scaler must deal with."""
    if step == 0:
        kind = torch.amp.GradScaler if twin.state is None else GradScaler
        twin.memory["scaler"] = kind(rank_device().type, init_scale=256.0, growth_interval=3)
    scaler = twin.memory["scaler"]
    twin.optimizer.zero_grad()
    loss = twin.loss(step)
    if step in BAD_STEPS and torch.distributed.get_rank() == step % torch.distributed.get_world_size():
        loss = loss * BAD_STEPS[step]
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(twin.optimizer)
        if twin.state is not None:
            twin.state.clip_grad_norm_(0.5)
        else:
            nn.utils.clip_grad_norm_(twin.ddp.parameters(), 0.5)
    scaler.step(twin.optimizer)
    scaler.update()
    twin.losses.append(scaler.get_scale())
