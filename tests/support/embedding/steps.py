"""Loops with tables beside other hooks, and steps that an exception ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.intercept import co_optimizers
from tests.support.embedding.hooks import HOOKS, UnknownSGD
from tests.support.embedding.twins import Batch, Loop, Tables, Twins, batches


class TwoDense(Tables):
    """With dense parameters in two layers."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.other = nn.Parameter(torch.arange(6.0))

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) + (self.other * batch["dense"]).sum()


class Interruption(Exception):
    """Raised by a hook of a step, when tables have begun theirs."""


def interrupt(*_: Any) -> None:
    raise Interruption


def run(
    rank: int,
    world_size: int,
    loops: dict[str, Loop],
    hook: str | None,
    prefetch: bool,
    follows: str = "first",
    make: Callable[[int, int, int], list[Batch]] = batches,
    num_batches: int = 12,
) -> list[tuple[str, float]]:
    """How far apart twins are after each loop, with tables that follow the optimizer before or after the hook does."""
    found = []
    for name, loop in loops.items():
        states: list[Any] = []

        def wrap(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, states: list[Any] = states) -> None:
            assert hook is not None
            states.append(HOOKS[hook](ddp, optimizer))
            if follows == "last":
                (tables,) = co_optimizers.co_optimizers_in(ddp.module)
                tables.follow(optimizer)

        main = UnknownSGD if hook == "dear_whole_update" else torch.optim.SGD
        twins = Twins.of(world_size, "adagrad", model=TwoDense, wrap=wrap if hook is not None else None, main=main)
        assert twins.ours.tables is not None
        twins.train(loop, make(rank, world_size, num_batches), prefetch)
        for state in states:
            state.synchronize()
        found.append((name, max(twins.gap(), twins.optimizer_gap())))
        for state in states:
            state.close()
        twins.ours.tables.close()
    return found
