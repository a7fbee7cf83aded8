"""Unusual loops over an extended model: the bits of stock FSDP2, or an error that says why not.

Prevents: gradients of backwards that failed, evaluation that fails in inference mode, and models that cannot go on
after an exception.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ddp_hooks.comm import Lanes, Partition
from fsdp_ext import compat, extend, restore
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.deferred import Reduction, backward, pending
from tests.support.fsdp_ext.twins import (
    CONFIG,
    Stopped,
    Trainee,
    WholeNumbers,
    local,
    momentum_sgd,
    on_both,
    same,
    shard,
    shards,
)
from tests.support.fsdp_ext.unusual import Failing, failing_micro_batch, needs_reset
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

# -- other modes ------------------------------------------------------------------------------------------------------


def inferring(twin: Trainee, step: int) -> None:
    """Evaluation in inference mode, in which lanes, being other threads, are not."""
    twins.plain(twin, step)
    twin.model.eval()
    with torch.inference_mode():
        twin.loss(step + 51)
    twin.model.train()


@pytest.mark.parametrize("codec", ["exact", "bf16", "int8"])
@pytest.mark.parametrize("kept", [False, True])
def test_inference_mode(workers: WorkerPools, codec: Any, kept: bool) -> None:
    options = {"reshard_after_forward": False} if kept else {}
    for outcome in workers(2).run(twins.compare, inferring, 4, replace(CONFIG, all_gather=codec), options):
        assert outcome.moved and outcome.num_seen > 0
        assert codec == "int8" or not [name for name in outcome.differing if not name.startswith("seen")]


def only_inferring(rank: int, world_size: int) -> bool:
    """A model that is made in inference mode."""
    with torch.inference_mode():
        ours, theirs = on_both(lambda: shard(WholeNumbers(world_size)), lambda model: [model(3) for _ in range(3)])
        return same(ours, theirs)


def test_models_for_inference(workers: WorkerPools) -> None:
    assert workers(2).run(only_inferring) == [True, True]


def gathers_in_int8(rank: int, world_size: int) -> set[int]:
    """Among how many ranks, when the first gather is one among few."""
    model = shard(WholeNumbers(world_size), None, reshard_after_forward=2)
    with torch.no_grad():
        model(1)  # after it, parameters are whole on every two ranks
    extend(model, replace(CONFIG, all_gather="int8", prefetch=0))
    numbers: set[int] = set()
    original = Lanes.all_gather

    def counting(lanes: Lanes, partitions: Sequence[Partition], label: str) -> Any:
        numbers.update(len(partition.ranges) for partition in partitions if partition.wire is not None)
        return original(lanes, partitions, label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "all_gather", counting)
        for step in range(3):
            model(step).backward()
    restore(model)
    return numbers


def test_only_whole_gathers_are_rounded(workers: WorkerPools) -> None:
    assert workers(4).run(gathers_in_int8) == [{4}] * 4


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick("True-to_zeros", "False-to_none")
@needs_reset
@pytest.mark.parametrize("zero", [None, False, True], ids=["added_to", "to_none", "to_zeros"])
@pytest.mark.parametrize("foreach", [False, True])
def test_backwards_that_fail(workers: WorkerPools, zero: bool | None, foreach: bool) -> None:
    assert workers(2).run(failing_micro_batch, zero, foreach) == [True, True]


def zeroed_in_part(rank: int, world_size: int) -> bool:
    """Two optimizers share a module, and one of them sets its gradients to zeros after a backward that failed."""

    def run(model: Any) -> list[Tensor]:
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(parameters[part::2], lr=0.125) for part in (0, 1)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            handle = model.blocks[0].register_forward_hook(lambda module, given, total: Failing.apply(total))
            with pytest.raises(Stopped):
                model(1000 * step + 77 + rank).backward()
            handle.remove()
            model.reset_iter_state()
            optimizers[0].zero_grad(set_to_none=False)
            model(1000 * step + rank).backward()
            for optimizer in optimizers:
                optimizer.step()
        return shards(model)

    return same(*on_both(lambda: shard(WholeNumbers(world_size)), run))


@needs_reset
def test_backwards_that_fail_with_two_optimizers(workers: WorkerPools) -> None:
    assert workers(2).run(zeroed_in_part) == [True, True]


def interrupted(rank: int, world_size: int) -> bool:
    """Ctrl-C in a forward, in a notebook, say; then a step."""

    def run(model: Any) -> list[Tensor]:
        optimizer, seen = momentum_sgd(model), []
        for step in range(4):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
        model(5).backward()
        handle = model.blocks[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(6)
        handle.remove()
        optimizer.step()
        model.reset_iter_state()
        for seed in (7, 8):
            seen.append(model(seed).detach().clone())
        return seen

    return same(*on_both(lambda: shard(WholeNumbers(world_size)), run))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@needs_reset
def test_interrupts(workers: WorkerPools) -> None:
    assert workers(2).run(interrupted) == [True, True]


def after_a_timeout(rank: int, world_size: int) -> tuple[str, int, float]:
    """One rank comes too late for a forward; the model is restored and goes on with stock communication."""
    torch.manual_seed(7)
    model = shard(WholeNumbers(world_size))
    extend(model, replace(CONFIG, timeout_s=2, stall_warning_s=1))
    for step in range(3):
        model(step).backward()
    message = ""
    if rank == 0:
        message = message_of(lambda: model(4))
        message_of(lambda: restore(model))  # its lanes have failed, which it says when it is through
    else:
        time.sleep(4)
        message_of(lambda: restore(model))
    dist.barrier()
    held = sum(compat.holds_a_gather(module) for module in model.modules() if isinstance(module, FSDPModule))
    assert isinstance(model, FSDPModule)
    model.reset_iter_state()  # the first rank's forward has ended in the middle
    return message, held, float(model(5).detach())


@needs_reset
def test_a_model_goes_on_after_its_lanes_have_failed(workers: WorkerPools) -> None:
    outcomes = workers(2).run(after_a_timeout)
    assert "timed out" in outcomes[0][0] or "waited" in outcomes[0][0]
    assert [held for _, held, _ in outcomes] == [0, 0]
    assert outcomes[0][2] == outcomes[1][2]


# -- other settings ---------------------------------------------------------------------------------------------------


def with_other_settings(rank: int, world_size: int) -> tuple[float, float, float]:
    """Return the size of residuals with a density, another density, and none."""
    torch.manual_seed(7)
    model = shard(WholeNumbers(world_size))
    kept = []
    for step, density in enumerate((0.05, 0.1, None)):
        changes: dict[str, Any] = {} if density is None else {"reduce_scatter": "sparse", "density": density}
        extension = extend(model, replace(CONFIG, **changes))
        state = extension.state_dict()
        kept.append(sum(float(each.full_tensor().abs().sum()) for each in state.values()))
        if step == 0:
            model(3 + rank).backward()
            kept[0] = sum(float(each.full_tensor().abs().sum()) for each in extension.state_dict().values())
    restore(model)
    return kept[0], kept[1], kept[2]


def test_what_is_left_over_stays_with_other_settings(workers: WorkerPools) -> None:
    for first, second, third in workers(2).run(with_other_settings):
        assert first == second > 0 and third == 0.0


# -- gradients that have not come -------------------------------------------------------------------------------------


def changed_too_early(rank: int, world_size: int, whole: bool) -> str:
    """Inside of the backward somebody multiplies a gradient that has not come: a DTensor, or what it holds."""
    waiting, reduction = pending(), Reduction(2)
    mesh, places = init_device_mesh("cpu", (world_size,)), [Shard(0)]
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4 * world_size), mesh, places))

    def defer() -> None:
        waiting.defer(reduction.delivery._replace(parameters=(parameter,)))
        parameter.grad = DTensor.from_local(reduction.output, mesh, places)

    def change() -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            (parameter.grad if whole else local(parameter.grad)).mul_(2)

    return message_of(lambda: backward(defer, change))


@pytest.mark.parametrize("whole", [True, False])
def test_who_changes_a_gradient_too_early_hears_of_it(workers: WorkerPools, whole: bool) -> None:
    for message in workers(2).run(changed_too_early, whole):
        assert "was changed inside of the backward, before it was ready" in message
