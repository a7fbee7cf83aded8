"""Training under FSDP2 until a rank dies."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddp_hooks import LaneError
from fsdp_ext import ExtConfig, Extension, compat, extend
from tests.support.fsdp_ext.twins import CONFIG, WholeNumbers, momentum_sgd, shard


def trained(rank: int, world_size: int, num_steps: int, config: ExtConfig = CONFIG) -> tuple[nn.Module, Any, Extension]:
    torch.manual_seed(7)
    model = shard(WholeNumbers(world_size))
    extension = extend(model, config)
    optimizer = momentum_sgd(model)
    train(model, optimizer, rank, range(num_steps))
    return model, optimizer, extension


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(1000 * step + rank).backward()
        optimizer.step()


def communication(model: nn.Module) -> list[str]:
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [type(each).__name__ for module in modules for each in compat.communication_of(module) or ()]


def _die(gradient: torch.Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_somebody_dies(rank: int, world_size: int, victim: int, phase: str, config: ExtConfig = CONFIG) -> str:
    model, optimizer, _ = trained(rank, world_size, 2, config)
    try:
        for step in range(1000):
            dying = rank == victim and step == 4
            optimizer.zero_grad()
            if dying and phase == "in forward":
                block: Any = model.get_submodule("blocks.2")
                block.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            if dying and phase == "before a block's backward":
                block = model.get_submodule("blocks.1")
                block.register_forward_hook(lambda *given: given[-1].register_hook(_die) and None)
            loss = model(1000 * step + rank)
            if dying and phase == "in backward":
                loss.register_hook(_die)
            loss.backward()
            if dying and phase == "before step":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
    except LaneError as error:
        return str(error)
    return "nobody noticed"
