"""What an optimizer shows outside of a step: parameters and states as in plain DDP, or an error.

Prevents: norms, averages and copies that are silently of one shard, because ``param_groups`` held shards.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddp_hooks import DearState, dear_hook
from ddp_hooks.dear.update.spread_tensor import SpreadTensor
from tests.support.dear.saving import differences, train_step, wrap
from tests.support.dear.twins import CONFIG, whole_batches
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


def held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def look(rank: int, world_size: int) -> dict[str, Any]:
    """What code finds that goes through an optimizer's groups and state, before, in and after a step."""
    plain, plain_optimizer, _ = wrap(world_size, with_dear=False)
    ddp, optimizer, _ = wrap(world_size, with_dear=False)
    seen: dict[str, list[Tensor]] = {}
    optimizer.register_step_post_hook(lambda chosen, *_: seen.__setitem__("earlier post-hook", held(chosen)))
    state = DearState(ddp, optimizer, CONFIG)
    ddp.register_comm_hook(state, dear_hook)
    optimizer.register_step_post_hook(lambda chosen, *_: seen.__setitem__("later post-hook", held(chosen)))
    for step in range(3):
        train_step(plain, plain_optimizer, rank, world_size, step)
        train_step(ddp, optimizer, rank, world_size, step)
    seen["after the step"] = held(optimizer)
    state.synchronize()
    expected = held(plain_optimizer)
    ours = dict(ddp.module.named_parameters())
    found: dict[str, Any] = {
        where: len(tensors) == len(expected) and all(any(t is p for p in ours.values()) for t in tensors)
        for where, tensors in seen.items()
    }
    found["norm"] = torch.equal(_norm(held(optimizer)), _norm(expected))
    copied = copy.deepcopy(optimizer)
    found["deepcopy"] = torch.equal(_norm(held(copied)), _norm(expected)) and held(copied)[0] is not held(optimizer)[0]
    states = [(p, optimizer.state[p]) for p in ours.values() if p in optimizer.state]
    found["states"] = bool(states) and all(
        isinstance(entries["exp_avg"], SpreadTensor) and entries["exp_avg"].shape == p.shape for p, entries in states
    )
    total = sum(part.numel() for _, entries in states for part in entries["exp_avg"].local_shards())
    found["numel"] = total, sum(p.numel() for p in ours.values())
    absent = [p for p in ours.values() if p not in optimizer.state]
    found["absent"] = message_of(lambda: optimizer.state[absent[0]]) if absent else ""
    found["norm of a state"] = message_of(lambda: states[0][1]["exp_avg"].norm())
    before = copy.deepcopy(state.full_optimizer_state_dict())
    for parameter, entries in optimizer.state.items():  # as Lightning moves them to another device
        optimizer.state[parameter] = {k: v.to("cpu", copy=True) for k, v in entries.items()}
    for entries in optimizer.state.values():  # as older code does
        for key, value in entries.items():
            entries[key] = value.to("cpu", copy=True)
    found["assignment"] = differences(state.full_optimizer_state_dict(), before) == []
    written = []
    for factor, entries in enumerate(optimizer.state.values(), start=2):
        entries["step"].mul_(factor) if factor % 2 else entries["step"].data.mul_(factor)
        written.append(float(entries["step"]))
    found["written in place"] = written, [float(entries["step"]) for entries in optimizer.state.values()]
    saved = state.full_optimizer_state_dict()["state"].values()
    found["saved"] = {float(entries["step"]) for entries in saved}
    for entries in optimizer.state.values():
        entries["step"].fill_(99)  # and then loads another
    optimizer.load_state_dict(copy.deepcopy(before))
    found["loaded"] = {float(entries["step"]) for entries in optimizer.state.values()}
    found["loaded whole"] = differences(state.full_optimizer_state_dict(), before) == []
    for chosen in (optimizer, plain_optimizer):
        for entries in chosen.state.values():
            entries["step"].zero_()
    train_step(plain, plain_optimizer, rank, world_size, 3)
    train_step(ddp, optimizer, rank, world_size, 3)
    found["after zeros"] = all(map(torch.equal, plain.module.state_dict().values(), ddp.module.state_dict().values()))
    found["other shape"] = message_of(lambda: states[0][1].update(exp_avg=torch.zeros(2, 1, 5)))
    found["pickle"] = message_of(lambda: torch.save(optimizer, "/dev/null"))
    state.close()
    return found


def _norm(parameters: list[Tensor]) -> Tensor:
    return torch.stack([p.detach().double().norm() for p in parameters]).norm()


def test_groups_and_states_are_those_of_whole_parameters(workers: WorkerPools) -> None:
    outcomes = workers(3).run(look)
    for found in outcomes:
        for what in ("earlier post-hook", "later post-hook", "after the step", "norm", "deepcopy"):
            assert found[what], what
        assert found["states"] and found["assignment"] and found["after zeros"]
        assert found["loaded"] == {3.0} and found["loaded whole"]
        written, read = found["written in place"]
        assert written == read and set(written) <= found["saved"]
        assert found["other shape"].startswith("ValueError: exp_avg of ") and "(2, 1, 5)" in found["other shape"]
        for what in ("norm of a state", "pickle"):
            assert "state.full_optimizer_state_dict()" in found[what]
    assert sum(found["numel"][0] for found in outcomes) == outcomes[0]["numel"][1]
    absent = [found["absent"] for found in outcomes if found["absent"]]
    assert absent and all("holds no part of the optimizer's state of" in message for message in absent)


def begin_anew(rank: int, world_size: int) -> tuple[list[bool], str, str]:
    """A state that is thrown away is thrown away on all ranks, however it is done; other changes are refused."""
    ways: list[Callable[[Any], Any]] = [
        lambda optimizer: setattr(optimizer, "state", defaultdict(dict)),
        lambda optimizer: optimizer.state.clear(),
        lambda optimizer: [optimizer.state.pop(p) for p in list(optimizer.state)],
    ]

    def train(with_dear: bool, way: Callable[[Any], Any]) -> list[Tensor]:
        ddp, optimizer, state = wrap(world_size, with_dear)
        for step in range(5):
            if step == 3:
                way(optimizer)
            train_step(ddp, optimizer, rank, world_size, step)
        ended = [value.clone() for value in ddp.module.state_dict().values()]
        if state is not None:
            state.close()
        return ended

    same = [all(map(torch.equal, train(True, way), train(False, way))) for way in ways]
    ddp, optimizer, state = wrap(world_size, with_dear=True)
    assert state is not None
    train_step(ddp, optimizer, rank, world_size, 0)
    optimizer.state = defaultdict(dict, {next(ddp.parameters()): {"step": torch.ones(())}})
    replaced = message_of(lambda: train_step(ddp, optimizer, rank, world_size, 1))
    optimizer.param_groups[0]["params"].pop()
    removed = message_of(lambda: train_step(ddp, optimizer, rank, world_size, 1))
    state.close()
    return same, replaced, removed


def test_a_state_may_be_thrown_away(workers: WorkerPools) -> None:
    for same, replaced, removed in workers(2).run(begin_anew):
        assert same == [True] * 3
        assert "optimizer.state was replaced" in replaced and "param_groups do not hold" in removed


def interrupt(rank: int, world_size: int) -> bool:
    """Whether the groups hold the model's parameters after an exception in the optimizer's code."""
    ddp, optimizer, state = wrap(world_size, with_dear=True)
    assert state is not None
    for step in range(2):
        train_step(ddp, optimizer, rank, world_size, step)
    optimizer.param_groups[1]["betas"] = None
    failed = message_of(lambda: train_step(ddp, optimizer, rank, world_size, 7))
    whole = {id(p) for p in held(optimizer)} == {id(p) for p in ddp.module.parameters()}
    state.close()
    return "NoneType" in failed and whole


def test_an_exception_in_a_step_leaves_parameters_in_the_groups(workers: WorkerPools) -> None:
    assert workers(2).run(interrupt) == [True] * 2


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer and then moves half-way back, like Lookahead: through the groups of the other."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, defaultdict(dict), inner.defaults
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for slow, fast in zip(self.slow, held(self.inner), strict=True):
            slow.lerp_(fast, 0.5)
            fast.copy_(slow)


def look_ahead(rank: int, world_size: int, with_dear: bool) -> list[Tensor]:
    ddp, optimizer, state = wrap(world_size, with_dear)
    outer = Wrapper(optimizer)
    if state is not None:
        optimizer.register_step_post_hook(lambda *_: state.synchronize())
    for step in range(4):
        optimizer.zero_grad()
        ddp(*whole_batches(rank, world_size, step)).backward()
        outer.step()
    ended = [value.clone() for value in ddp.module.state_dict().values()]
    if state is not None:
        state.close()
    return ended


def test_optimizers_around_the_optimizer_write_whole_parameters(workers: WorkerPools) -> None:
    for ours, theirs in zip(workers(2).run(look_ahead, True), workers(2).run(look_ahead, False), strict=True):
        assert all(map(torch.equal, ours, theirs))
