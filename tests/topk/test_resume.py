"""Killed with SIGKILL at any point and resumed from the last checkpoint, a run ends in the bits of one that was not.

Prevents: residuals that are saved in the middle of something, or forgotten, or selected from in another order.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKConfig, TopKState, topk_hook
from tests.dear.test_models import MODELS
from tests.workers import WorkerPools

NUM_STEPS, SAVE_EVERY, FATAL_STEP = 9, 2, 5
PHASES = ("backward", "mid exchange", "before the step", "saving", "before commit")
CONFIG = TopKConfig(density=0.05, group_mb=0.02, warmup_steps=6, timeout_s=20, stall_warning_s=10)


def train(rank: int, world_size: int, folder: str, victim: int, phase: str | None) -> bytes:
    """Begin or resume, save every other step, and end with the bytes of parameters and residuals; or die on the way."""
    loop = Loop(rank, world_size, Path(folder))
    loop.resume()
    for step in range(loop.step, NUM_STEPS):
        dying = phase if rank == victim and step == FATAL_STEP else None
        loop.train_step(step, dying)
        if (step + 1) % SAVE_EVERY == 0:
            loop.save(step + 1, dying)
    kept = [loop.state.state_dict()["residual"][name] for name in loop.state._names]
    loop.state.close()
    return b"".join(values.detach().numpy().tobytes() for values in (*loop.ddp.module.parameters(), *kept))


class Loop:
    """What a user would write, with places to die in."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder, self.step = rank, world_size, folder, 0
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
            self._die_in_a_round()
        loss.backward()
        if dying == "before the step":
            die()
        self.optimizer.step()

    def _die_in_a_round(self) -> None:
        for lane in self.state._lanes._lanes:
            wait = lane._wait  # type: ignore[attr-defined]

            def wait_and_die(running: Any, submission: Any, wait: Callable[..., Any] = wait) -> None:
                wait(running, submission)
                die()

            lane._wait = wait_and_die  # type: ignore[attr-defined]

    # -- checkpoints: written beside, then renamed, so that what has its name is complete ----------------------------

    def save(self, step: int, dying: str | None) -> None:
        unfinished = self.folder / f"unfinished-{step}"
        unfinished.mkdir(exist_ok=True)
        content = {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "topk": self.state.state_dict(),
            "step": step,
        }
        if dying == "saving":
            (unfinished / f"{self.rank}.pt").write_bytes(b"torn")
            die()
        torch.save(content, unfinished / f"{self.rank}.pt")
        if dying == "before commit":
            die()
        dist.barrier()
        if self.rank == 0:
            unfinished.rename(self.folder / f"step-{step}")
        dist.barrier()

    def resume(self) -> None:
        saved = sorted(self.folder.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
        dist.barrier()
        if self.rank == 0:
            for torn in self.folder.glob("unfinished-*"):
                shutil.rmtree(torn)
        if not saved:
            return
        content = torch.load(saved[-1] / f"{self.rank}.pt", weights_only=True)
        self.ddp.module.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.state.load_state_dict(content["topk"])
        self.step = content["step"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_and_resume(workers: WorkerPools, folder: Path, world_size: int, victim: int, phase: str) -> None:
    pool = workers(world_size)
    outcomes = pool.outcomes(train, str(folder), victim, phase, timeout_s=60)
    pool.end()
    assert outcomes[victim][0] != "ok", f"rank {victim} should have died"
    assert (folder / "step-4").exists() and not (folder / "step-8").exists()
    resumed = workers(world_size).run(train, str(folder), -1, None, timeout_s=60)
    other = folder / "undisturbed"
    other.mkdir()
    assert resumed == workers(world_size).run(train, str(other), -1, None)


@pytest.mark.parametrize("phase", PHASES)
def test_two_ranks(workers: WorkerPools, tmp_path: Path, phase: str) -> None:
    kill_and_resume(workers, tmp_path, 2, 1, phase)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 0), (3, 1), (3, 2)])
def test_every_rank(workers: WorkerPools, tmp_path: Path, world_size: int, victim: int, phase: str) -> None:
    kill_and_resume(workers, tmp_path, world_size, victim, phase)
