"""Loops that fail in a micro-batch, or leave parameters unused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fsdp_ext import ExtConfig
from tests.support.fsdp_ext.twins import (
    CONFIG,
    Stopped,
    WholeNumbers,
    on_both,
    same,
    shard,
    shards,
)

needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot go on after an exception"
)
needs_unused = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch reduces no zeros for unused ones"
)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise Stopped


def failing_micro_batch(
    rank: int, world_size: int, zero: bool | None, foreach: bool, config: ExtConfig = CONFIG
) -> bool:
    """The first backward of a step fails, the second one does not; gradients may be set to None or zeros between."""

    def run(model: Any) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, foreach=foreach)
        for step in range(6):
            optimizer.zero_grad()
            if step % 2:
                if step > 2:
                    model(1000 * step + 55 + rank).backward()
                handle = model.blocks[2].register_forward_hook(lambda module, given, total: Failing.apply(total))
                with pytest.raises(Stopped):
                    model(1000 * step + 77 + rank).backward()
                handle.remove()
                model.reset_iter_state()
                if zero is not None:
                    optimizer.zero_grad(set_to_none=not zero)
            model(1000 * step + rank).backward()
            optimizer.step()
        return shards(model)

    return same(*on_both(lambda: shard(WholeNumbers(world_size)), run, config))
