"""Optimizers and loops that give the bits of plain DDP."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.dear import twins
from tests.support.dear.twins import WholeNumbers

NUM_STEPS = 7  # each loop repeats itself after six steps at most
LOOPS = [
    twins.zero_grad_to_zeros,
    twins.zero_grad_on_model_to_zeros,
    twins.zero_grad_before_step,
    twins.replaced_gradients,
    twins.zero_grad_after_step,
    twins.zero_grad_on_model_only,
    twins.idle_forwards,
    twins.zero_grad_after_forward,
    twins.zero_model_grad_after_forward,
    twins.zero_model_grad_to_zeros_after_forward,
    twins.never_zero_grad,
    twins.skipped_step,
    twins.skipped_by_model,
    twins.two_backwards,
    twins.two_backwards_then_discard_first,
    twins.accumulate,
    twins.accumulate_then_discard,
    twins.closure,
    twins.double_forward,
    twins.evaluate_between,
    twins.evaluate_on_one_rank,
    twins.evaluate_before_step,
    twins.save_and_load,
    twins.average,
    twins.change_fusion,
]


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    # Powers of two keep the weights exact for some steps; bit-equality holds with or without.
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.25)


def adamw_two_groups(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05)


def foreach_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, foreach=True, amsgrad=True)


def in_bfloat16(world_size: int) -> nn.Module:
    return WholeNumbers(world_size).bfloat16()
