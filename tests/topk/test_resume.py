"""Killed with SIGKILL at any point and resumed from the last checkpoint, a run ends in the bits of one that was not.

Prevents: residuals that are saved in the middle of something, or forgotten, or selected from in another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKConfig, TopKState, topk_hook
from tests.support import resuming
from tests.support.models import MODELS
from tests.support.resuming import die, die_in_a_round
from tests.support.workers import WorkerPools

PHASES = ("backward", "mid exchange", "before the step", "saving", "before commit")
CONFIG = TopKConfig(density=0.05, group_mb=0.02, warmup_steps=6, timeout_s=20, stall_warning_s=10)


def train(rank: int, world_size: int, folder: str, victim: int, phase: str | None) -> bytes:
    return resuming.train(Loop(rank, world_size), rank, Path(folder), victim, phase)


class Loop:
    """A user's loop, with places to die in."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        model: Any
        self.batches: Any
        model, self.batches, optimizer = MODELS["encoder"]
        torch.manual_seed(7)
        self.ddp = DistributedDataParallel(model(world_size), bucket_cap_mb=0.05)
        self.optimizer: Any = optimizer(self.ddp.module)
        self.state = TopKState(self.ddp, CONFIG)
        self.ddp.register_comm_hook(self.state, topk_hook)

    def train_step(self, step: int, dying: str | None) -> None:
        self.optimizer.zero_grad()
        loss = self.ddp(*self.batches(self.rank, self.world_size, step))
        if dying == "backward":
            list(self.ddp.module.parameters())[4].register_hook(lambda _: die())
        if dying == "mid exchange":
            die_in_a_round(self.state._lanes)
        loss.backward()
        if dying == "before the step":
            die()
        self.optimizer.step()

    def write(self, folder: Path, step: int, dying: str | None) -> None:
        content = {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "topk": self.state.state_dict(),
            "step": step,
        }
        resuming.write_part(folder, self.rank, content, dying)

    def read(self, folder: Path) -> int:
        content = resuming.read_part(folder, self.rank)
        self.ddp.module.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.state.load_state_dict(content["topk"])
        step: int = content["step"]
        return step

    def finish(self) -> bytes:
        kept = [self.state.state_dict()["residual"][name] for name in self.state._context.names]
        self.state.close()
        return b"".join(values.detach().numpy().tobytes() for values in (*self.ddp.module.parameters(), *kept))


@pytest.mark.quick("before commit")
@pytest.mark.parametrize("phase", PHASES)
def test_two_ranks(workers: WorkerPools, tmp_path: Path, phase: str) -> None:
    resuming.kill_and_resume(workers, train, tmp_path, 2, 1, phase)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 0), (3, 1), (3, 2)])
def test_every_rank(workers: WorkerPools, tmp_path: Path, world_size: int, victim: int, phase: str) -> None:
    resuming.kill_and_resume(workers, train, tmp_path, world_size, victim, phase)
