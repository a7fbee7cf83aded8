"""Models with compiled blocks, and counts of their compilations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.dear.twins import Trainee

BACKEND = "aot_eager"  # the machinery of torch.compile without a C++ compiler


class Block(nn.Module):
    """Has a forward of its own: ``compile()`` of an ``nn.Sequential`` compiles nothing in torch 2.11."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 12))

    def forward(self, values: Tensor) -> Tensor:
        return values + self.layers(values)


class Blocks(nn.Module):
    """Some blocks that may be compiled one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values.square().mean()


def blocks(world_size: int) -> nn.Module:
    return Blocks().double()


def compiled_blocks(twin: Trainee, step: int) -> None:
    """Blocks are compiled here, because a copy of a compiled module is not compiled."""
    if step == 0:
        for block in twin.ddp.module.blocks:
            block.compile(backend=BACKEND)
    plain(twin, step)


def plain(twin: Trainee, step: int) -> None:
    count_compilations(twin, step)
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    twin.optimizer.step()


def count_compilations(twin: Trainee, step: int) -> None:
    """After the first steps, in which shapes and orders are learned, nothing may be compiled anew."""
    if step == 0 and twin.state is not None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    if step == 4:
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
        twin.memory["frames"] = torch._dynamo.utils.counters["frames"]["total"]
    if step == 9:
        assert torch._dynamo.utils.counters["frames"]["total"] == twin.memory["frames"], "compiled anew in every step"
