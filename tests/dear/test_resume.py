"""Killed with SIGKILL at any point and resumed from the last checkpoint, a run ends in the bits of one that was not.

Prevents: checkpoints that are torn, that miss what was in flight, or whose resumption counts a step twice.
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
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, dear_hook
from tests.dear.test_models import MODELS
from tests.dear.twins import CONFIG
from tests.workers import WorkerPools

NUM_STEPS, SAVE_EVERY, FATAL_STEP = 9, 2, 5
PHASES = (
    "backward", "mid reduce-scatter", "before the step", "mid all-gather", "next forward", "saving", "before commit",
)  # fmt: skip


def train(rank: int, world_size: int, folder: str, victim: int, phase: str | None) -> bytes:
    """Begin or resume, save every other step, and end with the bytes of all parameters; or die on the way."""
    loop = Loop(rank, world_size, Path(folder))
    loop.resume()
    for step in range(loop.step, NUM_STEPS):
        dying = phase if rank == victim and step == FATAL_STEP else None
        loop.train_step(step, dying)
        if (step + 1) % SAVE_EVERY == 0:
            loop.save(step + 1, dying)
    loop.state.close()
    return b"".join(p.detach().numpy().tobytes() for p in loop.ddp.module.parameters())


class Loop:
    """What a user would write, with places to die in."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank, self.world_size, self.folder, self.step = rank, world_size, folder, 0
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
            self._die_in_a_round_of("reduce-scatter")
        loss.backward()
        if dying == "before the step":
            die()
        if dying == "mid all-gather":
            self._die_in_a_round_of("all-gather")
        self.optimizer.step()
        self.scheduler.step()
        if dying == "next forward":
            self.ddp.module.register_forward_pre_hook(lambda *_: die())

    def _die_in_a_round_of(self, phase: str) -> None:
        for lane in self.state._lanes._lanes:
            wait = lane._wait  # type: ignore[attr-defined]

            def wait_or_die(running: Any, submission: Any, wait: Callable[..., Any] = wait) -> None:
                wait(running, submission)
                if submission.work.label.startswith(phase):
                    die()

            lane._wait = wait_or_die  # type: ignore[attr-defined]

    # -- checkpoints: written beside, then renamed, so that what has its name is complete ----------------------------

    def save(self, step: int, dying: str | None) -> None:
        unfinished = self.folder / f"unfinished-{step}"
        if dying == "saving":
            writer = dcp.FileSystemWriter(unfinished)
            write_data = writer.write_data

            def write_and_die(*args: Any) -> Any:
                write_data(*args)
                die()

            setattr(writer, "write_data", write_and_die)  # noqa: B010
        else:
            writer = dcp.FileSystemWriter(unfinished)
        content = {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.state.sharded_optimizer_state_dict(),
            "progress": {"step": step, "scheduler": self.scheduler.state_dict()},
        }
        dcp.save(content, storage_writer=writer)
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
        content = {
            "model": self.ddp.module.state_dict(),
            "progress": {"step": 0, "scheduler": self.scheduler.state_dict()},
        }
        dcp.load(content, checkpoint_id=saved[-1])
        self.ddp.module.load_state_dict(content["model"])
        self.scheduler.load_state_dict(content["progress"]["scheduler"])
        self.state.load_sharded_optimizer(saved[-1])
        self.step = content["progress"]["step"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_and_resume(workers: WorkerPools, folder: Path, world_size: int, victim: int, phase: str) -> None:
    pool = workers(world_size)
    outcomes = pool.outcomes(train, str(folder), victim, phase, timeout_s=60)
    pool.end()
    assert outcomes[victim][0] != "ok", f"rank {victim} should have died"
    assert (folder / "step-4").exists() and not (folder / "step-8").exists()
    # Saving happens at the end of the fatal step; every other death comes before it.
    resumed = workers(world_size).run(train, str(folder), -1, None, timeout_s=60)
    expected = undisturbed(workers, folder, world_size)
    assert len(set(resumed)) == 1
    assert resumed == expected


def undisturbed(workers: WorkerPools, folder: Path, world_size: int) -> list[bytes]:
    other = folder / "undisturbed"
    other.mkdir()
    results: list[bytes] = workers(world_size).run(train, str(other), -1, None)
    return results


@pytest.mark.parametrize("phase", PHASES)
def test_two_ranks(workers: WorkerPools, tmp_path: Path, phase: str) -> None:
    kill_and_resume(workers, tmp_path, 2, 1, phase)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 0), (3, 1), (3, 2)])
def test_every_rank(workers: WorkerPools, tmp_path: Path, world_size: int, victim: int, phase: str) -> None:
    kill_and_resume(workers, tmp_path, world_size, victim, phase)


