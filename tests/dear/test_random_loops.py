"""Loops that do anything in any order: accumulate, evaluate, save, load, clip, skip, regroup. Always as plain DDP.

Prevents: combinations that nobody thought of. Replicas are compared after every step, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.dear import twins
from tests.support.dear.twins import CONFIG, Trainee, compare
from tests.support.models import MODELS, TOLERANCE
from tests.support.workers import WorkerPools


def accumulate(twin: Trainee, step: int) -> None:
    """Several micro-batches; a backward under no_sync after a synchronised one is refused, so not then."""
    for micro_batch in range(0 if twin.memory.get("synchronised") else step % 3):
        with twin.ddp.no_sync():
            twin.loss(50 * step + micro_batch).backward()
    backward(twin, step)


def backward(twin: Trainee, step: int) -> None:
    twin.loss(step).backward()
    twin.memory["synchronised"] = True


def clip(twin: Trainee, step: int) -> None:
    if twin.state is not None:
        total = twin.state.clip_grad_norm_(0.05)
    else:
        total = nn.utils.clip_grad_norm_(twin.ddp.parameters(), 0.05)
    twin.losses.append(float(total))


def zero_grad(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad(set_to_none=step % 2 == 0)
    twin.memory["synchronised"] = False


def zero_grad_on_model(twin: Trainee, step: int) -> None:
    twin.ddp.zero_grad(set_to_none=step % 3 != 0)


def update(twin: Trainee, step: int) -> None:
    twin.optimizer.step()


def evaluate(twin: Trainee, step: int) -> None:
    with torch.no_grad(), twins.evaluating(twin.ddp):
        twin.losses.append(float(twin.ddp.module(*twin.batch(step))))


def save(twin: Trainee, step: int) -> None:
    optimizer = twin.optimizer.state_dict() if twin.state is None else twin.state.full_optimizer_state_dict()
    twin.memory["saved"] = copy.deepcopy((twin.ddp.module.state_dict(), optimizer))


def load(twin: Trainee, step: int) -> None:
    if "saved" in twin.memory:
        model, optimizer = copy.deepcopy(twin.memory["saved"])  # torch makes what it loads its own
        twin.ddp.module.load_state_dict(model)
        twin.optimizer.load_state_dict(optimizer)


def regroup(twin: Trainee, step: int) -> None:
    if twin.state is not None and twin.state._driver.reduction is None:
        twin.state.set_fusion("size", mb=0.01 * (step % 7 + 1))


ACTIONS: list[Callable[[Trainee, int], None]] = [
    *[backward, accumulate, clip, zero_grad, zero_grad_on_model, update, evaluate, save, load, regroup],
]
# Mostly whole steps, with anything between them.
steps = st.lists(st.sampled_from(ACTIONS), max_size=3).map(lambda extras: [*extras, zero_grad, accumulate, update])


def play(script: list[list[Callable[[Trainee, int], None]]], twin: Trainee, step: int) -> None:
    for action in script[step]:
        action(twin, step)


def agrees(
    workers: WorkerPools, world_size: int, script: list[list[Callable[[Trainee, int], None]]], update: Any
) -> None:
    model, batches, optimizer = MODELS["encoder"]
    config = replace(CONFIG, check_replicas=len(script) % 2 == 0, update=update)
    run = partial(compare, config=config)
    for outcome in workers(world_size).run(run, model, batches, optimizer, partial(play, script), len(script)):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


updates = st.sampled_from(["sharded", "replicated"])
quiet = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@settings(quiet, max_examples=8, phases=[Phase.generate])
@given(script=st.lists(steps, min_size=12, max_size=16), update=updates)
def test_two_ranks(workers: WorkerPools, script: list[list[Callable[[Trainee, int], None]]], update: str) -> None:
    agrees(workers, 2, script, update)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@settings(quiet, max_examples=40)
@given(script=st.lists(steps, min_size=12, max_size=25), world_size=st.sampled_from([1, 2, 3, 4]), update=updates)
def test_five_hundred_steps(
    workers: WorkerPools, world_size: int, script: list[list[Callable[[Trainee, int], None]]], update: str
) -> None:
    agrees(workers, world_size, script, update)
