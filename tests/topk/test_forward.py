"""``pipeline="forward"``: gradients that arrive in the next forward give the same bits as ``pipeline="backward"``.

Prevents: updates with a gradient that is not whole, with another step's settings, twice or never; parameters that are
read too early; and gradients that loops read, keep, add to or drop at moments when they are not there.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKConfig, TopKState
from ddp_hooks.intercept import around_step
from tests.support.dear.misuse import Wrapping
from tests.support.messages import message_of
from tests.support.models import Conditional
from tests.support.topk.forward import (
    CONFIG,
    Net,
    Run,
    accumulated,
    momentum_sgd,
    outcomes,
    plain,
    saved,
    two_backwards,
)
from tests.support.workers import WorkerPools

FORWARD = replace(CONFIG, pipeline="forward")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        {"params": [p for p in parameters if p.ndim > 1]},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.05)


class WorkGroup(torch.optim.SGD):
    """Unknown to us: may look at several parameters at once."""


def joined(parameters: Any) -> torch.optim.Optimizer:
    return WorkGroup(parameters, lr=0.1, momentum=0.9)


def compiled() -> nn.Module:
    model: nn.Module = torch.compile(Net(), backend="eager")  # type: ignore[assignment]
    return model


# -- loops ------------------------------------------------------------------------------------------------------------


def late_zeroing(run: Run, step: int) -> None:
    loss = run.ddp(run.batch()).square().mean()
    run.optimizer.zero_grad()
    loss.backward()
    run.optimizer.step()


def to_zeros(run: Run, step: int) -> None:
    run.optimizer.zero_grad(set_to_none=False)
    run.backward()
    run.optimizer.step()


def zeros_before_the_step(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.backward()
    if step % 3 == 2:
        run.optimizer.zero_grad(set_to_none=False)
    run.optimizer.step()


def zeros_and_no_step(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.backward()
    if step % 3 == 1:
        run.optimizer.zero_grad(set_to_none=False)
        run.backward()
    if step % 3 != 2:
        run.optimizer.step()


def zeroed_by_a_hook(run: Run, step: int) -> None:
    if step == 0:
        ways = itertools.cycle([True, False])
        run.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad(set_to_none=next(ways)))
        hooks = run.optimizer._optimizer_step_post_hooks
        hooks.move_to_end(next(reversed(hooks)), last=False)  # type: ignore[attr-defined]  # before ours
    run.backward()
    run.optimizer.step()


def failing_step(run: Run, step: int) -> None:
    def fail(*_: Any) -> None:
        for handle in handles:
            handle.remove()
        raise KeyError("interrupted")

    run.optimizer.zero_grad()
    run.backward()
    if step in (2, 5):
        handles = around_step(run.optimizer, fail, fail)  # after the state's own
        with pytest.raises(KeyError):
            run.optimizer.step()
    if step != 5:
        run.optimizer.step()


def never_zeroed(run: Run, step: int) -> None:
    run.backward()
    run.optimizer.step()


def dropped(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.backward()
    if step % 3 != 1:
        run.optimizer.step()


def clipped(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.backward()
    run.state.wait_for_gradients()
    run.seen.append(nn.utils.clip_grad_norm_(run.ddp.parameters(), 0.05))
    run.optimizer.step()


def evaluated(run: Run, step: int) -> None:
    plain(run, step)
    run.ddp.eval()
    with torch.no_grad():
        run.seen.append(run.ddp(torch.ones(2, 24)))
    run.ddp.train()


def two_steps(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.backward()
    run.optimizer.step()
    run.optimizer.step()


def closure(run: Run, step: int) -> None:
    def evaluate() -> float:
        run.optimizer.zero_grad()
        run.backward()
        return 0.0

    run.optimizer.step(evaluate)


def not_finite(run: Run, step: int) -> None:
    inputs = run.batch()
    if step in (3, 4) and run.state._lanes.rank == 1:
        inputs[0] = torch.inf
    run.optimizer.zero_grad()
    run.backward(inputs)
    run.optimizer.step()


def through_the_module(run: Run, step: int) -> None:
    plain(run, step)
    with torch.no_grad():
        run.seen.append(run.ddp.module(torch.ones(2, 24)))


LOOPS = [
    plain,
    late_zeroing,
    to_zeros,
    zeros_before_the_step,
    zeros_and_no_step,
    zeroed_by_a_hook,
    failing_step,
    never_zeroed,
    accumulated,
    two_backwards,
    dropped,
    clipped,
    evaluated,
    saved,
    two_steps,
    closure,
    not_finite,
    through_the_module,
]


@pytest.mark.quick("*-2", "zeros_and_no_step-1")
@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(p, marks=pytest.mark.slow) for p in (3, 4))])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_same_bits(workers: WorkerPools, world_size: int, loop: Callable[[Run, int], None]) -> None:
    for same, updates in workers(world_size).run(outcomes, loop, CONFIG):
        assert same
        expected = world_size > 1 and loop not in (clipped, closure)
        assert bool(updates) == expected and (updates > 7 or loop is not plain or not expected), updates


@pytest.mark.parametrize("make", [adamw, adafactor, joined], ids=lambda make: make.__name__)
def test_optimizers(workers: WorkerPools, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """One that we do not know updates everything at once, in its step."""
    for same, updates in workers(2).run(outcomes, plain, CONFIG, make, Net, {}):
        assert same and bool(updates) == (make is not joined)


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, warmup_steps=4),
        replace(CONFIG, momentum=0.5),
        replace(CONFIG, density=1.0),
        replace(CONFIG, algorithm="dense", density=None),
        replace(CONFIG, algorithm="topka", lanes=1),
        replace(CONFIG, algorithm="oktopk", wire="exact"),
        replace(CONFIG, dense_below_numel=10_000),
    ],
    ids=["warm-up", "momentum", "everything", "dense", "topka", "oktopk", "all dense"],
)
def test_settings(workers: WorkerPools, config: TopKConfig) -> None:
    for same, updates in workers(2).run(outcomes, plain, config, adamw if config.momentum else momentum_sgd, Net, {}):
        assert same and updates


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_settings_of_ddp(workers: WorkerPools, options: dict[str, Any]) -> None:
    for same, updates in workers(2).run(outcomes, plain, CONFIG, momentum_sgd, Net, options):
        assert same and updates


def test_compiled_models(workers: WorkerPools) -> None:
    for same, updates in workers(2).run(outcomes, plain, CONFIG, momentum_sgd, compiled, {"bucket_cap_mb": 1}):
        assert same and updates


def branches(run: Run, step: int) -> None:
    """Other branches on other ranks, one of them used by nobody for a while."""
    rank = run.state._lanes.rank
    run.optimizer.zero_grad(set_to_none=step % 2 == 0)
    inputs = torch.randn(3, 8, generator=run.generator)
    run.ddp(inputs, (rank + step // 2) % 3 if step < 5 else 3).backward()
    run.optimizer.step()


@pytest.mark.parametrize("make", [momentum_sgd, adamw], ids=lambda make: make.__name__)
def test_unused_parameters(workers: WorkerPools, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    options = {"find_unused_parameters": True}
    config = replace(CONFIG, density=0.4, dense_below_numel=0)
    for same, updates in workers(2).run(outcomes, branches, config, make, Conditional, options):
        assert same and updates


def messages(rank: int, world_size: int) -> list[str]:
    run = Run(rank, FORWARD)
    for step in range(3):
        plain(run, step)
    run.optimizer.zero_grad()
    run.backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    found = [
        message_of(lambda: nn.utils.clip_grad_norm_(run.ddp.parameters(), 1.0)),
        message_of(lambda: scaler.unscale_(run.optimizer)),
        message_of(lambda: run.state.state_dict()),
    ]
    run.optimizer.step()
    run.state.close()
    return found


def test_what_is_not_there_yet_says_so(workers: WorkerPools) -> None:
    for clip, scale, save in workers(2).run(messages):
        assert "clip" in clip.lower() and "state.wait_for_gradients()" in clip
        assert 'Use pipeline="backward"' in scale
        assert "between a backward and optimizer.step()" in save


def refusals(rank: int, world_size: int) -> list[str]:
    def state_of(optimizer: Any, scaler: Any = None, **options: Any) -> TopKState:
        options = {"gradient_as_bucket_view": True, **options}
        return TopKState(DistributedDataParallel(model, **options), FORWARD, optimizer=optimizer, scaler=scaler)

    model, twin = Net(), Net()
    twin.last.bias = nn.Parameter(twin.first.weight.data[0])  # the same memory, but not the same parameter
    optimizer = momentum_sgd(model.parameters())
    part = momentum_sgd(model.first.parameters())
    scaler = torch.amp.GradScaler("cpu")
    return [
        message_of(lambda: state_of(None)),
        message_of(lambda: state_of(part)),
        message_of(lambda: state_of(optimizer, gradient_as_bucket_view=False)),
        message_of(lambda: state_of(optimizer, scaler)),
        message_of(lambda: state_of(Wrapping(optimizer))),
        message_of(
            lambda: TopKState(
                DistributedDataParallel(twin, gradient_as_bucket_view=True),
                FORWARD,
                optimizer=momentum_sgd(twin.parameters()),
            )
        ),
        message_of(lambda: move_parameters(rank)),
    ]


def move_parameters(rank: int) -> None:
    run = Run(rank, FORWARD)
    for step in range(3):
        plain(run, step)
    run.optimizer.param_groups[0]["params"].reverse()
    try:
        plain(run, 3)
    finally:
        run.state.close()


def test_refusals(workers: WorkerPools) -> None:
    for nothing, part, views, scaler, wrapping, shared, moved in workers(2).run(refusals):
        assert "tie weights by assigning the parameter itself" in shared
        assert "param_groups are not those that it had" in moved
        assert "TopKState(ddp, config, optimizer=optimizer)" in nothing
        assert "one optimizer of all parameters" in part and "twice.weight" in part
        assert "gradient_as_bucket_view=True" in views
        assert "scaler reads gradients before the step" in scaler
        assert "Wrapping does not run the constructor of torch.optim.Optimizer" in wrapping


def resumed(rank: int, world_size: int) -> bool:
    """True if a run that was saved and loaded in the middle ends in the same bits."""
    ends = []
    for interrupted in (False, True):
        run = Run(rank, FORWARD)
        for step in range(4):
            plain(run, step)
        if interrupted:
            model = copy.deepcopy(run.ddp.module.state_dict())
            saved = copy.deepcopy([run.optimizer.state_dict(), run.scheduler.state_dict(), run.state.state_dict()])
            generator = run.generator
            run.state.close()
            run = Run(rank, FORWARD)
            run.generator = generator
            run.ddp.module.load_state_dict(model)
            for part, state in zip((run.optimizer, run.scheduler, run.state), saved, strict=True):
                part.load_state_dict(state)  # type: ignore[attr-defined]
        for step in range(4):
            plain(run, step)
        ends.append(run.everything())
        run.state.close()
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_resuming_ends_in_the_same_bits(workers: WorkerPools) -> None:
    assert all(workers(2).run(resumed))


def lone_wait(rank: int, world_size: int) -> int:
    """One rank alone waits between a step and the next forward, and nobody hangs."""
    run = Run(rank, FORWARD)
    for step in range(6):
        plain(run, step)
        if rank == step % world_size:
            run.state.synchronize()
            run.optimizer.state_dict()
            run.ddp.state_dict()
    run.state.close()
    return run.state.stats().step


def test_one_rank_alone_may_wait(workers: WorkerPools) -> None:
    assert workers(3).run(lone_wait) == [6, 6, 6]


def left_behind(rank: int, world_size: int) -> list[str]:
    """Threads that are still there after closing in the middle of everything."""
    run = Run(rank, FORWARD)
    for step in range(3):
        plain(run, step)
    run.state.close()
    other = Run(rank, FORWARD)
    for step in range(3):
        plain(other, step)
    other.optimizer.zero_grad()
    other.backward()
    other.state.close()  # with a backward that no step has followed
    assert all(isinstance(p.grad, Tensor) and type(p.grad) is Tensor for p in other.ddp.parameters())
    return [thread.name for thread in threading.enumerate() if "ddp_hooks" in thread.name]


def test_closing_leaves_nothing_behind(workers: WorkerPools) -> None:
    assert workers(2).run(left_behind) == [[], []]
