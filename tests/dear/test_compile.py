"""torch.compile: the whole module or blocks of it, before or after wrapping; correct, and not compiled anew each step.

Prevents: pre-hooks that a compiled graph skips, so that a layer reads parameters that are still under way, and
recompilation in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.dear.test_models import MODELS, TOLERANCE, rows
from tests.dear.twins import Trainee, compare
from tests.workers import WorkerPools

BACKEND = "aot_eager"  # the machinery of torch.compile without a C++ compiler


class Blocks(nn.Module):
    """Some blocks that may be compiled one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 12)) for _ in range(4)
        )

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = values + block(values)
        return values.square().mean()


def blocks(compiled: bool, world_size: int) -> nn.Module:
    model = Blocks().double()
    if compiled:
        for block in model.blocks:
            block.compile(backend=BACKEND)
    return model


def compiled_before(world_size: int) -> nn.Module:
    model: nn.Module = torch.compile(Blocks().double(), backend=BACKEND)  # type: ignore[assignment]
    return model




def plain(twin: Trainee, step: int) -> None:
    count_compilations(twin, step)
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    twin.optimizer.step()


def compiled_after(twin: Trainee, step: int) -> None:
    """``torch.compile(ddp)``, as Accelerate and Trainer do it."""
    count_compilations(twin, step)
    if step == 0:
        twin.memory["compiled"] = torch.compile(twin.ddp, backend=BACKEND)
    twin.optimizer.zero_grad()
    loss = twin.memory["compiled"](*twin.batch(step))
    twin.losses.append(float(loss.detach()))
    loss.backward()
    twin.optimizer.step()


def count_compilations(twin: Trainee, step: int) -> None:
    """After the first steps, in which shapes and orders are learned, nothing may be compiled anew."""
    if step == 0 and twin.state is not None:
        torch._dynamo.reset()
    if step == 4:
        twin.memory["frames"] = torch._dynamo.utils.counters["frames"]["total"]
    if step == 9:
        assert torch._dynamo.utils.counters["frames"]["total"] == twin.memory["frames"], "compiled anew in every step"


CASES: dict[str, tuple[Callable[[int], nn.Module], Callable[[Trainee, int], None]]] = {
    "blocks": (partial(blocks, True), plain),
    "before wrapping": (compiled_before, plain),
    "after wrapping": (partial(blocks, False), compiled_after),
}


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_compiled_models(workers: WorkerPools, world_size: int, case: str) -> None:
    model, loop = CASES[case]
    run = partial(compare, ddp_options={"bucket_cap_mb": 1})
    for outcome in workers(world_size).run(run, model, partial(rows, 12), MODELS["encoder"][2], loop, 10):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome
        assert outcome.loss_drop > 0
        assert outcome.stats.forward_stall_s >= 0
