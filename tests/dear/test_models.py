"""Real networks in float64: DeAR and DDP agree to 1e-10 over twenty steps, with forwards overlapping gathers.

Prevents: a parameter read before its gather, in the places where modules do not own up to what they read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from tests.support.dear import twins
from tests.support.dear.twins import compare
from tests.support.models import (
    MODELS,
    TOLERANCE,
    adamw,
    choices,
    conditional,
    images,
    resnet,
    settings,
    sgd,
)
from tests.support.workers import WorkerPools


def cases() -> list[Any]:
    """Every model on every number of ranks; what takes long on many of them is marked slow."""
    long = {(name, size) for name in ("resnet", "bert", "gpt2") for size in (1, 3)} | {(name, 4) for name in MODELS}
    return [
        pytest.param(world_size, name, marks=[pytest.mark.slow] if (name, world_size) in long else [])
        for world_size in (1, 2, 3, 4)
        for name in MODELS
    ]


@pytest.mark.quick(
    "2-backwards",
    "2-restless",
    "2-recomputed-reentrant",
    "2-frozen",
    "2-encoder",
    "1-restless",
)
@pytest.mark.parametrize(("world_size", "name"), cases())
def test_twenty_steps(workers: WorkerPools, world_size: int, name: str) -> None:
    model, batches, optimizer = MODELS[name]
    outcomes = workers(world_size).run(settings(name), model, batches, optimizer, twins.plain, 20)
    for outcome in outcomes:
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome
        assert outcome.order_known == (world_size > 1), "one rank has nothing to wait for"
        assert outcome.loss_drop > 0, "the model does not learn, so equality would mean little"


@pytest.mark.quick("evaluate_between-backwards", "evaluate_on_one_rank-encoder", "save_and_load-bert")
@pytest.mark.parametrize("name", ["bert", "encoder", "backwards", pytest.param("resnet", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "loop", [twins.evaluate_between, twins.evaluate_on_one_rank, twins.save_and_load], ids=lambda loop: loop.__name__
)
def test_evaluation_and_checkpoints(workers: WorkerPools, name: str, loop: Any) -> None:
    """Evaluation may take fused paths that read parameters of modules whose forward never runs."""
    model, batches, optimizer = MODELS[name]
    for outcome in workers(2).run(settings(name), model, batches, optimizer, loop, 7):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


@pytest.mark.quick("encoder")
@pytest.mark.parametrize("name", ["encoder", "bert"])
def test_double_forward(workers: WorkerPools, name: str) -> None:
    model, batches, optimizer = MODELS[name]
    for outcome in workers(3).run(compare, model, batches, optimizer, twins.double_forward, 7):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


def single_precision(world_size: int) -> nn.Module:
    return resnet(world_size).float()


def single_images(rank: int, world_size: int, step: int) -> tuple[Tensor, Tensor]:
    batch, labels = images(rank, world_size, step)
    return batch.float(), labels


@pytest.mark.slow
def test_single_precision(workers: WorkerPools) -> None:
    for outcome in workers(2).run(settings("resnet"), single_precision, single_images, sgd, twins.plain, 5):
        assert outcome.parameter_gap < 1e-5, outcome


@pytest.mark.quick("2-*", "3-two_backwards", "1-plain")
@pytest.mark.parametrize(
    "loop",
    [twins.plain, twins.zero_grad_to_zeros, twins.two_backwards, twins.accumulate_on_zeros],
    ids=lambda loop: loop.__name__,
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unused_parameters(workers: WorkerPools, world_size: int, loop: Any) -> None:
    """Momentum, decay and step counts of parameters that nobody used stay as plain DDP leaves them."""
    run = partial(compare, ddp_options={"find_unused_parameters": True})
    for outcome in workers(world_size).run(run, conditional, choices, adamw, loop, 10):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome
