"""Steps that an exception ends, and backwards and forwards that do not come in turns.

Prevents: delayed rows that are lost with an interrupted step, gradients of tables that go with those of one layer,
vectors of one forward taken for another's, and threads that stay when a state or tables are closed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_hooks import clip_grad_norm_, shard_embeddings
from ddp_hooks.intercept import around_step
from tests.support.embedding.checkpointed import Checkpointed
from tests.support.embedding.hooks import HOOKS
from tests.support.embedding.loops import LOOPS
from tests.support.embedding.steps import Interruption, interrupt, run
from tests.support.embedding.twins import CONFIG, Batch, Side, Twins, batches, ids_of
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


def interrupted(side: Side, data: Iterator[Batch]) -> None:
    """Some steps raise, and the loop goes on."""
    for number, batch in enumerate(data):
        side.zero_grad()
        side.ddp(batch).backward()
        # After the hooks of states and tables.
        handles = around_step(side.optimizers[0], interrupt, interrupt) if number in (2, 3, 6, 9) else []
        for optimizer in side.optimizers:
            try:
                optimizer.step()
            except Interruption:
                if side.tables is not None and number == 3 and side.tables._step.is_interrupted:
                    assert "was interrupted by an exception" in message_of(side.tables.flush)
                    side.tables.full_optimizer_state_dict()  # completes it
                    side.tables.flush()
        for handle in handles:
            handle.remove()


def refused(side: Side, data: Iterator[Batch]) -> None:
    """Settings with which a step cannot be split are put right, and the same step is taken then."""
    for number, batch in enumerate(data):
        side.zero_grad()
        side.ddp(batch).backward()
        if side.tables is not None and number % 3 == 1:
            (group,) = side.tables.optimizer.param_groups
            group["weight_decay"] = 0.5
            assert "weight_decay of Adagrad does not work" in message_of(side.step)
            group["weight_decay"] = 0
        side.step()


def drop_one_layer(side: Side, data: Iterator[Batch]) -> None:
    """As some loops do in their first epoch; and on one rank alone."""
    for number, batch in enumerate(data):
        side.zero_grad()
        side.ddp(batch).backward()
        if number % 4 == torch.distributed.get_rank() or number % 4 == 3:
            side.ddp.module.dense.grad = None
        side.step()


def drop_and_go_on(side: Side, data: Iterator[Batch]) -> None:
    """Gradients of two backwards add up, but those of one layer."""
    for number, batch in enumerate(data):
        side.ddp(batch).backward()
        side.ddp.module.dense.grad = None
        if number % 2:
            side.step()
            side.zero_grad()


def clip_to_nothing(side: Side, data: Iterator[Batch]) -> None:
    """The step that follows is one with gradients of zero, not one without any."""
    for number, batch in enumerate(data):
        side.zero_grad()
        side.ddp(batch).backward()
        if number % 2 and side.tables is not None:
            clip_grad_norm_([side.ddp.parameters(), side.tables], 0.0)
        elif number % 2:
            for parameter in side.ddp.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.0)
        side.step()


@pytest.mark.quick("dear-prefetch")
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("hook", list(HOOKS))
def test_every_loop_beside_other_hooks(workers: WorkerPools, hook: str, prefetch: bool) -> None:
    # Every loop repeats itself after six batches at most; what prefetch delays reaches into the next round.
    for found in workers(2).run(run, LOOPS, hook, prefetch, "first", batches, 12 if prefetch else 6):
        assert found == [(name, 0.0) for name in LOOPS]


def threads_left(rank: int, world_size: int) -> dict[str | None, int]:
    """Return, by hook, how many threads a run leaves behind when it has closed everything; no garbage is collected."""
    found = {}
    for hook in (None, *HOOKS):
        gc.collect()
        gc.disable()
        before = len(os.listdir("/proc/self/task"))
        run(rank, world_size, {"plain": LOOPS["plain"]}, hook, True, "first", batches, 2)
        found[hook] = len(os.listdir("/proc/self/task")) - before
        gc.enable()
    return found


def test_closing_ends_the_threads_of_process_groups(workers: WorkerPools) -> None:
    """The model refers to its DDP here, as with trainers, so what is closed is never collected."""
    for found in workers(2).run(threads_left):
        assert found == dict.fromkeys((None, *HOOKS), 0)


@pytest.mark.slow
@pytest.mark.parametrize("hook", list(HOOKS))
def test_following_after_the_hook(workers: WorkerPools, hook: str) -> None:
    """Then the hook has put the model's gradients away already when tables step."""
    loops = {name: LOOPS[name] for name in ("plain", "accumulate_with_sync", "skip_steps", "zero_the_model")}
    for found in workers(3).run(run, loops, hook, True, "last"):
        assert found == [(name, 0.0) for name in loops]


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_interrupted_and_partly_dropped(workers: WorkerPools, world_size: int, prefetch: bool) -> None:
    loops = {
        "interrupted": interrupted,
        "refused": refused,
        "drop one layer": drop_one_layer,
        "drop and go on": drop_and_go_on,
        "clip to nothing": clip_to_nothing,
    }
    for found in workers(world_size).run(run, loops, None, prefetch):
        assert found == [(name, 0.0) for name in loops]


@pytest.mark.quick("dear_replicated-no_prefetch-last")
@pytest.mark.parametrize("follows", ["first", "last"])
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("hook", list(HOOKS))
def test_interrupted_beside_other_hooks(workers: WorkerPools, hook: str, prefetch: bool, follows: str) -> None:
    loops = {"interrupted": interrupted, "refused": refused}
    for found in workers(2).run(run, loops, hook, prefetch, follows):
        assert found == [(name, 0.0) for name in loops]


def teacher(rank: int, world_size: int) -> list[int]:
    """Delayed rows of three epochs, when a forward without gradients comes before each one of training."""
    twins = Twins.of(world_size)
    side, tables = twins.ours, twins.ours.tables
    assert tables is not None
    data = batches(rank, world_size, 6)
    found = []
    for _ in range(3):
        delayed = 0
        for batch in tables.prefetch(data, ids_of):
            with torch.no_grad():
                side.ddp.module(batch)
            side.zero_grad()
            side.ddp(batch).backward()
            side.step()
            delayed += tables.stats().num_delayed_rows
        found.append(delayed)
    tables.close()
    return found


def test_forwards_without_gradients_before_those_of_training(workers: WorkerPools) -> None:
    for first, second, third in workers(2).run(teacher):
        assert first > 0
        assert first == second == third


def several_forwards(rank: int, world_size: int, reentrant: bool, prefetch: bool, count: int) -> float:
    """Several forwards, then one backward through all of them, which repeats them; against whole tables."""
    data = [torch.randint(0, 20, (5,), generator=torch.Generator().manual_seed(9 * rank + i)) for i in range(12)]
    weights = []
    for sharded in (True, False):
        torch.manual_seed(3)
        model = Checkpointed(reentrant).double()
        weight = model.table.weight
        optimizer: Any = torch.optim.SGD([weight], lr=0.01)
        loader: Any = data
        if sharded:
            optimizer = tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.01)
            loader = tables.prefetch(data, lambda ids: ids) if prefetch else data
        losses: list[Tensor] = []
        for number, ids in enumerate(loader):
            losses.append(model(ids))
            if (number + 1) % count:
                continue
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            if not sharded:
                assert weight.grad is not None
                weight.grad = mean_over_ranks(weight.grad.to_dense(), world_size)
            optimizer.step()
            losses = []
        weights.append(tables.full_state_dict()["table.weight"] if sharded else weight.detach())
    tables.close()
    return float((weights[0] - weights[1]).abs().max())


def mean_over_ranks(gradient: Tensor, world_size: int) -> Tensor:
    torch.distributed.all_reduce(gradient)
    return gradient / world_size


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_two_forwards_are_repeated(workers: WorkerPools, reentrant: bool, prefetch: bool) -> None:
    assert all(gap < 1e-12 for gap in workers(2).run(several_forwards, reentrant, prefetch, 2))


def too_many(rank: int, world_size: int) -> str:
    return message_of(lambda: several_forwards(rank, world_size, True, True, 3))


def test_too_many_forwards_to_repeat(workers: WorkerPools) -> None:
    pool = workers(2)
    assert all("no more than two forwards before their backward" in message for message in pool.run(too_many))
    pool.end()
