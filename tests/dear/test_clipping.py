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
from tests.dear import twins
from tests.dear.test_models import MODELS, TOLERANCE, Conditional, adamw, choices, sequences
from tests.dear.test_refusals import message_of, trained
from tests.dear.twins import CONFIG, Trainee, compare, whole_batches
from tests.devices import rank_device
from tests.workers import WorkerPools


def clip_norm(norm_type: float, max_norm: float, twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if twin.state is not None:
        total = twin.state.clip_grad_norm_(max_norm, norm_type)
    else:
        total = nn.utils.clip_grad_norm_(twin.ddp.parameters(), max_norm, norm_type)
    twin.losses.append(float(total))
    twin.optimizer.step()


def clip_value(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if twin.state is not None:
        twin.state.clip_grad_value_(1e-3)
    else:
        nn.utils.clip_grad_value_(twin.ddp.parameters(), 1e-3)
    twin.optimizer.step()


def clip_then_think_again(twin: Trainee, step: int) -> None:
    """Between clipping and the step gradients are zeroed, dropped, or added to."""
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if twin.state is not None:
        twin.state.clip_grad_norm_(0.01)
    else:
        nn.utils.clip_grad_norm_(twin.ddp.parameters(), 0.01)
    if step % 6 == 1:
        twin.optimizer.zero_grad()
    elif step % 6 == 2:
        twin.ddp.zero_grad()
    elif step % 6 == 3:
        twin.ddp.zero_grad(set_to_none=False)
    elif step % 6 == 4:
        twin.loss(step + 100).backward()
    twin.optimizer.step()


def clip_while_accumulating(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    for micro_batch in range(3):
        if micro_batch < 2:
            with twin.ddp.no_sync():
                twin.loss(10 * step + micro_batch).backward()
        else:
            twin.loss(10 * step + micro_batch).backward()
    if twin.state is not None:
        twin.state.clip_grad_norm_(0.02)
    else:
        nn.utils.clip_grad_norm_(twin.ddp.parameters(), 0.02)
    twin.optimizer.step()


def clip_by_setting(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if twin.state is None:
        total = nn.utils.clip_grad_norm_(twin.ddp.parameters(), 0.05)
    twin.optimizer.step()
    twin.losses.append(float(total) if twin.state is None else twin.state.stats().grad_norm or math.nan)


def check(workers: WorkerPools, world_size: int, name: str, loop: Any, **changes: Any) -> None:
    model, batches, optimizer = MODELS[name]
    run = partial(compare, config=replace(CONFIG, **changes))
    for outcome in workers(world_size).run(run, model, batches, optimizer, loop, 8):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome
        assert outcome.loss_drop != 0


@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.05), (1.0, 0.5), (math.inf, 0.001), (3.0, 100.0)])
def test_clip_grad_norm(workers: WorkerPools, world_size: int, norm_type: float, max_norm: float) -> None:
    check(workers, world_size, "encoder", partial(clip_norm, norm_type, max_norm))


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


@pytest.mark.parametrize(("max_norm", "norm_type"), [(1.0, 0.0), (1.0, -1.0), (-1.0, 2.0)])
def test_norms_are_checked(max_norm: float, norm_type: float) -> None:
    with pytest.raises(ValueError, match="max_norm" if max_norm < 0 else "norm_type"):
        clip_grad_norm_([], max_norm, norm_type)


# -- gradients that are not finite ------------------------------------------------------------------------------------

BAD_STEPS = {2: math.inf, 3: math.nan, 6: -math.inf}


def spoilt_on_one_rank(twin: Trainee, step: int) -> None:
    """Now and then one rank has a bad loss; plain DDP leaves such steps out by hand."""
    twin.optimizer.zero_grad()
    loss = twin.loss(step)
    if step in BAD_STEPS and torch.distributed.get_rank() == step % torch.distributed.get_world_size():
        loss = loss * BAD_STEPS[step]
    loss.backward()
    if twin.state is None:
        gradients = [p.grad for p in twin.ddp.parameters() if p.grad is not None]
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            return
    twin.optimizer.step()
    if twin.state is not None:
        assert twin.state.stats().skipped_steps == sum(bad <= step for bad in BAD_STEPS)


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


class Half(nn.Module):
    """An encoder under autocast."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(rank_device().type, dtype=self.dtype):
            return (self.layers(values.float()) - 1).float().square().mean()


def half(dtype: torch.dtype, world_size: int) -> nn.Module:
    return Half(dtype)


def momentum_sgd(fused: bool, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=fused)


def scaled(clip: bool, twin: Trainee, step: int) -> None:
    """As in torch's own examples; now and then a gradient overflows on one rank, which the scaler must deal with."""
    if step == 0:
        kind = torch.amp.GradScaler if twin.state is None else GradScaler
        twin.memory["scaler"] = kind(rank_device().type, init_scale=256.0, growth_interval=3)
    scaler = twin.memory["scaler"]
    twin.optimizer.zero_grad()
    loss = twin.loss(step)
    if step in BAD_STEPS and torch.distributed.get_rank() == step % torch.distributed.get_world_size():
        loss = loss * BAD_STEPS[step]
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(twin.optimizer)
        if twin.state is not None:
            twin.state.clip_grad_norm_(0.5)
        else:
            nn.utils.clip_grad_norm_(twin.ddp.parameters(), 0.5)
    scaler.step(twin.optimizer)
    scaler.update()
    twin.losses.append(scaler.get_scale())


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
