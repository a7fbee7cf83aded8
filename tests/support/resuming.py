"""Loops that save, are killed, and are resumed: what all such tests share.

Checkpoints are written beside and renamed when every rank has written its part, so that what has its name is complete.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tests.support.workers import WorkerPools

NUM_STEPS, SAVE_EVERY, FATAL_STEP = 9, 2, 5


class Loop(Protocol):
    """What a user would write, with places to die in."""

    def train_step(self, step: int, dying: str | None) -> None:
        """One step; ``dying`` names the place at which this rank dies in it."""

    def write(self, folder: Path, step: int, dying: str | None) -> None:
        """Write a checkpoint into ``folder``, which exists."""

    def read(self, folder: Path) -> int:
        """Restore a checkpoint; returns its step."""

    def finish(self) -> bytes:
        """End it; everything that has to be equal in the end."""


def train(loop: Loop, rank: int, folder: Path, victim: int, phase: str | None) -> bytes:
    """Begin or resume, save every other step, and end; or die on the way, if this rank is ``victim``."""
    for step in range(_resume(loop, rank, folder), NUM_STEPS):
        dying = phase if rank == victim and step == FATAL_STEP else None
        loop.train_step(step, dying)
        if (step + 1) % SAVE_EVERY == 0:
            _save(loop, rank, folder, step + 1, dying)
    return loop.finish()


def _save(loop: Loop, rank: int, folder: Path, step: int, dying: str | None) -> None:
    unfinished = folder / f"unfinished-{step}"
    unfinished.mkdir(exist_ok=True)
    loop.write(unfinished, step, dying)
    if dying == "before commit":
        die()
    dist.barrier()
    if rank == 0:
        unfinished.rename(folder / f"step-{step}")
    dist.barrier()


def _resume(loop: Loop, rank: int, folder: Path) -> int:
    saved = sorted(folder.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    dist.barrier()
    if rank == 0:
        for torn in folder.glob("unfinished-*"):
            shutil.rmtree(torn)
    return loop.read(saved[-1]) if saved else 0


def write_part(folder: Path, rank: int, content: dict[str, Any], dying: str | None) -> None:
    """Write a rank's part of a checkpoint, or half of it."""
    path = folder / f"{rank}.pt"
    if dying == "saving":
        path.write_bytes(b"torn")
        die()
    torch.save(content, path)


def read_part(folder: Path, rank: int) -> dict[str, Any]:
    """What :func:`write_part` has written."""
    content: dict[str, Any] = torch.load(folder / f"{rank}.pt", weights_only=True)
    return content


def die() -> None:
    """As if the machine had failed."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_round(lanes: Any, label: str = "") -> None:
    """Die in the middle of the next exchange of these lanes whose label begins so."""
    for lane in lanes._lanes:
        complete = lane._complete

        def complete_or_die(messages: Any, place: str, complete: Callable[..., Any] = complete) -> None:
            complete(messages, place)
            if place.startswith(label):
                die()

        lane._complete = complete_or_die


def kill_and_resume(
    workers: WorkerPools, run: Callable[..., bytes], folder: Path, world_size: int, victim: int, phase: str
) -> None:
    """Assert that a run of which ``victim`` dies in ``phase``, resumed, ends as one in which nobody does.

    Args:
        run: a task ``(rank, world_size, folder, victim, phase)`` that calls :func:`train`.
    """
    pool = workers(world_size)
    outcomes = pool.outcomes(run, str(folder), victim, phase, timeout_s=60)
    pool.end()
    assert outcomes[victim][0] != "ok", f"rank {victim} should have died"
    # Saving happens at the end of the fatal step; every other death comes before it.
    assert (folder / "step-4").exists() and not (folder / "step-8").exists()
    resumed = workers(world_size).run(run, str(folder), -1, None, timeout_s=60)
    other = folder / "undisturbed"
    other.mkdir()
    assert resumed == workers(world_size).run(run, str(other), -1, None)
