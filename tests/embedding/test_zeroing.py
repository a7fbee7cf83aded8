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
from ddp_hooks.embedding.step import zero_grad_detector
from ddp_hooks.embedding.step.zero_grad_detector import ZeroGradDetector
from ddp_hooks.intercept import GradientGuard, SuspendedGuards, around_step, is_suspended
from tests.support.embedding.hooks import HOOKS
from tests.support.embedding.loops import accumulate_with_sync, plain
from tests.support.embedding.steps import Interruption, interrupt, run
from tests.support.embedding.twins import CONFIG, Batch, Loop, Side, Tables, Twins, batches, sum_and_divide
from tests.support.workers import WorkerPools

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


@pytest.mark.quick("None-first", "dear-last")
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
    """Guards that are put aside in a step, when an exception has ended it, and after the state is closed.

    And the model can be trained on.
    """
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
    found: list[int] = []

    def look_and_interrupt(*_: Any) -> None:
        found.append(sum(map(is_suspended, ddp.parameters())))
        raise Interruption

    around_step(optimizer, look_and_interrupt, interrupt)
    with pytest.raises(Interruption):
        optimizer.step()
    found.append(sum(map(is_suspended, ddp.parameters())))
    state.close()
    found.append(sum(map(is_suspended, ddp.parameters())))
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
def test_nothing_stays_aside(workers: WorkerPools, hook: str) -> None:
    for meanwhile, after, closed in workers(2).run(closed_after_an_interruption, hook):
        assert meanwhile > 0
        assert after == closed == 0


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


def test_a_detector_is_small_and_not_zero() -> None:
    """Looking at it must cost nothing, and a gradient that was zero before says nothing."""
    model = nn.ParameterDict({"large": torch.ones(1 << 17), "zero": torch.ones(2), "small": torch.ones(3)})
    detector = ZeroGradDetector(lambda: model)
    for name, parameter in model.items():
        parameter.grad = torch.zeros_like(parameter) if name == "zero" else torch.ones_like(parameter)
    detector.watch()
    assert not detector.was_zeroed()
    model["zero"].grad = None
    model["small"].grad.zero_()
    assert not detector.was_zeroed()  # one layer's gradients were dropped, not all
    model["large"].grad.zero_()
    assert detector.was_zeroed() and not detector.was_zeroed()  # once
    model["small"].grad = torch.ones(3)
    detector.watch()
    model["large"].grad = None
    assert not detector.was_zeroed()
    model["small"].grad = model["zero"].grad = None
    model["large"].grad = torch.ones(1 << 17)
    detector.watch()
    assert not detector.was_zeroed()
    model["large"].grad = None
    assert detector.was_zeroed()


def test_a_detector_believes_guards() -> None:
    """Nobody knows what is behind a guard, and during a step it may not be in its place."""
    model = nn.ParameterList([torch.ones(2), torch.ones(3)])
    parameters = list(model.parameters())
    detector, aside = ZeroGradDetector(lambda: model), SuspendedGuards(parameters)

    def guard() -> None:
        for parameter in parameters:
            parameter.grad = GradientGuard.standing_for(parameter, "p", lambda what: what)
        detector.watch()

    guard()
    aside.take([0, 1])
    assert parameters[0].grad is None and not detector.was_zeroed()
    aside.put_back()
    assert parameters[0].grad is not None and not detector.was_zeroed()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)  # the hook brings gradients back, which happen to be zero
    assert not detector.was_zeroed()
    guard()
    aside.take([0, 1])
    aside.zero(set_to_none=True)
    assert detector.was_zeroed()
    guard()
    for parameter in parameters:
        parameter.grad.zero_()
    assert detector.was_zeroed()


def test_a_detector_on_a_device_looks_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read a gradient there means to wait; only one that was changed in place is worth it."""
    monkeypatch.setattr(zero_grad_detector, "_is_on_cpu", lambda gradient: False)
    reads: list[Tensor] = []
    read = Tensor.any

    def noting(gradient: Tensor) -> Tensor:
        reads.append(gradient)
        return read(gradient)

    monkeypatch.setattr(Tensor, "any", noting)
    model = nn.ParameterList([torch.ones(2), torch.ones(3)])
    detector = ZeroGradDetector(lambda: model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    detector.watch()
    reads.clear()  # what has begun to be read is not waited for
    assert not detector.was_zeroed() and not reads
    torch._foreach_mul_(gradients, 0.5)
    assert not detector.was_zeroed() and reads
    torch._foreach_zero_(gradients)
    assert detector.was_zeroed()
    detector.watch()  # they are zeros now
    torch._foreach_mul_(gradients, 0.5)
    assert not detector.was_zeroed()


# Steps that an exception has ended, and gradients that have arrived since -------------------------------------


class TwoVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(600)), nn.Parameter(torch.zeros(600))

    def forward(self, batch: Tensor) -> Tensor:
        return (self.one * batch[0]).sum() + (self.two * batch[1]).sum()


def zeroed_after_interruption(rank: int, world_size: int, hook: str, way: str, scheduled: bool) -> float:
    """Without any tables: a step ends with an exception, gradients are zeroed, and the loop goes on."""
    ends = []
    for ours in (True, False):
        ddp = DistributedDataParallel(TwoVectors(), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 3) if scheduled else None  # both kinds wrap step()
        state: Any = HOOKS[hook](ddp, optimizer) if ours else None
        if not ours:
            ddp.register_comm_hook(None, sum_and_divide)
        after = torch.optim.lr_scheduler.StepLR(optimizer, 4) if scheduled else None
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + rank)
            if way == "by hand":
                for parameter in ddp.parameters():
                    parameter.grad = None
            else:
                {"ddp": ddp, "module": ddp.module, "optimizer": optimizer}[way].zero_grad()
            ddp(torch.randint(-3, 4, (2, 600), generator=generator).float() * world_size).backward()
            if step in (3, 5):
                handles = around_step(optimizer, interrupt, interrupt)  # after the state's own
                with pytest.raises(Interruption):
                    optimizer.step()
                for handle in handles:
                    handle.remove()
            else:
                optimizer.step()
            for scheduler in (before, after):
                if scheduler is not None:
                    scheduler.step()
        if ours:
            state.synchronize()
        ends.append(torch.cat([parameter.detach().clone() for parameter in ddp.parameters()]))
        if ours:
            state.close()
            assert scheduled or "step" not in vars(optimizer)
    return float((ends[0] - ends[1]).abs().max())


@pytest.mark.quick("dear-*", "topk_forward-by hand")
@pytest.mark.parametrize("way", ["ddp", "module", "optimizer", "by hand"])
@pytest.mark.parametrize("hook", ["dear", "dear_replicated", "topk_forward"])
def test_zeroed_after_an_interrupted_step(workers: WorkerPools, hook: str, way: str) -> None:
    assert workers(2).run(zeroed_after_interruption, hook, way, way == "ddp") == [0.0, 0.0]


def arrived_and_zeroed(rank: int, world_size: int, case: str) -> float:
    states: list[Any] = []

    def loop(side: Side, data: Iterator[Batch]) -> None:
        for number, batch in enumerate(data):
            side.ddp(batch).backward()
            skipped = case == "after a skipped step" and number % 2 == 0
            if skipped and side.tables is not None:
                states[0].wait_for_gradients()
            if not skipped:
                side.step()
            if case == "after a checkpoint":
                side.state()
            for parameter in side.ddp.parameters():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    twins = Twins.of(world_size, wrap=lambda *given: states.append(HOOKS["topk_forward"](*given)))
    twins.train(loop, batches(rank, world_size, 12), prefetch=True)
    states[0].synchronize()
    gap = twins.gap()
    states[0].close()
    assert twins.ours.tables is not None
    twins.ours.tables.close()
    return gap


@pytest.mark.parametrize("case", ["after a skipped step", "after a checkpoint"])
def test_zeroed_by_hand_when_gradients_have_arrived(workers: WorkerPools, case: str) -> None:
    """They have taken the place of the guards that told so."""
    assert workers(2).run(arrived_and_zeroed, case) == [0.0, 0.0]
