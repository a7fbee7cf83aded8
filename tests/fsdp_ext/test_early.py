"""Reduce-scatters in parts that begin when gradients are ready, where the whole has to be waited for.

Prevents: parts that differ between ranks, that miss a hook's change of a gradient, or that are sent when nothing is to
be reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from fsdp_ext import extend, restore
from fsdp_ext.compat import whole_parameters_of
from fsdp_ext.early import EarlyReduceScatter
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.exact import (
    BF16,
    BF16_SUMMED_IN_32,
    FP16_SUMS,
    LOOPS,
    SMALL,
    check,
    force_sums,
    hook_on_gradients,
    include_unused,
    train_gpt2,
)
from tests.support.fsdp_ext.twins import CONFIG, NUM_STEPS, WAITING, Trainee
from tests.support.fsdp_ext.unusual import failing_micro_batch, needs_reset, needs_unused
from tests.support.workers import WorkerPools


@pytest.mark.quick("accumulate_unsharded", "clip", "discarded", "never_zero_grad", "two_backwards")
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(workers: WorkerPools, loop: Callable[[Trainee, int], None]) -> None:
    stats = check(workers(2).run(twins.compare, loop, NUM_STEPS, WAITING, {}, SMALL))
    assert stats.deferred == 0 < stats.early


@pytest.mark.quick("3-plain")
@pytest.mark.parametrize(("world_size", "loop"), [(3, twins.plain), (4, twins.two_backwards), (5, twins.plain)])
def test_more_ranks(workers: WorkerPools, world_size: int, loop: Callable[[Trainee, int], None]) -> None:
    stats = check(workers(world_size).run(twins.compare, loop, NUM_STEPS, WAITING))
    assert stats.early


@pytest.mark.quick(*(f"{kind}-accumulate-2" for kind in ("bf16-summed-in-float32", "frozen", "offloaded", "unused")))
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("loop", [twins.plain, twins.accumulate])
@pytest.mark.parametrize(
    ("options", "model_options", "early"),
    [
        ({"mp_policy": BF16}, {}, True),
        ({"mp_policy": BF16_SUMMED_IN_32}, {}, True),
        ({"mp_policy": FP16_SUMS}, {}, False),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}, True),
        ({"reshard_after_forward": False}, {}, True),
        ({}, {"frozen": True}, True),
        ({}, {"idle": True}, True),
    ],
    ids=["bf16", "bf16-summed-in-float32", "fp16-sums", "offloaded", "kept-after-forward", "frozen", "unused"],
)
def test_settings(
    workers: WorkerPools,
    world_size: int,
    loop: Callable[[Trainee, int], None],
    options: dict[str, Any],
    model_options: dict[str, Any],
    early: bool,
) -> None:
    config = CONFIG if "offload_policy" in options else WAITING
    model_options = {"num_blocks": 3, **model_options}
    stats = check(workers(world_size).run(twins.compare, loop, NUM_STEPS, config, options, model_options))
    if loop is twins.accumulate:  # sums of earlier backwards may be of another type; together they use all parameters
        early = early and options.get("mp_policy") is not BF16_SUMMED_IN_32
    elif "idle" in model_options:
        early = False
    assert stats.deferred == 0 and bool(stats.early) == early


@pytest.mark.parametrize(("prepare", "early"), [(force_sums, True), (hook_on_gradients, True)])
def test_preparations(workers: WorkerPools, prepare: Callable[[nn.Module], None], early: bool) -> None:
    stats = check(workers(2).run(twins.compare, twins.plain, NUM_STEPS, WAITING, {}, SMALL, 1, prepare))
    assert bool(stats.early) == early


def different_parts(twin: Trainee, step: int) -> None:
    """Every rank uses other parameters."""
    twin.optimizer.zero_grad()
    twin.loss(step + dist.get_rank()).backward()
    twin.optimizer.step()


@needs_unused
@pytest.mark.quick("2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_use_different_parameters(workers: WorkerPools, world_size: int) -> None:
    """FSDP2 allows it, with zeros for what is unused. Gradients then come early on some ranks only."""
    options = {"idle": True}
    stats = check(
        workers(world_size).run(twins.compare, different_parts, NUM_STEPS, WAITING, {}, options, 1, include_unused)
    )
    assert stats.early


@needs_unused
def test_modules_that_run_twice(workers: WorkerPools) -> None:
    check(workers(2).run(twins.compare, twins.two_forwards, NUM_STEPS, WAITING, {}, SMALL, 1, include_unused))


# -- gradients that hooks change after they have come -----------------------------------------------------------------


def in_place(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    weight.grad.view(-1)[1] *= 2


def by_data(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    weight.grad.data.mul_(2)


def by_another(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    weight.grad = weight.grad * 2


def changing(change: Callable[[nn.Parameter], None]) -> Callable[[nn.Module], None]:
    """On rank 1 alone, from the fourth backward on."""

    def prepare(model: nn.Module) -> None:
        calls = 0

        def hook(layer: nn.Module, *ignored: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > 3:
                change(layer.get_parameter("weight"))

        if dist.get_rank() == 1:
            model.get_submodule("blocks.1.layers.2").register_full_backward_hook(hook)

    return prepare


def train_with_changes(rank: int, world_size: int, change: Callable[[nn.Parameter], None]) -> twins.Outcome:
    return twins.compare(rank, world_size, twins.plain, 6, WAITING, {}, {}, 1, changing(change))


@pytest.mark.parametrize("change", [in_place, by_data, by_another])
def test_gradients_that_were_changed_on_one_rank_are_sent_again(
    workers: WorkerPools, change: Callable[[nn.Parameter], None]
) -> None:
    stats = check(workers(2).run(train_with_changes, change))
    assert stats.early == 1 + 4, "one block until then, and another one after its second"


# -- the same as the whole --------------------------------------------------------------------------------------------


def as_the_whole(rank: int, world_size: int) -> tuple[bool, int]:
    """Train on fractions, in parts and as a whole; are the models the same?"""
    parameters, num_early = [], 0
    prepare: Any = EarlyReduceScatter.prepare
    for in_parts in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(67, 50), nn.GELU(), nn.Linear(50, 67)) for _ in range(2)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        extension = extend(model, WAITING)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        EarlyReduceScatter.prepare = prepare if in_parts else lambda *_: None  # type: ignore[method-assign]
        try:
            for step in range(4):
                batch = torch.randn(5, 67, generator=torch.Generator().manual_seed(10 * step + rank))
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        finally:
            EarlyReduceScatter.prepare = prepare  # type: ignore[method-assign]
        num_early += extension.stats().early
        parameters.append(twins.shards(model))
        restore(model)
    return twins.same(*parameters), num_early


@pytest.mark.quick("3")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parts_add_in_the_order_of_the_whole(workers: WorkerPools, world_size: int) -> None:
    assert workers(world_size).run(as_the_whole) == [(True, 2 * 2)] * world_size


# -- models and failures ----------------------------------------------------------------------------------------------


@pytest.mark.quick("False")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.timeout(300)
def test_gpt2(workers: WorkerPools, compiled: bool) -> None:
    """Two numbers have one sum, whatever their order."""
    assert workers(2).run(train_gpt2, compiled, WAITING, torch.float32, timeout_s=240) == [0, 0]


class Checkpointed(nn.Module):
    """Runs again in the backward, in one of its own if ``reentrant``."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.Sequential(nn.Linear(67, 50), nn.GELU(), nn.Linear(50, 67))

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.layers, batch, use_reentrant=self.reentrant)
        return result


def train_checkpointed(rank: int, world_size: int, reentrant: bool) -> tuple[float, int]:
    """The largest difference between extended and stock, and what began early."""
    models, num_early = [], 0
    for extended in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(*(Checkpointed(reentrant) for _ in range(3)))
        for block in model:
            fully_shard(block)
        fully_shard(model)
        extension = extend(model, WAITING) if extended else None
        for step in range(4):
            batch = torch.randn(5, 67, generator=torch.Generator().manual_seed(10 * step + rank))
            model(batch.requires_grad_()).square().mean().backward()
        num_early += 0 if extension is None else extension.stats().early
        models.append([twins.local(parameter.grad) for parameter in model.parameters()])
        restore(model)
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(*models, strict=True)), num_early


@pytest.mark.parametrize(("reentrant", "num_early"), [(False, 3 * 2), (True, 0)])
def test_checkpoints(workers: WorkerPools, reentrant: bool, num_early: int) -> None:
    for gap, early in workers(2).run(train_checkpointed, reentrant):
        assert gap == 0 and early == num_early, "two numbers have one sum"


@needs_reset
def test_backwards_that_fail(workers: WorkerPools) -> None:
    assert workers(2).run(failing_micro_batch, None, False, WAITING) == [True, True]


def num_hooks(rank: int, world_size: int) -> tuple[int, int]:
    """On whole parameters of a block, after a backward of the extended model, and when it is as before."""
    model = twins.shard(twins.WholeNumbers(world_size))
    extend(model, WAITING)
    model(rank).backward()
    block: Any = model.get_submodule("blocks.1")
    whole: tuple[Any, ...] = whole_parameters_of(block) or ()

    def count() -> int:
        return sum(len(each._post_accumulate_grad_hooks or ()) for each in whole)

    before = count()
    restore(model)
    return before, count()


def test_restore_leaves_no_hooks(workers: WorkerPools) -> None:
    assert workers(2).run(num_hooks) == [(3, 0)] * 2
