"""Averaging over replicas (HSDP) in the place of FSDP2, against FSDP2's own all-reduce.

Prevents: results that are used before they have come, and sums over the wrong ranks.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import fsdp_ext.deferred
from fsdp_ext import ExtConfig, extend, restore
from fsdp_ext.early import EarlyReduceScatter, Phase
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.exact import BF16, FP16_SUMS, SMALL, all_reduce_hook, check, divide_by_eight, each
from tests.support.fsdp_ext.twins import CONFIG, NUM_STEPS, WAITING, Outcome, Trainee, WholeNumbers
from tests.support.fsdp_ext.unusual import Failing, needs_reset
from tests.support.workers import WorkerPools

NUM_GROUPS = 3  # of parameters in a SMALL model

several_before_the_all_reduce = partial(twins.accumulate, setting="set_requires_all_reduce")
"""Accumulation in shards, which replicas sum once."""


def replicated(world_size: int, num_blocks: int) -> nn.Module:
    """A model in two replicas."""
    return twins.shard(WholeNumbers(world_size, num_blocks=num_blocks), twins.mesh_of(world_size, 2))


@pytest.mark.quick("bf16-two_backwards", "float32-clip")
@pytest.mark.parametrize("loop", [twins.plain, twins.two_backwards, twins.accumulate, twins.clip, twins.discarded])
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["float32", "bf16"])
def test_loops(workers: WorkerPools, loop: Callable[[Trainee, int], None], options: dict[str, Any]) -> None:
    stats = check(workers(4).run(twins.compare, loop, NUM_STEPS, CONFIG, options, SMALL, 2))
    assert stats.deferred == stats.reduce_scatters - 1, "only the first one has to wait"


@pytest.mark.quick("bf16")
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["float32", "bf16"])
def test_several_before_the_all_reduce(workers: WorkerPools, options: dict[str, Any]) -> None:
    stats = check(workers(4).run(twins.compare, several_before_the_all_reduce, NUM_STEPS, CONFIG, options, SMALL, 2))
    assert stats.deferred == stats.reduce_scatters - 7, "all wait until the first all-reduce was seen"


@pytest.mark.parametrize("config", [WAITING, CONFIG], ids=["waiting", "deferred"])
def test_bytes_of_one_all_reduce_in_place_of_three(workers: WorkerPools, config: ExtConfig) -> None:
    run, num_steps = workers(4).run, 3
    once = check(run(twins.compare, several_before_the_all_reduce, num_steps, config, {}, SMALL, 2))
    always = check(run(twins.compare, twins.two_backwards, num_steps, config, {}, SMALL, 2))
    assert bool(once.deferred) == bool(always.deferred) == config.defer
    assert bool(once.early) == bool(always.early) == (not config.defer)
    assert (once.gathers, once.reduce_scatters) == (always.gathers, always.reduce_scatters)
    assert 3 * once.all_reduces == always.all_reduces == 3 * num_steps * NUM_GROUPS
    # Of two replicas each sends its half of the sums, and the other's half of the gradients: all numbers of a shard.
    parameters = WholeNumbers(4, num_blocks=2).parameters()
    numel = sum(math.ceil(parameter.shape[0] / 2) * parameter[0].numel() for parameter in parameters)
    assert always.sent_bytes - once.sent_bytes == 2 * num_steps * 4 * numel


def sum_of_two_forwards(twin: Trainee, step: int) -> None:
    """Modules are reduced twice in a backward, most without an all-reduce, and one with all of them."""
    model: Any = twin.model
    twin.optimizer.zero_grad()
    for part in range(2):
        model.set_requires_all_reduce(part == 1)
        model.blocks[0].set_requires_all_reduce(True)
        (twin.loss(100 * step + part) + twin.loss(100 * step + 50 + part)).backward()
    twin.see_gradients()
    twin.optimizer.step()


def sum_over_steps(twin: Trainee, step: int) -> None:
    """A step without an all-reduce adds to the next one's."""
    model: Any = twin.model
    model.set_requires_all_reduce(step % 2 == 1)
    twins.two_backwards(twin, step)


@pytest.mark.quick("sum_of_two_forwards-float32", "sum_over_steps-bf16")
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["float32", "bf16"])
@pytest.mark.parametrize("loop", [sum_of_two_forwards, sum_over_steps])
def test_other_loops_without_an_all_reduce(workers: WorkerPools, loop: Any, options: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, pending_mb=0.01)
    assert check(workers(4).run(twins.compare, loop, NUM_STEPS, config, options, SMALL, 2)).deferred > 0


def fail_before_the_all_reduce(rank: int, world_size: int) -> bool:
    """Return True if nothing of a backward that fails, and was reset, gets into the sums of later micro-batches."""

    def run(model: Any) -> list[Tensor]:
        seen = []
        for step in range(4):
            model.zero_grad()
            model.set_requires_all_reduce(False)
            if step % 2:
                handle = model.blocks[2].register_forward_hook(lambda module, given, total: Failing.apply(total))
                with pytest.raises(twins.Stopped):
                    model(1000 * step + 77 + rank).backward()
                handle.remove()
                model.reset_iter_state()
            model(1000 * step + 55 + rank).backward()
            model.set_requires_all_reduce(True)
            model(1000 * step + rank).backward()
            seen += [twins.local(parameter.grad).clone() for parameter in model.parameters()]
        return seen

    return twins.same(*twins.on_both(lambda: replicated(world_size, num_blocks=3), run))


@needs_reset
def test_a_failure_before_the_all_reduce(workers: WorkerPools) -> None:
    assert all(workers(4).run(fail_before_the_all_reduce))


def extend_between(rank: int, world_size: int) -> bool:
    """Return True if models have stock's bits that are extended, or restored, after some of the micro-batches."""

    def run(extended: bool) -> list[Tensor]:
        torch.manual_seed(7)
        model: Any = replicated(world_size, **SMALL)
        seen = []
        for step in range(3):
            model.zero_grad()
            for part in range(4):
                if extended:
                    (extend if part % 2 else restore)(model, *(CONFIG,) * (part % 2))
                model.set_requires_all_reduce(part == 3)
                model(100 * step + 10 * part + rank).backward()
            seen += [twins.local(parameter.grad).clone() for parameter in model.parameters()]
        return seen

    return twins.same(run(True), run(False))


def test_extended_between_micro_batches(workers: WorkerPools) -> None:
    assert all(workers(4).run(extend_between))


def advice(rank: int, world_size: int, loops: list[Callable[[Trainee, int], None]]) -> list[list[str]]:
    """Per loop what is told in two steps."""
    told: list[list[str]] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told[-1].append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_ext").addHandler(handler)
    for loop in loops:
        told.append([])
        model = replicated(world_size, **SMALL)
        extend(model, CONFIG)
        trainee = Trainee(model, twins.momentum_sgd(model), lambda step: 1001 * step + 10 * rank)
        for step in range(2):
            loop(trainee, step)
        restore(model)
    logging.getLogger("fsdp_ext").removeHandler(handler)
    return told


def test_advice(workers: WorkerPools) -> None:
    """For accumulation that sums over replicas each time; not for zeros, two forwards, one sum, or whole gradients."""
    others = [twins.zero_grad_to_zeros, twins.two_forwards, several_before_the_all_reduce, twins.accumulate]
    (*nothing, told), *others_told = workers(4).run(advice, [*others, twins.two_backwards])
    assert len(told) == 1 and "set_requires_all_reduce(False)" in told[0]
    assert nothing == [[]] * 4 and others_told == [[[]] * 5] * 3


@pytest.mark.quick("False-plain")
@pytest.mark.parametrize("loop", [twins.plain, twins.two_backwards])
@pytest.mark.parametrize("early", [True, False])
def test_waiting(workers: WorkerPools, loop: Callable[[Trainee, int], None], early: bool) -> None:
    config = dataclasses.replace(WAITING, early=early)
    stats = check(workers(4).run(twins.compare, loop, 3, config, {}, SMALL, 2))
    assert stats.deferred == 0 and bool(stats.early) == early


def divide_by_two(model: nn.Module) -> None:
    """Gradients are summed over replicas then; gloo has no sums of multiples, so this is the number of shards."""
    for module in each(model):
        module.set_gradient_divide_factor(2.0)


@pytest.mark.quick("fp16-sums")
@pytest.mark.parametrize(
    ("options", "prepare"),
    [({}, divide_by_two), ({}, divide_by_eight), ({"mp_policy": FP16_SUMS}, None)],
    ids=["divided-by-two", "divided-by-eight", "fp16-sums"],
)
def test_sums_that_are_divided(workers: WorkerPools, options: dict[str, Any], prepare: Any) -> None:
    stats = check(workers(4).run(twins.compare, twins.two_backwards, 2, CONFIG, options, SMALL, 2, prepare))
    assert stats.deferred == stats.reduce_scatters - 1


def train_fractions(
    rank: int, world_size: int, policy: MixedPrecisionPolicy, prepare: Any, micro_batches: int = 1
) -> bool:
    """Return True if gradients of any numbers have stock's bits: two numbers have one sum, divided where stock does."""
    mesh = twins.mesh_of(world_size, 2)

    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(33, 33), nn.Tanh()) for _ in range(3)))
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if prepare is not None:
            prepare(model)
        return model

    def run(model: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            model.zero_grad()
            for part in range(micro_batches):
                model.set_requires_all_reduce(part == micro_batches - 1)
                model(torch.randn(7, 33, generator=generator)).float().square().sum().backward()
            seen += [twins.local(parameter.grad).clone() for parameter in model.parameters()]
        return seen

    return twins.same(*twins.on_both(build, run))


@pytest.mark.quick("float32-None", "float32-divide_by_two", "fp16-sums-divide_by_two")
@pytest.mark.parametrize("prepare", [None, divide_by_two, divide_by_eight])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16, FP16_SUMS], ids=["float32", "bf16", "fp16-sums"])
def test_fractions(workers: WorkerPools, policy: MixedPrecisionPolicy, prepare: Any) -> None:
    assert all(workers(4).run(train_fractions, policy, prepare))


@pytest.mark.quick("bf16")
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16, FP16_SUMS], ids=["float32", "bf16", "fp16-sums"])
def test_fractions_of_several_before_the_all_reduce(workers: WorkerPools, policy: MixedPrecisionPolicy) -> None:
    assert all(workers(4).run(train_fractions, policy, None, 3))


def hook_that_all_reduces(model: nn.Module) -> None:
    for module in each(model):
        module.set_all_reduce_hook(_all_reduce)


def _all_reduce(reduced: Tensor) -> None:
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)


@pytest.mark.quick("offloaded", "hook")
@pytest.mark.parametrize(
    ("options", "prepare"),
    [
        ({}, all_reduce_hook),
        ({}, hook_that_all_reduces),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": BF16}, None),
    ],
    ids=["hook", "hook-that-all-reduces", "offloaded", "offloaded-bf16"],
)
def test_what_has_to_wait(workers: WorkerPools, options: dict[str, Any], prepare: Any) -> None:
    stats = check(workers(4).run(twins.compare, twins.plain, NUM_STEPS, CONFIG, options, SMALL, 2, prepare))
    assert stats.deferred == 0


def in_another_class(twin: Trainee, step: int) -> None:
    """Every other backward is called by a tensor of the user's own class, inside of which nobody asks other classes."""
    twin.optimizer.zero_grad()
    loss = twin.loss(step)
    (loss.as_subclass(Own) if step % 2 else loss).backward()
    twin.see_gradients()
    twin.optimizer.step()


class Own(Tensor):
    pass


@pytest.mark.quick("bf16")
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["float32", "bf16"])
def test_backwards_inside_of_another_class(workers: WorkerPools, options: dict[str, Any]) -> None:
    stats = check(workers(4).run(twins.compare, in_another_class, NUM_STEPS, CONFIG, options, SMALL, 2))
    assert 0 < stats.deferred < stats.reduce_scatters


@pytest.mark.quick("bf16")
@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16}], ids=["float32", "bf16"])
def test_one_group_of_shards_begins_early(workers: WorkerPools, options: dict[str, Any]) -> None:
    """Replicas differ in that."""
    outcomes = workers(4).run(compare_where_some_give_up, WAITING, options)
    assert all(outcome.differing == [] for outcome in outcomes)
    assert outcomes[0].stats.early < outcomes[3].stats.early


def compare_where_some_give_up(rank: int, world_size: int, config: ExtConfig, options: dict[str, Any]) -> Outcome:
    reduce = EarlyReduceScatter.reduce

    def reduce_or_not(self: EarlyReduceScatter, *given: Any) -> bool:
        if rank < 2 and self.num_reduced == 3:  # as if a hook had changed something
            self.discard_plan(Phase.OFF)
        return reduce(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyReduceScatter, "reduce", reduce_or_not)
        return twins.compare(rank, world_size, twins.plain, 6, config, options, SMALL, 2)


def of_one_replica(world_size: int, replicas: int) -> Any:
    return init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))


def compare_one_replica(rank: int, world_size: int) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twins, "mesh_of", of_one_replica)
        return twins.compare(rank, world_size, twins.two_backwards, 3, model_options=SMALL)


def test_one_replica(workers: WorkerPools) -> None:
    assert check(workers(2).run(compare_one_replica)).deferred > 0


def dropped(rank: int, world_size: int) -> bool:
    """Return True if a model that was not restored is freed."""
    model = replicated(world_size, **SMALL)
    extend(model, CONFIG)
    for step in range(3):
        model(step).backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    return gone() is None


def test_a_model_is_let_go_of(workers: WorkerPools) -> None:
    assert all(workers(4).run(dropped))


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "replicas"), [(6, 3), (6, 2), (8, 4)])
def test_more_ranks(workers: WorkerPools, world_size: int, replicas: int) -> None:
    run = workers(world_size).run
    stats = check(run(twins.compare, twins.two_backwards, NUM_STEPS, CONFIG, {}, {"idle": True, **SMALL}, replicas))
    assert stats.deferred > 0


def compare_where_it_is_not_asked(rank: int, world_size: int) -> Outcome:
    """As if all_reduce did not ask tensors, or something stood in its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_ext.deferred, "all_reduce", dist.barrier)
        return twins.compare(rank, world_size, twins.two_backwards, 2, model_options=SMALL, replicas=2)


def test_without_being_asked_fsdp2_averages(workers: WorkerPools) -> None:
    stats = check(workers(4).run(compare_where_it_is_not_asked))
    assert stats.deferred == 0


def test_one_shard_is_left_to_fsdp2(workers: WorkerPools) -> None:
    stats = check(workers(2).run(twins.compare, twins.plain, 3, CONFIG, {}, {}, 2))
    assert stats.reduce_scatters == 0
