"""Replicated updates: gradients are gathered, and every rank updates whole parameters, just before they are read.

Prevents: updates with settings of another step, before the gradient is whole, twice, or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ddp_hooks import DearConfig
from tests.support.dear import clipping, twins
from tests.support.dear.loops import LOOPS, NUM_STEPS, adamw_two_groups, momentum_sgd
from tests.support.dear.twins import CONFIG, Trainee, WholeNumbers, compare, whole_batches
from tests.support.models import MODELS, TOLERANCE, adamw, choices, conditional, sequences, settings
from tests.support.workers import WorkerPools

REPLICATED = replace(CONFIG, update="replicated")


@pytest.mark.quick("*-2", "adamw_two_groups-3")
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", [momentum_sgd, adamw_two_groups])
def test_many_steps(workers: WorkerPools, world_size: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    run = partial(compare, config=REPLICATED)
    for outcome in workers(world_size).run(run, WholeNumbers, whole_batches, optimizer, twins.plain, 12):
        assert outcome.bitwise and outcome.num_buckets > 1 and outcome.stats.step == 12, outcome
        assert outcome.order_known == (world_size > 1), "one rank has nothing to wait for"


@pytest.mark.quick(*(f"{loop}-plain" for loop in (
    "accumulate_then_discard", "change_fusion", "closure", "evaluate_before_step", "idle_forwards", "never_zero_grad",
    "replaced_gradients", "save_and_load", "skipped_by_model", "skipped_step", "two_backwards_then_discard_first",
    "zero_grad_after_forward", "zero_grad_before_step",
)))  # fmt: skip
@pytest.mark.parametrize("find_unused", [False, True], ids=["plain", "find-unused"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(workers: WorkerPools, loop: Callable[[Trainee, int], None], find_unused: bool) -> None:
    run = partial(compare, config=REPLICATED, ddp_options={"find_unused_parameters": find_unused})
    for outcome in workers(2).run(run, WholeNumbers, whole_batches, adamw_two_groups, loop, NUM_STEPS):
        assert outcome.bitwise, outcome


def while_a_thread_reads(twin: Trainee, step: int) -> None:
    """As a logger does: whoever reads first runs the updates."""
    ended, errors = threading.Event(), list[Exception]()

    def read() -> None:
        try:
            while not ended.is_set():
                for parameter in twin.ddp.parameters():
                    assert torch.isfinite(parameter.detach().sum())
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for each in range(4 * step, 4 * step + 4):
            twins.plain(twin, each)
    finally:
        ended.set()
        reader.join()
    assert not errors, errors


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_thread_may_read(workers: WorkerPools, world_size: int) -> None:
    run = partial(compare, config=REPLICATED)
    for outcome in workers(world_size).run(run, WholeNumbers, whole_batches, adamw_two_groups, while_a_thread_reads, 5):
        assert outcome.bitwise, outcome


@pytest.mark.quick("rounded", "inspected", "three-lanes")
@pytest.mark.parametrize("config", [
    replace(REPLICATED, overlap_forward=False),
    replace(REPLICATED, check_replicas=True),
    replace(REPLICATED, wire="bf16"),
    replace(REPLICATED, max_grad_norm=1e9, on_nonfinite="raise"),
    replace(REPLICATED, lanes=3),
    DearConfig(update="replicated"),
], ids=["no-overlap", "checked", "rounded", "inspected", "three-lanes", "defaults"])  # fmt: skip
def test_settings_change_nothing(workers: WorkerPools, config: DearConfig) -> None:
    for outcome in workers(3).run(compare, WholeNumbers, whole_batches, adamw_two_groups, twins.plain, 6, config):
        assert outcome.bitwise, outcome


def test_schedulers_come_too_late(workers: WorkerPools) -> None:
    """The scheduler changes the learning rate after step() and before the update: the update must not see it."""
    run = partial(compare, config=REPLICATED)
    for outcome in workers(2).run(run, WholeNumbers, whole_batches, adamw_two_groups, twins.scheduled, 12):
        assert outcome.bitwise, outcome


@pytest.mark.quick(
    "plain-recomputed-reentrant",
    "plain-frozen",
    "evaluate_on_one_rank-restless",
    "save_and_load-encoder",
)
@pytest.mark.parametrize("name", [
    "encoder", "backwards", "restless", "recomputed-reentrant", "frozen",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt2", "resnet")),
])  # fmt: skip
@pytest.mark.parametrize(
    "loop", [twins.plain, twins.evaluate_on_one_rank, twins.save_and_load], ids=lambda loop: loop.__name__
)
def test_models(workers: WorkerPools, name: str, loop: Any) -> None:
    model, batches, optimizer = MODELS[name]
    config = replace(settings(name).keywords["config"], update="replicated")
    run = partial(settings(name), config=config)
    for outcome in workers(2).run(run, model, batches, optimizer, loop, 8):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


@pytest.mark.quick("2-*", "3-two_backwards")
@pytest.mark.parametrize(
    "loop",
    [twins.plain, twins.zero_grad_to_zeros, twins.two_backwards, twins.accumulate_on_zeros],
    ids=lambda loop: loop.__name__,
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unused_parameters(workers: WorkerPools, world_size: int, loop: Any) -> None:
    run = partial(compare, config=REPLICATED, ddp_options={"find_unused_parameters": True})
    for outcome in workers(world_size).run(run, conditional, choices, adamw, loop, 10):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


@pytest.mark.quick("accumulating")
@pytest.mark.parametrize("loop", [
    partial(clipping.clip_norm, 2.0, 0.05), clipping.clip_then_think_again,
    clipping.clip_while_accumulating, clipping.clip_value,
], ids=["norm", "think-again", "accumulating", "value"])  # fmt: skip
def test_clipping_comes_before_the_gather(workers: WorkerPools, loop: Any) -> None:
    clipping.check(workers, 3, "encoder", loop, update="replicated")


def clip_after_the_step(twin: Trainee, step: int) -> None:
    twins.plain(twin, step)
    if twin.state is not None:
        twin.state.clip_grad_norm_(1e-3)
    else:
        nn.utils.clip_grad_norm_(twin.ddp.parameters(), 1e-3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_may_be_changed_after_the_step(workers: WorkerPools, world_size: int) -> None:
    """Pending updates need them as they were."""
    clipping.check(workers, world_size, "encoder", clip_after_the_step, update="replicated")


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_steps_are_skipped(workers: WorkerPools, world_size: int) -> None:
    loop = clipping.spoilt_on_one_rank
    clipping.check(workers, world_size, "encoder", loop, on_nonfinite="skip", update="replicated")


def test_grad_scaler(workers: WorkerPools) -> None:
    model, optimizer = partial(clipping.half, torch.float16), partial(clipping.momentum_sgd, False)
    run, loop = partial(compare, config=REPLICATED), partial(clipping.scaled, True)
    for outcome in workers(2).run(run, model, sequences, optimizer, loop, 9):
        assert outcome.parameter_gap < 1e-5 and outcome.loss_gap < 1e-5, outcome
