"""A worker dies in the middle of training: the others end with an error that names it, on their training thread."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, LaneError, dear_hook
from tests.support.dear.misuse import trained
from tests.support.dear.twins import whole_batches
from tests.support.workers import WorkerPools


def train_until_somebody_dies(rank: int, world_size: int, victim: int, phase: str) -> str:
    ddp, optimizer, _ = trained(rank, world_size)
    try:
        for step in range(1000):
            dying = rank == victim and step == 5
            optimizer.zero_grad()
            loss = ddp(*whole_batches(rank, world_size, step))
            if dying and phase == "before backward":
                os.kill(os.getpid(), signal.SIGKILL)
            if dying and phase == "in backward":
                middle = list(ddp.module.parameters())[4]
                middle.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            if dying and phase == "before step":
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            if dying and phase == "while gathering":
                os.kill(os.getpid(), signal.SIGKILL)
    except LaneError as error:
        return str(error)
    return "nobody noticed"


@pytest.mark.quick("2-0-while gathering", "3-1-in backward", "3-1-before step")
@pytest.mark.parametrize("phase", ["before backward", "in backward", "before step", "while gathering"])
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 1), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_survivors_name_the_dead(workers: WorkerPools, world_size: int, victim: int, phase: str) -> None:
    pool = workers(world_size)
    outcomes = pool.outcomes(train_until_somebody_dies, victim, phase, timeout_s=40)
    pool.end()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0] == "ok" and f"rank {victim} died" in outcome[1], outcome
            assert "layers." in outcome[1], f"does not say what was under way: {outcome[1]}"


def train_with_buffers_until_somebody_dies(rank: int, world_size: int, victim: int, phase: str) -> str:
    """DDP sends BatchNorm's buffers before every forward, and is the first to meet the lost connection."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 4))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    ddp.register_comm_hook(DearState(ddp, optimizer), dear_hook)
    try:
        for step in range(1000):
            dying = rank == victim and step == 5
            optimizer.zero_grad()
            if dying and phase == "before forward":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = ddp(torch.randn(4, 8)).sum()
            if dying and phase == "before backward":
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
    except RuntimeError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "nobody noticed"


@pytest.mark.quick("2-0-*")
@pytest.mark.parametrize("phase", ["before forward", "before backward"])
@pytest.mark.parametrize(
    ("world_size", "victim"),
    [(2, 0), (3, 1), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(5, 3, marks=pytest.mark.slow)],
)
def test_survivors_name_the_dead_when_ddp_notices_first(
    workers: WorkerPools, world_size: int, victim: int, phase: str
) -> None:
    pool = workers(world_size)
    outcomes = pool.outcomes(train_with_buffers_until_somebody_dies, victim, phase, timeout_s=40)
    pool.end()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0] == "ok" and f"rank {victim} died" in outcome[1], outcome


def raise_in_one_backward(rank: int, world_size: int) -> bool:
    """An exception half-way through every rank's backward leaves DDP unusable, but nothing hangs."""
    ddp, optimizer, state = trained(rank, world_size)
    middle = list(ddp.module.parameters())[4]
    handle = middle.register_hook(_raise)
    try:
        ddp(*whole_batches(rank, world_size, 7)).backward()
    except ZeroDivisionError:
        handle.remove()
    threads = [lane._thread for lane in state._driver.lanes._lanes]  # type: ignore[union-attr]
    state.close()
    del optimizer
    return len(threads) == 2 and not any(thread.is_alive() for thread in threads)


def _raise(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_an_exception_in_backward_hangs_nobody(workers: WorkerPools) -> None:
    pool = workers(2)
    assert all(pool.run(raise_in_one_backward, timeout_s=9))  # less than a farewell that nobody answers
    pool.end()
