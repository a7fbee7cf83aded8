"""Gradients that are zeroed by whatever call, and gradients that only look so.

Prevents: tables that keep gradients which the model has lost, or lose those which it has kept; and ranks that do not
agree on that, of which some wait for ever.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKConfig, TopKState, clip_grad_norm_, shard_embeddings, topk_hook
from ddp_hooks.embedding.zeroing import ZeroingWitness
from ddp_hooks.feed import GradientGuard, GuardsAside, aside
from tests.embedding.hooks import HOOKS
from tests.embedding.test_exact import accumulate_with_sync, plain
from tests.embedding.test_steps import Interruption, interrupt, run
from tests.embedding.twins import CONFIG, Batch, Loop, Side, Tables, batches
from tests.workers import WorkerPools

# Data -------------------------------------------------------------------------------------------------------


def cancelling(rank: int, world_size: int, count: int) -> list[Batch]:
    """Every rank has dense gradients, and their mean is zero."""
    made = batches(rank, world_size, count)
    for batch in made:
        batch["dense"] = torch.arange(1.0, 7.0) * world_size * (1 - 2 * rank if rank < 2 else 0)
    return made


def zero_on_the_first_rank(rank: int, world_size: int, count: int) -> list[Batch]:
    made = batches(rank, world_size, count)
    for batch in made:
        batch["dense"] = torch.arange(1.0, 7.0) * world_size * (rank > 0)
    return made


# Loops ------------------------------------------------------------------------------------------------------


def zero_in_place(side: Side, data: Iterator[Batch], clips: bool = False) -> None:
    """By hand, as old torch did; clipped with a bound that leaves gradients as they are."""
    for batch in data:
        for parameter in side.ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        side.ddp(batch).backward()
        if clips and side.tables is not None:
            clip_grad_norm_([side.ddp.parameters(), side.tables], 1e9)
        side.step()


def zero_after_each_step(side: Side, data: Iterator[Batch]) -> None:
    """In a hook that is older than the tables', with backward in a closure."""
    handles = [o.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad()) for o in side.optimizers]
    if side.tables is not None:
        side.tables.follow(side.optimizers[0])
    for batch in data:

        def closure(batch: Batch = batch) -> Tensor:
            loss: Tensor = side.ddp(batch)
            loss.backward()
            return loss

        side.optimizers[0].step(closure)  # type: ignore[arg-type]
        for optimizer in side.optimizers[1:]:
            optimizer.step()
    for handle in handles:
        handle.remove()


CASES: dict[str, tuple[Loop, Any]] = {
    "zero in place": (zero_in_place, batches),
    "zero in place, some are zero": (zero_in_place, zero_on_the_first_rank),
    "they cancel": (plain, cancelling),
    "two backwards cancel": (accumulate_with_sync, cancelling),
    "closure": (zero_after_each_step, batches),
}


def run_cases(rank: int, world_size: int, hook: str | None, follows: str) -> list[tuple[str, float]]:
    found = []
    for name, (loop, make) in CASES.items():
        found += run(rank, world_size, {name: loop}, hook, True, follows, make)
    return found


@pytest.mark.parametrize("follows", ["first", "last"])
@pytest.mark.parametrize("hook", [None, *HOOKS])
def test_zeroed_or_just_zero(workers: WorkerPools, hook: str | None, follows: str) -> None:
    for found in workers(2).run(run_cases, hook, follows):
        assert found == [(name, 0.0) for name in CASES]


@pytest.mark.parametrize("hook", [None, "topk"])
def test_zeroed_in_place_after_clipping(workers: WorkerPools, hook: str | None) -> None:
    loops = {"clip": partial(zero_in_place, clips=True)}
    for found in workers(2).run(run, loops, hook, True):
        assert found == [("clip", 0.0)]


# What hooks zero --------------------------------------------------------------------------------------------


def not_finite(rank: int, world_size: int, pipeline: Any, follow_first: bool) -> tuple[bool, bool]:
    """Whether tables and dense parameters have moved in a step that TopK skips."""
    model = Tables(world_size)
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.5)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    if follow_first:
        tables.follow(optimizer)
    config = TopKConfig(density=1.0, timeout_s=20, pipeline=pipeline)
    state = TopKState(ddp, config, optimizer=optimizer if pipeline == "forward" else None)
    ddp.register_comm_hook(state, topk_hook)
    if not follow_first:
        tables.follow(optimizer)
    before: dict[str, Tensor] = {}
    for step, batch in enumerate(batches(rank, world_size, 5)):
        optimizer.zero_grad()
        (ddp(batch) * (torch.inf if step == 3 else 1.0)).backward()
        before = {name: value.clone() for name, value in tables.full_state_dict().items()} if step == 3 else before
        optimizer.step()
        if step == 3:
            state.synchronize()
            after = tables.full_state_dict()
            moved = [not torch.equal(before[name], after[name]) for name in ("encoder.weight", "dense")]
    tables.close()
    state.close()
    return moved[0], moved[1]


@pytest.mark.parametrize("follow_first", [True, False])
@pytest.mark.parametrize("pipeline", ["backward", "forward"])
def test_a_step_that_topk_skips(workers: WorkerPools, pipeline: str, follow_first: bool) -> None:
    assert workers(2).run(not_finite, pipeline, follow_first) == [(False, False)] * 2


def closed_after_an_interruption(rank: int, world_size: int, hook: str) -> list[int]:
    """Guards that are still put aside, before and after the state is closed; and it can be trained on."""
    model = Tables(world_size)
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.5)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    state = HOOKS[hook](ddp, optimizer)
    tables.follow(optimizer)
    data = batches(rank, world_size, 6)
    for batch in data[:2]:
        optimizer.zero_grad()
        ddp(batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    ddp(data[2]).backward()
    optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(Interruption):
        optimizer.step()
    found = [len(aside._aside)]
    state.close()
    found.append(len(aside._aside))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    tables.follow(optimizer)
    for batch in data[3:]:
        for parameter in ddp.parameters():
            parameter.grad = None
        ddp(batch).backward()
        optimizer.step()
    tables.close()
    return found


@pytest.mark.parametrize("hook", ["dear_replicated", "topk_forward"])
def test_nothing_is_aside_when_a_state_is_closed(workers: WorkerPools, hook: str) -> None:
    for before, after in workers(2).run(closed_after_an_interruption, hook):
        assert before > 0
        assert after == 0


def alive(rank: int, world_size: int, hook: str, closes: bool) -> list[str]:
    """What the garbage collector cannot free."""
    model = Tables(world_size)
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.5)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    state = HOOKS[hook](ddp, optimizer)
    tables.follow(optimizer)
    for batch in batches(rank, world_size, 3):
        optimizer.zero_grad()
        ddp(batch).backward()
        optimizer.step()
    if closes:
        state.close()
        tables.close()
    made = {"model": model, "tables": tables, "DDP": ddp, "optimizer": optimizer, "state": state}
    references = {name: weakref.ref(thing) for name, thing in made.items()}
    del model, tables, ddp, optimizer, state, batch, made
    for _ in range(3):
        gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("hook", ["dear", "dear_replicated", "topk_forward"])
def test_nothing_outlives_its_user(workers: WorkerPools, hook: str, closes: bool) -> None:
    assert workers(1).run(alive, hook, closes) == [[]]


# What is looked at ------------------------------------------------------------------------------------------


def test_a_witness_is_small_and_not_zero() -> None:
    """Looking at it must cost nothing, and a gradient that was zero before says nothing."""
    model = nn.ParameterDict({"large": torch.ones(1 << 17), "zero": torch.ones(2), "small": torch.ones(3)})
    witness = ZeroingWitness(lambda: model)
    for name, parameter in model.items():
        parameter.grad = torch.zeros_like(parameter) if name == "zero" else torch.ones_like(parameter)
    witness.watch()
    assert not witness.saw_zeroing()
    model["zero"].grad = None
    model["small"].grad.zero_()
    assert not witness.saw_zeroing()  # one layer's gradients were dropped, not all
    model["large"].grad.zero_()
    assert witness.saw_zeroing() and not witness.saw_zeroing()  # once
    model["small"].grad = torch.ones(3)
    witness.watch()
    model["large"].grad = None
    assert not witness.saw_zeroing()
    model["small"].grad = model["zero"].grad = None
    model["large"].grad = torch.ones(1 << 17)
    witness.watch()
    assert not witness.saw_zeroing()
    model["large"].grad = None
    assert witness.saw_zeroing()


def test_a_witness_believes_guards() -> None:
    """Nobody knows what is behind a guard, and during a step it may not be in its place."""
    model = nn.ParameterList([torch.ones(2), torch.ones(3)])
    parameters = list(model.parameters())
    witness, aside = ZeroingWitness(lambda: model), GuardsAside(parameters)

    def guard() -> None:
        for parameter in parameters:
            parameter.grad = GradientGuard.standing_for(parameter, "p", lambda what: what)
        witness.watch()

    guard()
    aside.take([0, 1])
    assert parameters[0].grad is None and not witness.saw_zeroing()
    aside.put_back()
    assert parameters[0].grad is not None and not witness.saw_zeroing()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)  # the hook brings gradients back, which happen to be zero
    assert not witness.saw_zeroing()
    guard()
    aside.take([0, 1])
    aside.zero(set_to_none=True)
    assert witness.saw_zeroing()
    guard()
    for parameter in parameters:
        parameter.grad.zero_()
    assert witness.saw_zeroing()
