"""Bit for bit: with whole-number gradients every sum is exact, so an extended model and stock FSDP2 must agree.

Prevents: gradients that are delivered too late, added to what is not there yet, or lost, in any loop that people write.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.tensor import DTensor

from fsdp_ext import ExtConfig
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.exact import (
    BF16,
    BF16_SUMMED_IN_32,
    FP16_SUMS,
    LOOPS,
    SMALL,
    all_reduce_hook,
    check,
    divide_by_eight,
    each,
    force_sums,
    hook_on_gradients,
    include_unused,
    train_gpt2,
)
from tests.support.fsdp_ext.twins import CONFIG, NUM_STEPS, Block, Trainee
from tests.support.fsdp_ext.unusual import needs_unused
from tests.support.workers import WorkerPools


@pytest.mark.quick("*-1", "*-2")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(workers: WorkerPools, world_size: int, loop: Callable[[Trainee, int], None]) -> None:
    model_options, num_groups = ({}, 6) if world_size == 3 else (SMALL, 3)
    stats = check(workers(world_size).run(twins.compare, loop, NUM_STEPS, CONFIG, {}, model_options))
    if world_size > 1:
        assert stats.gathers and stats.deferred == stats.reduce_scatters >= num_groups * NUM_STEPS
    else:
        assert stats.sent_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [5, 6, 7, 8])
def test_more_ranks(workers: WorkerPools, world_size: int) -> None:
    stats = check(workers(world_size).run(twins.compare, twins.two_backwards, NUM_STEPS, CONFIG, {}, SMALL))
    assert 0 < stats.deferred == stats.reduce_scatters


# The first backward of several is a plain one.
@pytest.mark.quick("*-two_backwards-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("loop", [twins.plain, twins.two_backwards, twins.accumulate])
@pytest.mark.parametrize(
    ("options", "model_options"),
    [
        ({"mp_policy": BF16}, {}),
        ({"mp_policy": BF16_SUMMED_IN_32}, {}),
        ({"mp_policy": FP16_SUMS}, {}),
        ({"reshard_after_forward": False}, {}),
        ({}, {"frozen": True}),
        ({}, {"idle": True}),
    ],
    ids=["bf16", "bf16-summed-in-float32", "fp16-sums", "kept-after-forward", "frozen", "unused"],
)
def test_settings(
    workers: WorkerPools,
    world_size: int,
    loop: Callable[[Trainee, int], None],
    options: dict[str, Any],
    model_options: dict[str, Any],
) -> None:
    num_steps = NUM_STEPS if "idle" in model_options else 3
    model_options = {"num_blocks": 3, **model_options}
    stats = check(workers(world_size).run(twins.compare, loop, num_steps, CONFIG, options, model_options))
    # Gradients of an unknown part of the parameters are added to what the first of two backwards has left.
    waits_at_times = "idle" in model_options and loop is twins.two_backwards
    assert stats.deferred and (stats.deferred < stats.reduce_scatters) == waits_at_times


@pytest.mark.parametrize("loop", [twins.zero_grad_to_zeros, twins.never_zero_grad])
def test_gradients_that_are_there_while_others_are_not(
    workers: WorkerPools, loop: Callable[[Trainee, int], None]
) -> None:
    """Parameters that every other step uses: some gradients are added to, and which they are FSDP2 does not tell."""
    stats = check(workers(2).run(twins.compare, loop, NUM_STEPS, CONFIG, {}, {"idle": True}))
    assert 0 < stats.deferred < stats.reduce_scatters


@pytest.mark.slow
@pytest.mark.parametrize("loop", [twins.plain, twins.two_backwards, twins.accumulate, twins.clip])
def test_kept_on_two_ranks(workers: WorkerPools, loop: Callable[[Trainee, int], None]) -> None:
    options = {"reshard_after_forward": 2}
    stats = check(workers(4).run(twins.compare, loop, NUM_STEPS, CONFIG, options, SMALL))
    assert stats.deferred


@pytest.mark.parametrize(
    "config",
    [
        ExtConfig(lanes=1, slice_mb=0.01, timeout_s=20, stall_warning_s=10, defer=False),
        ExtConfig(lanes=3, slice_mb=0.001, timeout_s=20, stall_warning_s=10, pending_mb=0.03),
        ExtConfig(lanes=1, slice_mb=0.01, timeout_s=20, stall_warning_s=10, prefetch=0),
        ExtConfig(lanes=1, slice_mb=0.01, timeout_s=20, stall_warning_s=10, prefetch=9),
        ExtConfig(timeout_s=20, stall_warning_s=10),
    ],
    ids=["waiting", "bounded", "no-prefetch", "all-ahead", "measured-link"],
)
def test_configurations(workers: WorkerPools, config: ExtConfig) -> None:
    stats = check(workers(2).run(twins.compare, twins.two_forwards, 4, config))
    assert (stats.deferred == 0) == (not config.defer)


# -- what FSDP2 lets users set ---------------------------------------------------------------------------------------


def checkpoint_activations(model: nn.Module) -> None:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))


def own_lists(model: nn.Module) -> None:
    blocks = each(model)
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])


@pytest.mark.quick("*-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("prepare", "waits"),
    [
        (force_sums, False),
        (divide_by_eight, False),
        (all_reduce_hook, True),
        (hook_on_gradients, True),
        pytest.param(include_unused, False, marks=needs_unused),
        (checkpoint_activations, False),
        (own_lists, False),
    ],
)
def test_preparations(workers: WorkerPools, world_size: int, prepare: Callable[[nn.Module], None], waits: bool) -> None:
    run = workers(world_size).run
    stats = check(run(twins.compare, twins.plain, NUM_STEPS, CONFIG, {}, {"idle": True, **SMALL}, 1, prepare))
    assert (stats.deferred == 0) == waits


@pytest.mark.quick("two_backwards-model_options1-None", "plain-model_options2-divide_by_eight")
@pytest.mark.parametrize(
    ("loop", "model_options", "prepare"),
    [
        (twins.plain, {}, hook_on_gradients),
        (twins.two_backwards, {"idle": True, **SMALL}, None),
        (twins.plain, SMALL, divide_by_eight),
    ],
)
def test_sums_in_another_type_that_are_divided(
    workers: WorkerPools, loop: Callable[[Trainee, int], None], model_options: dict[str, Any], prepare: Any
) -> None:
    """In that type, whether they are waited for or not."""
    options = {"mp_policy": FP16_SUMS}
    stats = check(workers(3).run(twins.compare, loop, NUM_STEPS, CONFIG, options, model_options, 1, prepare))
    assert (stats.deferred < stats.reduce_scatters) == (prepare is not divide_by_eight)


def two_forwards_twice(twin: Trainee, step: int) -> None:
    """With zeros for what is unused FSDP2 reduces a block at its last use, and again at its first one."""
    twin.optimizer.zero_grad()
    for part in range(2):
        (twin.loss(2 * step + part) + twin.loss(2 * step + part + 90)).backward()
    twin.see_gradients()
    twin.optimizer.step()


@needs_unused
@pytest.mark.quick("2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_modules_that_are_reduced_twice(workers: WorkerPools, world_size: int) -> None:
    check(workers(world_size).run(twins.compare, two_forwards_twice, NUM_STEPS, CONFIG, {}, SMALL, 1, include_unused))


def test_ignored_parameters(workers: WorkerPools) -> None:
    assert all(workers(2).run(train_with_ignored))


def train_with_ignored(rank: int, world_size: int) -> bool:
    """Parameters that FSDP2 leaves alone, on both twins alike."""
    torch.manual_seed(7)
    original = twins.WholeNumbers(world_size)
    models = []
    for extended in (True, False):
        model = copy.deepcopy(original)
        ignored = {model.get_parameter("blocks.1.layers.0.weight"), model.get_parameter("head.weight")}
        for block in model.blocks:
            twins.fully_shard(block, ignored_params=ignored)
        twins.fully_shard(model, ignored_params=ignored)
        if extended:
            twins.extend(model, CONFIG)
        trainee = Trainee(model, twins.momentum_sgd(model), lambda step: 1000 * step + 10 * rank)
        for step in range(NUM_STEPS):
            twins.plain(trainee, step)
        assert not isinstance(model.head.weight, DTensor)
        models.append(model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    same = all(torch.equal(twins.local(a), twins.local(b)) for a, b in pairs)
    twins.restore(models[0])
    return same and not torch.equal(models[1].head.weight, original.head.weight)


def divided_by(rank: int, world_size: int, factor: float) -> list[float]:
    """With a factor stock FSDP2 fails on gloo, which has no products before sums; ours multiplies by itself."""
    torch.manual_seed(3)
    model = twins.shard(twins.WholeNumbers(world_size))
    for module in each(model):
        module.set_gradient_divide_factor(factor)
    twins.extend(model, CONFIG)
    model(5).backward()
    grad: Any = model.get_parameter("head.weight").grad
    values: list[float] = grad.full_tensor().flatten().tolist()
    twins.restore(model)
    return values


def test_a_divide_factor_needs_no_forced_sums(workers: WorkerPools) -> None:
    by_two, by_eight = (workers(2).run(divided_by, factor)[0] for factor in (2.0, 8.0))
    assert any(by_two) and by_two == [4 * value for value in by_eight]


# -- real models ----------------------------------------------------------------------------------------------------


def all_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def test_many_steps_of_adamw(workers: WorkerPools) -> None:
    check(workers(3).run(twins.compare, twins.clip, 8, CONFIG, {}, SMALL, 1, None, all_adam))


def test_gpt2_with_tied_weights(workers: WorkerPools) -> None:
    assert max(workers(2).run(train_gpt2, False)) < 1e-10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_gpt2_with_compiled_blocks(workers: WorkerPools) -> None:
    assert max(workers(2).run(train_gpt2, True, timeout_s=240)) < 1e-10
