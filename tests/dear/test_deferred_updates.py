"""Deferred updates: when replicated updates run, and what they may find by then.

Prevents: updates inside of step(), gathers of gradients that are not whole, and updates of gradients in other memory.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, dear_hook
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.intercept import around_step
from ddp_hooks.overlap.waiting import Waiting
from tests.support.dear.matrices import Matrices
from tests.support.dear.twins import CONFIG
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

REPLICATED = replace(CONFIG, update="replicated")


def wrapped(update: Any = "replicated", **changes: Any) -> tuple[DistributedDataParallel, Any, DearState]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Matrices(), bucket_cap_mb=0.005, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    config = replace(CONFIG, **{"update": update, "atom_mb": 0.002, "fusion": "none", "fusion_mb": None, **changes})
    state = DearState(ddp, optimizer, config)
    ddp.register_comm_hook(state, dear_hook)
    return ddp, optimizer, state


def follow_updates(rank: int, world_size: int) -> tuple[int, list[int], bool]:
    """How many layers are updated right after step(), how many as each begins, and what synchronize() does."""
    ddp, optimizer, state = wrapped()
    layers = list(ddp.module.layers)

    def num_updated() -> int:
        return sum(not isinstance(layer.weight, Waiting) for layer in layers)

    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.ones(2, 24)).backward()
        optimizer.step()
    at_first = num_updated()
    seen: list[int] = []
    handles = [layer.register_forward_pre_hook(lambda *_: seen.append(num_updated())) for layer in layers]
    optimizer.zero_grad()
    ddp(torch.ones(2, 24)).backward()
    for handle in handles:
        handle.remove()
    optimizer.step()
    state.synchronize()
    complete = num_updated() == len(layers)
    state.close()
    return at_first, seen, complete


def test_each_layer_is_updated_as_it_is_reached(workers: WorkerPools) -> None:
    for at_first, seen, complete in workers(2).run(follow_updates):
        assert at_first == 0, "updated inside step(): nothing was deferred"
        assert seen == [1, 2, 3, 4, 5, 6, 7], "not updated one after the other, just before use"
        assert complete


def held(gate: threading.Event) -> Algorithm:
    """Work that keeps a lane busy."""
    gate.wait(10)
    yield from ()


def step_behind_busy_lanes(
    rank: int, world_size: int, changes: dict[str, Any], twice: bool, busy_s: float
) -> tuple[bool, float]:
    """Whether step() returns although nothing can be reduced yet; and how far the model is from plain DDP's."""
    ddp, optimizer, state = wrapped(**changes)
    twin = DistributedDataParallel(copy.deepcopy(ddp.module), gradient_as_bucket_view=True)
    twins_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    gate = threading.Event()
    returned = False
    for step in range(6):
        values = torch.randn(2, 24, generator=torch.Generator().manual_seed(10 * rank + step))
        for model, its in ((ddp, optimizer), (twin, twins_optimizer)):
            its.zero_grad()
            if twice:
                model(values).backward()
            output = model(values)
            if model is ddp and step == 4:
                for _ in range(len(state._driver.lanes)):
                    state._driver.lanes.run(held(gate), "a gate")
                timer = threading.Timer(busy_s, gate.set)
                timer.start()
            output.backward()
            its.step()
            if model is ddp and step == 4:
                returned = not gate.is_set()
                timer.cancel()
                gate.set()
    state.synchronize()
    gap = max(float((a - b).abs().max()) for a, b in zip(ddp.parameters(), twin.parameters(), strict=True))
    state.close()
    return returned, gap


@pytest.mark.quick("plain", "clipped", "two backwards")
@pytest.mark.parametrize(
    ("changes", "twice", "expected"),
    [
        ({}, False, True),
        ({"fusion": "size", "fusion_mb": 1, "lanes": 3}, False, True),
        ({}, True, False),
        ({"reduce_dtype": torch.float64}, False, False),
        ({"max_grad_norm": 1e9}, False, False),
    ],
    ids=["plain", "fused", "two backwards", "sums in another type", "clipped"],
)
def test_gathers_wait_for_gradients_and_step_does_not(
    workers: WorkerPools, changes: dict[str, Any], twice: bool, expected: bool
) -> None:
    # A step that returns ends the wait itself; one that does not needs no longer than a step that should have waited.
    busy_s = 8.0 if expected else 0.5
    for returned, gap in workers(3).run(step_behind_busy_lanes, changes, twice, busy_s):
        assert returned == expected, "gathers may follow reduce-scatters only where nothing is to be done in between"
        assert gap < 1e-5


def clip_inside(rank: int, world_size: int) -> str:
    ddp, optimizer, state = wrapped()
    around_step(optimizer, lambda *_: state.clip_grad_norm_(1.0), lambda *_: None)  # after the state's own
    ddp(torch.ones(2, 24)).backward()
    message = message_of(optimizer.step)
    state.close()
    return message


def test_clipping_inside_of_the_step_is_refused(workers: WorkerPools) -> None:
    for message in workers(2).run(clip_inside):
        assert "inside of optimizer.step()" in message


class Halving(torch.optim.SGD):
    """Gives gradients other memory, as some optimizers and hooks do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data * 0.5
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def halve_or_step_half_as_far(rank: int, world_size: int, deferred: bool) -> float:
    """How far two models are apart. (Plain DDP is no reference: it breaks when its views are given other memory.)"""
    trained = []
    for kind, lr in ((Halving, 0.1), (torch.optim.SGD, 0.05)):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Matrices(), gradient_as_bucket_view=True)
        optimizer = kind(ddp.parameters(), lr=lr)
        state = DearState(ddp, optimizer, replace(REPLICATED, assume_parameterwise=deferred))
        ddp.register_comm_hook(state, dear_hook)
        for step in range(6):
            optimizer.zero_grad()
            ddp(torch.randn(2, 24, generator=torch.Generator().manual_seed(10 * rank + step))).backward()
            optimizer.step()
        state.synchronize()
        trained.append([parameter.detach().clone() for parameter in ddp.parameters()])
        state.close()
    return max(float((a - b).abs().max()) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("deferred", [True, False])
def test_gradients_that_are_given_other_memory(workers: WorkerPools, deferred: bool) -> None:
    assert max(workers(2).run(halve_or_step_half_as_far, deferred)) < 1e-6


def nothing_on_the_way(rank: int, world_size: int) -> bool:
    """After close() the optimizer is as in plain DDP: whole, and free to step."""
    ddp, optimizer, state = wrapped()
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.ones(2, 24)).backward()
        optimizer.step()
    state.close()
    before = [p.detach().clone() for p in ddp.parameters()]
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return all(torch.equal(b - 0.1, p) for b, p in zip(before, ddp.parameters(), strict=True))


def test_close_gives_the_optimizer_back(workers: WorkerPools) -> None:
    assert all(workers(2).run(nothing_on_the_way))
