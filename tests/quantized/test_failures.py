"""A worker dies, or its backward fails: the others end with an error that says why, and nothing stays alive."""

from __future__ import annotations

import gc
import os
import signal
import weakref

from ddp_hooks import LaneError
from tests.support.messages import message_of
from tests.support.quantized.twins import Side
from tests.support.workers import WorkerPools


def train_until_somebody_dies(rank: int, world_size: int) -> str:
    side = Side()
    try:
        for step in range(1000):
            if rank == 1 and step == 3:
                middle = list(side.model.parameters())[4]
                middle.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            side.ddp(step).backward()
    except LaneError as error:
        return str(error)
    return "nobody noticed"


def test_survivors_name_the_dead(workers: WorkerPools) -> None:
    pool = workers(3)
    outcomes = pool.outcomes(train_until_somebody_dies, timeout_s=40)
    pool.end()
    for rank in (0, 2):
        assert outcomes[rank][0] == "ok" and "rank 1 died" in outcomes[rank][1], outcomes[rank]


def fail(_: object) -> None:
    raise RuntimeError("on purpose")


def raise_in_one_backward(rank: int, world_size: int) -> str:
    side = Side()
    for step in range(3):
        side.ddp(step).backward()
    handle = next(side.model.parameters()).register_hook(fail)
    first = message_of(lambda: side.ddp(7).backward())
    handle.remove()
    saving = message_of(side.state.state_dict)
    second = message_of(lambda: side.ddp(8))
    side.state.close()
    return f"{first}; {saving}; {second}"


def drop(rank: int, world_size: int) -> bool:
    side = Side()
    side.ddp(1).backward()
    reference = weakref.ref(side.state)
    del side
    gc.collect()
    return reference() is None


def test_an_exception_in_backward_hangs_nobody(workers: WorkerPools) -> None:
    pool = workers(2)
    assert pool.run(drop) == [True, True], "a model that nobody holds is freed, with its state"
    for message in pool.run(raise_in_one_backward, timeout_s=20):
        assert "on purpose" in message and "wrap the model again" in message
        assert "state_dict() in the middle of a backward" in message
    pool.end()
