"""Clipping, steps with gradients that are not finite, and gradient scaling: always as plain DDP would do it.

Prevents: ranks that clip by their own norms, that skip alone, or that keep different scales.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ddp_hooks import GradScaler, clip_grad_norm_
from tests.support.dear import twins
from tests.support.dear.clipping import (
    BAD_STEPS,
    check,
    clip_by_setting,
    clip_norm,
    clip_then_think_again,
    clip_value,
    clip_while_accumulating,
    half,
    momentum_sgd,
    scaled,
    spoilt_on_one_rank,
)
from tests.support.dear.misuse import trained
from tests.support.dear.twins import CONFIG, Trainee, compare, whole_batches
from tests.support.messages import message_of
from tests.support.models import TOLERANCE, Conditional, adamw, choices, sequences
from tests.support.workers import WorkerPools


@pytest.mark.quick("2.0-0.05-3", "1.0-0.5-2", "inf-0.001-2", "3.0-100.0-1")
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.05), (1.0, 0.5), (math.inf, 0.001), (3.0, 100.0)])
def test_clip_grad_norm(workers: WorkerPools, world_size: int, norm_type: float, max_norm: float) -> None:
    check(workers, world_size, "encoder", partial(clip_norm, norm_type, max_norm))


@pytest.mark.quick("*-2-encoder", "clip_then_think_again-3-backwards")
@pytest.mark.parametrize("name", ["encoder", "backwards"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    "loop", [clip_value, clip_then_think_again, clip_while_accumulating], ids=lambda loop: loop.__name__
)
def test_loops_that_clip(workers: WorkerPools, world_size: int, name: str, loop: Any) -> None:
    check(workers, world_size, name, loop)


@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_as_a_setting(workers: WorkerPools, world_size: int) -> None:
    check(workers, world_size, "encoder", clip_by_setting, max_grad_norm=0.05)


def test_clipping_with_unused_parameters(workers: WorkerPools) -> None:
    run = partial(compare, ddp_options={"find_unused_parameters": True})
    loop = partial(clip_norm, 2.0, 0.05)
    for outcome in workers(3).run(run, conditional, choices, adamw, loop, 8):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


def conditional(world_size: int) -> nn.Module:
    return Conditional().double()


def clip_with_others(twin: Trainee, step: int) -> None:
    """A second module, the same on every rank and without DDP, shares the norm."""
    if step == 0:
        twin.memory["other"] = nn.Linear(6, 6).double()
    other = twin.memory["other"]
    twin.optimizer.zero_grad()
    other.zero_grad()
    twin.loss(step).backward()
    other(torch.full((2, 6), 1.0 + step, dtype=torch.float64)).sum().backward()
    if twin.state is not None:
        total = clip_grad_norm_([twin.state, other.parameters()], 0.1)
    else:
        total = nn.utils.clip_grad_norm_([*twin.ddp.parameters(), *other.parameters()], 0.1)
    twin.losses += [float(total), float(other.weight.grad.sum())]
    twin.optimizer.step()


def test_one_norm_over_several_models(workers: WorkerPools) -> None:
    check(workers, 2, "encoder", clip_with_others)


def error_if_nonfinite(rank: int, world_size: int) -> tuple[str, bool]:
    ddp, optimizer, state = trained(rank, world_size)
    optimizer.zero_grad()
    loss = ddp(*whole_batches(rank, world_size, 9))
    (loss * (math.inf if rank == 1 else 1.0)).backward()
    before = [p.detach().clone() for p in ddp.parameters()]
    message = message_of(lambda: state.clip_grad_norm_(1.0, error_if_nonfinite=True))
    optimizer.zero_grad()
    optimizer.step()
    state.synchronize()
    return message, all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))


def test_error_if_nonfinite_raises_on_every_rank(workers: WorkerPools) -> None:
    for message, unchanged in workers(3).run(error_if_nonfinite):
        assert message.startswith("RuntimeError") and "on_nonfinite='skip'" in message
        assert unchanged


def clip_nan(rank: int, world_size: int, norm_type: float) -> tuple[float, bool]:
    """One parameter's gradient is not a number; some ranks have none of it."""
    ddp, optimizer, state = trained(rank, world_size)
    optimizer.zero_grad()
    handle = next(ddp.parameters()).register_hook(lambda gradient: gradient * math.nan)
    ddp(*whole_batches(rank, world_size, 9)).backward()
    handle.remove()
    norm = state.clip_grad_norm_(1.0, norm_type)
    optimizer.step()
    state.synchronize()
    return float(norm), all(bool(parameter.isnan().all()) for parameter in ddp.parameters())


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_norm_that_is_no_number(workers: WorkerPools, norm_type: float) -> None:
    """As torch has it: everything is scaled by NaN, which nobody overlooks."""
    assert all(math.isnan(norm) and is_nan for norm, is_nan in workers(3).run(clip_nan, norm_type))


@pytest.mark.parametrize(("max_norm", "norm_type"), [(1.0, 0.0), (1.0, -1.0), (-1.0, 2.0), ("a", 2.0), (1.0, None)])
def test_norms_are_checked(max_norm: Any, norm_type: Any) -> None:
    with pytest.raises(ValueError, match="max_norm" if max_norm != 1.0 else "norm_type"):
        clip_grad_norm_([], max_norm, norm_type)
    assert clip_grad_norm_([], 1, "inf") == 0  # type: ignore[arg-type]


# -- gradients that are not finite ------------------------------------------------------------------------------------


@pytest.mark.quick("None-3", "1000000000.0-2")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("max_grad_norm", [None, 1e9])
def test_bad_steps_are_skipped_together(workers: WorkerPools, world_size: int, max_grad_norm: float | None) -> None:
    check(workers, world_size, "encoder", spoilt_on_one_rank, on_nonfinite="skip", max_grad_norm=max_grad_norm)


def raise_on_bad_gradients(rank: int, world_size: int) -> tuple[str, bool, bool]:
    config = replace(CONFIG, on_nonfinite="raise")
    ddp, optimizer, state = trained(rank, world_size, config=config)
    state.synchronize()
    before = [p.detach().clone() for p in ddp.parameters()]
    optimizer.zero_grad()
    loss = ddp(*whole_batches(rank, world_size, 9))
    if rank == 0:
        loss = loss * math.nan
    loss.backward()
    message = message_of(optimizer.step)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    optimizer.zero_grad()
    ddp(*whole_batches(rank, world_size, 10)).backward()
    optimizer.step()
    state.synchronize()
    went_on = not torch.equal(before[1], list(ddp.parameters())[1])
    return message, unchanged, went_on


def test_bad_gradients_raise_on_every_rank_and_training_can_go_on(workers: WorkerPools) -> None:
    outcomes = workers(3).run(raise_on_bad_gradients)
    assert len({message for message, _, _ in outcomes}) == 1, "ranks must raise the same"
    assert "layers." in outcomes[0][0] and "no rank updates anything" in outcomes[0][0]
    assert all(unchanged and went_on for _, unchanged, went_on in outcomes)


# -- mixed precision --------------------------------------------------------------------------------------------------


@pytest.mark.quick("-clipped-2", "fused--2", "--1")
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_grad_scaler(workers: WorkerPools, world_size: int, clip: bool, fused: bool) -> None:
    model, optimizer = partial(half, torch.float16), partial(momentum_sgd, fused)
    run = partial(compare, config=replace(CONFIG, on_nonfinite="raise" if clip else None))
    for outcome in workers(world_size).run(run, model, sequences, optimizer, partial(scaled, clip), 9):
        assert outcome.parameter_gap < 1e-5 and outcome.loss_gap < 1e-5, outcome
        assert outcome.stats.step == 9 - len(BAD_STEPS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_bfloat16_autocast(workers: WorkerPools, world_size: int) -> None:
    model, optimizer = partial(half, torch.bfloat16), partial(momentum_sgd, False)
    for outcome in workers(world_size).run(compare, model, sequences, optimizer, twins.plain, 9):
        assert outcome.parameter_gap < 1e-5 and outcome.loss_gap < 1e-5, outcome


def plain_optimizer_under_our_scaler(rank: int, world_size: int) -> bool:
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = GradScaler("cpu", init_scale=4.0)
    before = layer.weight.detach().clone()
    scaler.scale(layer(torch.ones(1, 4)).sum()).backward()
    scaler.step(optimizer)
    return torch.equal(before - 1, layer.weight)


def test_our_scaler_serves_optimizers_of_others(workers: WorkerPools) -> None:
    assert workers(1).run(plain_optimizer_under_our_scaler) == [True]


def scale_a_tiny_model(rank: int, world_size: int) -> float:
    """With 3 parameters and 4 ranks, most ranks hold no shard at all."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = twins.DearState(ddp, optimizer, CONFIG)
    ddp.register_comm_hook(state, twins.dear_hook)
    scaler = GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = ddp(torch.ones(1, 2)).sum() * (math.inf if (rank, step) == (2, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        state.clip_grad_norm_(1e3)
        state.clip_grad_value_(1e3)
        scaler.step(optimizer)
        scaler.update()
    state.close()
    return float(scaler.get_scale())


def test_ranks_without_shards_take_part_in_scaling(workers: WorkerPools) -> None:
    assert workers(4).run(scale_a_tiny_model) == [4.0] * 4


def read_after_clipping(rank: int, world_size: int) -> str:
    """A clipped gradient is still a shard: nobody may take its norm for the model's."""
    ddp, optimizer, state = trained(rank, world_size)
    optimizer.zero_grad()
    ddp(*whole_batches(rank, world_size, 9)).backward()
    state.clip_grad_norm_(1.0)
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    return message_of(lambda: nn.utils.clip_grad_norm_(shards, 1.0))


def test_clipped_gradients_are_guarded(workers: WorkerPools) -> None:
    for message in workers(2).run(read_after_clipping):
        assert "state.clip_grad_norm_(max_norm)" in message


def nest(rank: int, world_size: int) -> bool:
    """Change gradients inside, clip inside of that, zero and write: what was written last is what is stepped on."""
    results = []
    for nested in (True, False):
        torch.manual_seed(0)
        ddp, optimizer, state = trained(rank, world_size)
        for step in range(3):
            optimizer.zero_grad()
            ddp(*whole_batches(rank, world_size, step)).backward()
            if step == 2:
                optimizer.zero_grad(set_to_none=False)
            with state.reduced_gradients() as shards, torch.no_grad():
                for gradient in [shard.grad for shard in shards if shard.grad is not None]:
                    gradient.add_(3.0)
                if nested:
                    state.clip_grad_norm_(0.5)
            if not nested:
                state.clip_grad_norm_(0.5)
            optimizer.step()
        state.synchronize()
        results.append([p.detach().clone() for p in ddp.parameters()])
        state.close()
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_may_be_clipped_while_they_are_changed(workers: WorkerPools, world_size: int) -> None:
    assert all(workers(world_size).run(nest))
