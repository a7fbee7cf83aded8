"""A worker dies, or leaves the loop: the others end with an error that says why, and nothing hangs or stays alive."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from dataclasses import replace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import LaneError, TopKConfig, TopKState, topk_hook
from tests.support.dear.twins import WholeNumbers, whole_batches
from tests.support.messages import message_of
from tests.support.topk.hooks import CONFIG
from tests.support.workers import WorkerPools


def wrapped(
    world_size: int, config: TopKConfig = CONFIG
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, TopKState]:
    torch.manual_seed(7)
    ddp = DistributedDataParallel(WholeNumbers(world_size), bucket_cap_mb=0.05)
    state = TopKState(ddp, config)
    ddp.register_comm_hook(state, topk_hook)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=1.0), state


def train_until_somebody_dies(rank: int, world_size: int, victim: int, phase: str) -> str:
    ddp, optimizer, _ = wrapped(world_size)
    try:
        for step in range(1000):
            dying = rank == victim and step == 5
            optimizer.zero_grad()
            loss = ddp(*whole_batches(rank, world_size, step))
            if dying and phase == "before backward":
                os.kill(os.getpid(), signal.SIGKILL)
            if dying:
                middle = list(ddp.module.parameters())[4]
                middle.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            optimizer.step()
    except LaneError as error:
        return str(error)
    return "nobody noticed"


@pytest.mark.quick("2-0-before backward", "3-1-in backward")
@pytest.mark.parametrize("phase", ["before backward", "in backward"])
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 1), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_survivors_name_the_dead(workers: WorkerPools, world_size: int, victim: int, phase: str) -> None:
    pool = workers(world_size)
    outcomes = pool.outcomes(train_until_somebody_dies, victim, phase, timeout_s=40)
    pool.end()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0] == "ok" and f"rank {victim} died" in outcome[1], outcome


def fail(_: torch.Tensor) -> None:
    raise RuntimeError("on purpose")


def raise_in_one_backward(rank: int, world_size: int) -> tuple[str, bool]:
    """An exception half-way through every rank's backward leaves DDP unusable, but nothing hangs."""
    ddp, _, state = wrapped(world_size)
    for step in range(2):
        ddp(*whole_batches(rank, world_size, step)).backward()
    handle = list(ddp.module.parameters())[-1].register_hook(fail)
    first = message_of(lambda: ddp(*whole_batches(rank, world_size, 7)).backward())
    handle.remove()
    message = message_of(lambda: ddp(*whole_batches(rank, world_size, 8)))
    threads = [lane._thread for lane in state._lanes._lanes]  # type: ignore[union-attr]
    state.close()
    return f"{first}; {message}", any(thread.is_alive() for thread in threads)


def test_an_exception_in_backward_hangs_nobody(workers: WorkerPools) -> None:
    pool = workers(2)
    for message, alive in pool.run(raise_in_one_backward, timeout_s=20):
        assert "on purpose" in message and "wrap the model again" in message and not alive
    pool.end()


def drop(rank: int, world_size: int, num_steps: int) -> bool:
    """True if a model that nobody holds any more is freed, with its state."""
    ddp, _, state = wrapped(world_size)
    for step in range(num_steps):
        ddp(*whole_batches(rank, world_size, step)).backward()
    reference = weakref.ref(state)
    del ddp, state, _
    gc.collect()
    return reference() is None


@pytest.mark.parametrize("num_steps", [0, 3])
def test_nothing_keeps_a_model_alive(workers: WorkerPools, num_steps: int) -> None:
    assert all(workers(2).run(drop, num_steps))


def pause(rank: int, world_size: int) -> str:
    """One rank does not come; the wait has an end, and says for what it was."""
    ddp, _, state = wrapped(world_size, replace(CONFIG, timeout_s=5, stall_warning_s=2))
    for step in range(3):  # until DDP has rebuilt its buckets, and says nothing in a forward
        ddp(*whole_batches(rank, world_size, step)).backward()
    if rank == 0:
        return "did not come"
    message = message_of(lambda: ddp(*whole_batches(rank, world_size, 3)).backward())
    state.close()
    return message


@pytest.mark.slow
def test_a_wait_for_a_rank_that_does_not_come_has_an_end(workers: WorkerPools) -> None:
    pool = workers(2)
    outcomes = pool.outcomes(pause, timeout_s=80)
    pool.end()
    assert "timed out waiting for rank 0" in outcomes[1][1] and "layers." in outcomes[1][1], outcomes
