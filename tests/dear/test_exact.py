"""Bit for bit: with whole-number gradients every sum is exact, so DeAR and DDP must agree in every bit.

Prevents: gradients lost, added twice or taken from the wrong backward in any order of the calls that loops make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_hooks import DearConfig
from tests.support.dear import twins
from tests.support.dear.loops import (
    LOOPS,
    NUM_STEPS,
    adagrad,
    adamw_two_groups,
    foreach_adam,
    in_bfloat16,
    momentum_sgd,
)
from tests.support.dear.twins import Trainee, WholeNumbers, whole_batches
from tests.support.workers import WorkerPools


@pytest.mark.quick("*-2", "adamw_two_groups-3", "momentum_sgd-1")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", [momentum_sgd, adamw_two_groups, adagrad, foreach_adam])
def test_many_steps(workers: WorkerPools, world_size: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    outcomes = workers(world_size).run(
        twins.compare, WholeNumbers, whole_batches, optimizer, twins.plain, 12
    )
    for outcome in outcomes:
        assert outcome.bitwise, outcome
        assert outcome.num_buckets > 1, "DDP has not rebuilt its buckets: the state never moved"
        assert outcome.num_atoms > max(outcome.num_buckets, outcome.stats.num_groups), "nothing cut or fused"
        assert outcome.stats.step == 12
        assert (outcome.stats.sent_bytes > 0) == (world_size > 1)


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_loops(workers: WorkerPools, world_size: int, loop: Callable[[Trainee, int], None]) -> None:
    # Plain DDP adds a new local gradient to an old mean and divides again, which is exact for powers of two only.
    exact = world_size != 3 or loop not in (twins.never_zero_grad, twins.two_backwards, twins.idle_forwards)
    optimizer = adamw_two_groups if exact else momentum_sgd  # Adam would blow a rounding error of zero up to a step
    for outcome in workers(world_size).run(twins.compare, WholeNumbers, whole_batches, optimizer, loop, NUM_STEPS):
        assert outcome.bitwise if exact else outcome.parameter_gap < 1e-5, outcome


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops_when_ddp_never_rebuilds(workers: WorkerPools, loop: Callable[[Trainee, int], None]) -> None:
    compare = partial(twins.compare, ddp_options={"find_unused_parameters": True})
    for outcome in workers(2).run(compare, WholeNumbers, whole_batches, momentum_sgd, loop, 9):
        assert outcome.bitwise, outcome


def warm_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made steps before it is handed over, as after loading a checkpoint."""
    optimizer = adamw_two_groups(model)
    for step in range(3):
        for index, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, float(step + index % 3 - 1))
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize(
    ("model", "optimizer"), [(in_bfloat16, momentum_sgd), (WholeNumbers, warm_adamw)], ids=["bfloat16", "warm"]
)
def test_other_beginnings(workers: WorkerPools, model: Any, optimizer: Any) -> None:
    for outcome in workers(3).run(twins.compare, model, whole_batches, optimizer, twins.plain, 6):
        assert outcome.bitwise, outcome


@pytest.mark.slow
def test_many_ranks(workers: WorkerPools) -> None:
    pool = workers(8)  # a power of two, so that plain DDP divides exactly
    for outcome in pool.run(twins.compare, WholeNumbers, whole_batches, adamw_two_groups, twins.accumulate, 6):
        assert outcome.bitwise, outcome
    pool.end()


def compare_in_a_subgroup(rank: int, world_size: int) -> Any:
    members = [2, 0]
    try:
        group = dist.new_group(members, sort_ranks=False)
    except TypeError:  # not in every torch
        members = [0, 2]
        group = dist.new_group(members)
    if rank not in members:
        return None
    return twins.compare(
        members.index(rank), 2, WholeNumbers, whole_batches, adamw_two_groups, twins.plain, 6,
        ddp_options={"process_group": group},
    )  # fmt: skip


def test_a_group_that_is_not_the_world(workers: WorkerPools) -> None:
    pool = workers(3)
    outcomes = pool.run(compare_in_a_subgroup)
    pool.end()  # its ranks no longer agree on the number of groups that were made
    assert outcomes[1] is None and outcomes[0].bitwise and outcomes[2].bitwise, outcomes


@pytest.mark.parametrize("world_size", [1, 4])
def test_scheduler(workers: WorkerPools, world_size: int) -> None:
    for outcome in workers(world_size).run(
        twins.compare, WholeNumbers, whole_batches, adamw_two_groups, twins.scheduled, 12
    ):
        assert outcome.bitwise, outcome


@pytest.mark.parametrize("world_size", [2, 3])
def test_static_graph(workers: WorkerPools, world_size: int) -> None:
    """static_graph rebuilds one step later, and calls all hooks at the end of the first backward."""
    compare = partial(twins.compare, ddp_options={"static_graph": True})
    for outcome in workers(world_size).run(compare, WholeNumbers, whole_batches, adamw_two_groups, twins.plain, 8):
        assert outcome.bitwise and outcome.num_buckets > 1, outcome


@pytest.mark.quick("layers", "none", "float32", "checked")
@pytest.mark.parametrize(
    "config",
    [
        DearConfig(fusion="none", atom_mb=0.01, slice_mb=0.001, lanes=1),
        DearConfig(fusion="layers", fusion_layers=2, atom_mb=0.001, slice_mb=0.5, lanes=4),
        DearConfig(fusion="size", fusion_mb=100, lanes=3, overlap_forward=False),
        DearConfig(),
        replace(twins.CONFIG, wire="float32"),
        replace(twins.CONFIG, check_replicas=True),
    ],
    ids=["none", "layers", "no-forward-overlap", "defaults", "float32", "checked"],
)
def test_settings_change_nothing(workers: WorkerPools, config: DearConfig) -> None:
    for outcome in workers(3).run(
        twins.compare, WholeNumbers, whole_batches, adamw_two_groups, twins.plain, 6, config
    ):
        assert outcome.bitwise, outcome


class Derived(torch.optim.SGD):
    """An optimizer of somebody's own, on top of another: torch runs step hooks for both."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def built_on_another(model: nn.Module) -> torch.optim.Optimizer:
    torch.optim.SGD([nn.Parameter(torch.ones(1))])  # from now on SGD.step has hooks of its own
    return Derived(model.parameters(), lr=0.125, momentum=0.5)


@pytest.mark.parametrize("loop", [twins.plain, twins.closure], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_optimizers_on_top_of_others(workers: WorkerPools, loop: Any, update: Any) -> None:
    config = replace(twins.CONFIG, update=update, assume_elementwise=True)
    for outcome in workers(2).run(twins.compare, WholeNumbers, whole_batches, built_on_another, loop, 6, config):
        assert outcome.bitwise and outcome.stats.step == 6, outcome
