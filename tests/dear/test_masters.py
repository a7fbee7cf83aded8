"""Models in bfloat16 whose shards are kept and updated in float32.

Prevents: updates that are rounded away, masters that go stale when parameters are written or loaded, and checkpoints
that forget what rounding has hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from tests.support.dear import twins
from tests.support.dear.loops import in_bfloat16, momentum_sgd
from tests.support.dear.masters import MASTERED, adamw, with_masters
from tests.support.dear.twins import CONFIG, compare, whole_batches
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


@pytest.mark.quick("1-2", "3-3")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_as_with_masters_by_hand(workers: WorkerPools, world_size: int, micro_batches: int) -> None:
    run = partial(compare, config=MASTERED, ddp_options={"bucket_cap_mb": 0.02})
    loop = partial(with_masters, micro_batches)
    for outcome in workers(world_size).run(run, in_bfloat16, whole_batches, adamw, loop, 12):
        assert outcome.bitwise and outcome.num_buckets > 1, outcome


@pytest.mark.parametrize("config", [
    replace(MASTERED, reduce_dtype=torch.float32),
    replace(MASTERED, max_grad_norm=1e9, on_nonfinite="skip"),
    replace(MASTERED, check_replicas=True, overlap_forward=False),
], ids=["float32-sums", "inspected", "checked"])  # fmt: skip
def test_settings_change_nothing(workers: WorkerPools, config: DearConfig) -> None:
    run = partial(compare, config=config)
    for outcome in workers(3).run(run, in_bfloat16, whole_batches, adamw, partial(with_masters, 1), 6):
        assert outcome.bitwise, outcome


def test_float32_models_need_none(workers: WorkerPools) -> None:
    run = partial(compare, config=MASTERED)
    for outcome in workers(2).run(run, twins.WholeNumbers, whole_batches, momentum_sgd, twins.plain, 6):
        assert outcome.bitwise, outcome


class Line(nn.Module):
    """One weight of 256: in bfloat16 the next smaller number is 255."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((50,), 256.0, dtype=torch.bfloat16))

    def forward(self) -> Tensor:
        return self.weight.float().sum()


def line(config: DearConfig) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DearState]:
    ddp = DistributedDataParallel(Line(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    state = DearState(ddp, optimizer, config)
    ddp.register_comm_hook(state, dear_hook)
    return ddp, optimizer, state


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        ddp().backward()
        optimizer.step()


def small_steps(rank: int, world_size: int, config: DearConfig) -> list[float]:
    """The weight after 16 small steps, after it was written and 16 more, and after it was loaded and 16 more."""
    ddp, optimizer, state = line(config)
    weights = []
    for change in (None, "write", "load"):
        state.synchronize()
        if change == "write":
            with torch.no_grad():
                ddp.module.weight.fill_(128.0)
        if change == "load":
            ddp.module.load_state_dict({"weight": torch.full((50,), 64.0)})
        train(ddp, optimizer, 16)
        state.synchronize()
        weights.append(float(ddp.module.weight.detach().float().mean()))
    state.close()
    return weights


def test_small_steps_add_up(workers: WorkerPools) -> None:
    assert workers(2).run(small_steps, MASTERED) == [[254.0, 126.0, 62.0]] * 2
    assert workers(2).run(small_steps, CONFIG)[0][0] == 256.0, "the test shows nothing: rounding does not matter here"


def resume(rank: int, world_size: int, folder: str, sharded: bool, steps_before_loading: int) -> list[float]:
    """Stop and save where rounding hides half a unit; go on in a new model; and load the same into plain DDP."""
    ddp, optimizer, state = line(MASTERED)
    train(ddp, optimizer, 3)
    if sharded:
        dcp.save({"model": ddp.state_dict(), "optimizer": state.sharded_optimizer_state_dict()}, checkpoint_id=folder)
    else:
        saved = ddp.module.state_dict(), state.full_optimizer_state_dict()
        torch.save(saved, f"{folder}-{rank}")
    state.close()

    ddp, optimizer, state = line(MASTERED)
    train(ddp, optimizer, steps_before_loading)
    if sharded:
        content = {"model": ddp.state_dict()}
        dcp.load(content, checkpoint_id=folder)
        ddp.load_state_dict(content["model"])
        state.load_sharded_optimizer(folder)
    else:
        model, saved_optimizer = torch.load(f"{folder}-{rank}", weights_only=True)
        optimizer.load_state_dict(saved_optimizer)  # before the model, as some do
        ddp.module.load_state_dict(model)
    train(ddp, optimizer, 10)
    state.synchronize()
    weights = [float(ddp.module.weight.detach().float().mean())]
    state.close()
    if not sharded:
        plain = torch.optim.SGD(Line().parameters(), lr=1.0)
        plain.load_state_dict(saved_optimizer)
        weights.append(plain.param_groups[0]["lr"])
    return weights


@pytest.mark.parametrize("steps_before_loading", [0, 2])
@pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])
def test_resume(workers: WorkerPools, tmp_path: Path, sharded: bool, steps_before_loading: int) -> None:
    for weight, *lr in workers(2).run(resume, str(tmp_path / "saved"), sharded, steps_before_loading):
        assert weight == 254.0, "the masters were rounded: 254.375 is 254, what is left of the rounded ones is 255"
        assert lr in ([], [0.125])


def refused(rank: int, world_size: int, config: DearConfig, optimizer: Callable[..., Any]) -> str:
    ddp = DistributedDataParallel(Line(), gradient_as_bucket_view=True)
    return message_of(lambda: DearState(ddp, optimizer(ddp), config))


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def test_only_with_sharded_updates(workers: WorkerPools) -> None:
    for message in workers(2).run(refused, replace(MASTERED, update="auto"), adafactor):
        assert 'has no effect with update="auto" and Adafactor, whose updates are replicated' in message


def test_masters_are_more_precise() -> None:
    with pytest.raises(ValueError, match="master_dtype"):
        DearConfig(master_dtype=torch.bfloat16)
