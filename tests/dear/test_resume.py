"""Killed with SIGKILL at any point and resumed from the last checkpoint, a run ends in the bits of one that was not.

Prevents: checkpoints that are torn, that miss what was in flight, or whose resumption counts a step twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, dear_hook
from tests.support import resuming
from tests.support.dear.twins import CONFIG
from tests.support.models import MODELS
from tests.support.resuming import NUM_STEPS, die, die_in_a_round
from tests.support.workers import WorkerPools

PHASES = (
    "backward", "mid reduce-scatter", "before the step", "mid all-gather", "next forward", "saving", "before commit",
)  # fmt: skip


def train(rank: int, world_size: int, folder: str, victim: int, phase: str | None) -> bytes:
    return resuming.train(Loop(rank, world_size), rank, Path(folder), victim, phase)


class Loop:
    """What a user would write, with places to die in."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.batches: Any
        model: Any
        optimizer: Any
        model, self.batches, optimizer = MODELS["encoder"]
        torch.manual_seed(7)
        self.ddp = DistributedDataParallel(model(world_size), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        self.optimizer = optimizer(self.ddp.module)
        self.state = DearState(self.ddp, self.optimizer, CONFIG)
        self.ddp.register_comm_hook(self.state, dear_hook)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, NUM_STEPS)

    def train_step(self, step: int, dying: str | None) -> None:
        self.optimizer.zero_grad()
        loss = self.ddp(*self.batches(self.rank, self.world_size, step))
        if dying == "backward":
            list(self.ddp.module.parameters())[4].register_hook(lambda _: die())
        if dying == "mid reduce-scatter":
            die_in_a_round(self.state._driver.lanes, "reduce-scatter")
        loss.backward()
        if dying == "before the step":
            die()
        if dying == "mid all-gather":
            die_in_a_round(self.state._driver.lanes, "all-gather")
        self.optimizer.step()
        self.scheduler.step()
        if dying == "next forward":
            self.ddp.module.register_forward_pre_hook(lambda *_: die())

    def write(self, folder: Path, step: int, dying: str | None) -> None:
        writer = dcp.FileSystemWriter(folder)
        if dying == "saving":
            write_data = writer.write_data

            def write_and_die(*args: Any) -> Any:
                write_data(*args)
                die()

            setattr(writer, "write_data", write_and_die)  # noqa: B010
        content = {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.state.sharded_optimizer_state_dict(),
            "progress": {"step": step, "scheduler": self.scheduler.state_dict()},
        }
        dcp.save(content, storage_writer=writer)

    def read(self, folder: Path) -> int:
        content = {
            "model": self.ddp.module.state_dict(),
            "progress": {"step": 0, "scheduler": self.scheduler.state_dict()},
        }
        dcp.load(content, checkpoint_id=folder)
        self.ddp.module.load_state_dict(content["model"])
        self.scheduler.load_state_dict(content["progress"]["scheduler"])
        self.state.load_sharded_optimizer(folder)
        step: int = content["progress"]["step"]
        return step

    def finish(self) -> bytes:
        self.state.close()
        return b"".join(p.detach().numpy().tobytes() for p in self.ddp.module.parameters())


@pytest.mark.quick("before commit")
@pytest.mark.parametrize("phase", PHASES)
def test_two_ranks(workers: WorkerPools, tmp_path: Path, phase: str) -> None:
    resuming.kill_and_resume(workers, train, tmp_path, 2, 1, phase)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 0), (3, 1), (3, 2)])
def test_every_rank(workers: WorkerPools, tmp_path: Path, world_size: int, victim: int, phase: str) -> None:
    resuming.kill_and_resume(workers, train, tmp_path, world_size, victim, phase)
