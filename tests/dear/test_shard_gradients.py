"""Gradients that an optimizer holds before they have arrived: metadata at once, values only when they are there.

Prevents: an optimizer that reads memory in which partial sums still change.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, dear_hook
from ddp_hooks.comm.executors.work import ThreadWork
from ddp_hooks.dear.reduction.shard_gradients import AsyncGradient
from ddp_hooks.intercept import ELEMENTWISE, around_step
from tests.support.dear.misuse import trained
from tests.support.dear.twins import CONFIG, whole_batches
from tests.support.workers import WorkerPools


def arriving(values: torch.Tensor) -> tuple[torch.Tensor, AsyncGradient, list[str]]:
    """Memory that holds nonsense until the pending gradient is settled; and a record of settlements."""
    memory = torch.full_like(values, float("nan"))
    settled: list[str] = []

    def settle() -> None:
        settled.append("settled")
        memory.copy_(values)

    return memory, AsyncGradient.of(memory.detach(), settle), settled


def test_metadata_does_not_wait() -> None:
    _, pending, settled = arriving(torch.ones(3))
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = pending
    gradient = parameter.grad
    assert gradient.shape == (3,) and gradient.dtype == torch.float32 and not gradient.is_sparse
    assert gradient.numel() == 3 and not torch.is_complex(gradient) and gradient.device.type == "cpu"
    assert not settled


@pytest.mark.parametrize(
    "use",
    [
        lambda g: g.sum(),
        lambda g: g.clone(),
        lambda g: torch.zeros(3).add_(g, alpha=2),
        lambda g: torch._foreach_add([torch.zeros(3)], [g])[0],
        lambda g: torch.zeros(3).lerp_(g, 0.5),
        lambda g: -g,
        lambda g: torch.stack([g, g]),
        lambda g: torch.from_numpy(g.numpy()),
    ],
)
def test_values_wait(use: Any) -> None:
    _, pending, settled = arriving(torch.ones(3))
    result = use(pending)
    assert settled and torch.isfinite(result).all() and type(result) is torch.Tensor
    assert type(pending) is torch.Tensor and not vars(pending), "what follows would be asked, and memory kept"


def variants() -> list[Any]:
    """Every known optimizer with every implementation that it has."""
    return [
        pytest.param(kind, {name: True} if name else {}, id=f"{kind.__name__}-{name or 'default'}")
        for kind in ELEMENTWISE
        for name in ("", "foreach", "fused")
        if not name or name in inspect.signature(kind).parameters
    ]


@pytest.mark.parametrize(("kind", "options"), variants())
def test_every_known_optimizer_waits(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    results = []
    for pending in (True, False):
        parameters = [nn.Parameter(torch.linspace(1, 2, n)) for n in (3, 5)]
        optimizer = kind(parameters, **options)
        for step in range(3):
            for parameter in parameters:
                gradient = torch.linspace(-1, step, parameter.numel())
                parameter.grad = arriving(gradient)[1] if pending else gradient
            optimizer.step()
        results.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def gradients_around_a_step(rank: int, world_size: int, travel: bool) -> tuple[set[str], ...]:
    """What shards hold before a step, in it, after it, and when they are asked for; gradients still travel, or not."""
    ddp, optimizer, state = trained(rank, world_size)
    kinds: list[set[str]] = []

    def look(chosen: torch.optim.Optimizer, *_: Any) -> None:
        shards = [p for group in chosen.param_groups for p in group["params"]]
        kinds.append({type(p.grad).__name__ for p in shards if p.grad is not None})

    optimizer.register_step_pre_hook(look)
    around_step(optimizer, look, lambda *_: None)  # after the state's own
    optimizer.register_step_post_hook(look)
    optimizer.zero_grad()
    ddp(*whole_batches(rank, world_size, 5)).backward()
    assert state._driver.reduction is not None
    state._driver.reduction.wait()
    with mock.patch.object(ThreadWork, "done", not travel):
        optimizer.step()
    with state.reduced_gradients() as shards:
        kinds.append({type(p.grad).__name__ for p in shards if p.grad is not None})
    state.close()
    return tuple(kinds)


def test_gradients_are_pending_in_the_step_and_guarded_around_it(workers: WorkerPools) -> None:
    for travel, kind in [(True, "AsyncGradient"), (False, "Tensor")]:
        expected = ({"GradientGuard"}, {kind}, {"GradientGuard"}, {"Tensor"})
        assert workers(2).run(gradients_around_a_step, travel) == [expected] * 2


def interrupted_wait(rank: int, world_size: int, interrupted: bool) -> list[Any]:
    """Two backwards before a step, sums in another type, and a wait for gradients that an exception ends."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, replace(CONFIG, reduce_dtype=torch.float64))
    ddp.register_comm_hook(state, dear_hook)
    for _ in range(2):
        optimizer.zero_grad()
        for scale in (1.0, 2.0):
            ddp(torch.full((2, 8), scale * (rank + 1))).sum().backward()
        if interrupted:
            gradients = state._driver.gradients
            with mock.patch.object(gradients, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
                state.clip_grad_norm_(1e9)
        state.clip_grad_norm_(1e9)
        optimizer.step()
    state.synchronize()
    outcome = [parameter.tolist() for parameter in ddp.parameters()]
    state.close()
    return outcome


def test_an_interrupted_wait_loses_no_gradient(workers: WorkerPools) -> None:
    assert workers(2).run(interrupted_wait, True) == workers(2).run(interrupted_wait, False)
