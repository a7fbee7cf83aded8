"""torch.distributed.checkpoint.state_dict: what it returns and takes is plain DDP's, whole or spread over the ranks.

Prevents: states of one shard, hangs, other keys than plain DDP's, and learning rates of 0 after an error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from ddp_hooks.dear.update.spread_tensor import SpreadTensor
from tests.support.dear.loops import adamw_two_groups
from tests.support.dear.saving import differences, train_step
from tests.support.dear.twins import CONFIG, WholeNumbers
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

FULL = StateDictOptions(full_state_dict=True)
ON_FIRST_RANK = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST_RANK = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
CONFIGS = {
    "plain": None,
    "sharded": CONFIG,
    "replicated": DearConfig(**{**vars(CONFIG), "update": "replicated"}),
    "masters": DearConfig(**{**vars(CONFIG), "master_dtype": torch.float32}),
}


class Run:
    """A model under plain DDP, or with one of the kinds of update, and what a user would write."""

    def __init__(
        self,
        world_size: int,
        kind: str,
        optimizer: Callable[..., Any] = adamw_two_groups,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(7)
        self.world_size = world_size
        model = WholeNumbers(world_size).to(dtype)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        self.optimizer = optimizer(self.ddp.module)
        config = CONFIGS[kind]
        self.state = DearState(self.ddp, self.optimizer, config) if config is not None else None
        if self.state is not None:
            self.ddp.register_comm_hook(self.state, dear_hook)

    def train(self, steps: range) -> bytes:
        for step in steps:
            train_step(self.ddp, self.optimizer, dist.get_rank(), self.world_size, step)
        return b"".join(value.float().numpy().tobytes() for value in self.ddp.module.state_dict().values())

    def get(self, options: StateDictOptions | None = None) -> Any:
        return get_state_dict(self.ddp, self.optimizer, options=options)

    def set(self, weights: Any, state: Any, options: StateDictOptions | None = None) -> None:
        set_state_dict(self.ddp, self.optimizer, model_state_dict=weights, optim_state_dict=state, options=options)

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def shapes(value: Any) -> Any:
    """A nest with tensors' shapes and types in their place."""
    if isinstance(value, dict):
        return {key: shapes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shapes(item) for item in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def compare_what_is_returned(rank: int, world_size: int, kind: str) -> list[str]:
    """Differences between what this kind of update and plain DDP return, for all options."""
    plain, ours = Run(world_size, "plain"), Run(world_size, kind)
    found = []
    for moment, steps in [("new", range(0)), ("after the first step", range(1)), ("later", range(1, 4))]:
        for run in (plain, ours):
            run.train(steps)
        options: StateDictOptions | None
        for name, options in [("full", FULL), ("first rank", ON_FIRST_RANK)]:
            for theirs, mine in zip(plain.get(options), ours.get(options), strict=True):
                found += [f"{moment}, {name}: {text}" for text in differences(mine, theirs)]
        for options in (None, StateDictOptions(cpu_offload=True), FLAT):
            theirs = get_optimizer_state_dict(plain.ddp, plain.optimizer, options=options)
            mine = get_optimizer_state_dict(ours.ddp, ours.optimizer, options=options)
            found += [f"{moment}: {text}" for text in differences(shapes(mine), shapes(theirs))]
        if kind == "sharded":
            state: Any = get_optimizer_state_dict(ours.ddp, ours.optimizer)["state"]
            averages = [entries["exp_avg"] for entries in state.values()]
            assert all(isinstance(average, SpreadTensor) for average in averages)
    assert differences(get_model_state_dict(ours.ddp), get_model_state_dict(plain.ddp)) == []
    if ours.state is not None and kind == "sharded":  # on one rank alone, after consolidate()
        ours.state.consolidate(to=1)
        if rank == 1:
            found += differences(ours.get()[1], plain.get()[1], "consolidated")
        else:
            refused = message_of(ours.get)
            found += [] if "call get_state_dict() on rank 1 only" in refused else [f"rank {rank}: {refused}"]
        ours.state.consolidate(to=0)  # where all that is asked for is
        found += differences(ours.get(ON_FIRST_RANK)[1], plain.get(ON_FIRST_RANK)[1], "consolidated on the first rank")
        weights, optimizer_state = copy.deepcopy(plain.get(FULL))
        for run in (plain, ours):
            run.set(copy.deepcopy(weights), copy.deepcopy(optimizer_state), FULL)
            run.train(range(4, 5))
        found += differences(ours.get(FULL)[1], plain.get(FULL)[1], "loaded after consolidate()")
    ours.close()
    return found


@pytest.mark.quick("sharded-3", "replicated-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_what_is_returned_is_what_plain_ddp_has(workers: WorkerPools, world_size: int, kind: str) -> None:
    for found in workers(world_size).run(compare_what_is_returned, kind):
        assert found == []


def set_everywhere(rank: int, world_size: int, kind: str) -> dict[str, bool]:
    """Whether runs end in plain DDP's bits that take its state, by when and how they take it."""
    plain = Run(world_size, "plain")
    plain.train(range(3))
    weights, state = copy.deepcopy(plain.get())
    flat = copy.deepcopy(get_optimizer_state_dict(plain.ddp, plain.optimizer, options=FLAT))
    expected = plain.train(range(3, 6))
    ways = {
        "whole": (state, None),
        "full": (state, FULL),
        "from the first rank": (state, FROM_FIRST_RANK),
        "flat": (flat, FLAT),
    }
    same = {}
    for steps in (0, 2):
        for way, (optimizer_state, options) in ways.items():
            run = Run(world_size, kind)
            run.train(range(10, 10 + steps))
            given = copy.deepcopy((weights, optimizer_state))
            if way == "from the first rank":
                given = given if rank == 0 else ({}, {})
                set_model_state_dict(run.ddp, given[0], options=options)
                set_optimizer_state_dict(run.ddp, run.optimizer, given[1], options=options)
            else:
                run.set(*given, options)
            rates = [group["lr"] for group in run.optimizer.param_groups]
            same[f"{way}, after {steps} steps"] = run.train(range(3, 6)) == expected and 0.0 not in rates
            run.close()
    run = Run(world_size, kind)
    run.train(range(2))
    kept = copy.deepcopy(run.get())
    after = run.train(range(2, 4))
    set_model_state_dict(run.ddp, kept[0])
    set_optimizer_state_dict(run.ddp, run.optimizer, kept[1])
    same["what was kept in memory"] = run.train(range(2, 4)) == after
    run.close()
    return same


@pytest.mark.quick("sharded")
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_what_plain_ddp_has_is_taken(workers: WorkerPools, kind: str) -> None:
    for same in workers(2).run(set_everywhere, kind):
        assert all(same.values()), same


def save(rank: int, world_size: int, kind: str, folder: str) -> int:
    """Three steps, saved as any program for FSDP2 would."""
    run = Run(world_size, kind)
    run.train(range(3))
    weights, state = run.get()
    content = {"model": weights, "optimizer": state}
    if "async" in folder:
        saving = dcp.async_save(content, checkpoint_id=folder)
        assert isinstance(saving, Future)
        run.train(range(20, 22))  # what is being written is a copy
        saving.result()
    else:
        dcp.save(content, checkpoint_id=folder)
    run.close()
    held = [v for entries in state["state"].values() for v in entries.values() if isinstance(v, SpreadTensor)]
    return sum(part.numel() for tensor in held for part in tensor.local_shards())


def load(rank: int, world_size: int, kind: str, folder: str, steps: int) -> bytes:
    """Train for some steps, go back to what was saved, and go on."""
    run = Run(world_size, kind)
    run.train(range(10, 10 + steps))
    weights, state = run.get()
    content = {"model": weights, "optimizer": state}
    dcp.load(content, checkpoint_id=folder)
    run.set(content["model"], content["optimizer"])
    ended = run.train(range(3, 6))
    run.close()
    return ended


@pytest.mark.quick("2-sharded-3-sharded", "2-replicated-3-sharded")
@pytest.mark.parametrize(
    ("first", "saver", "then", "loader"),
    [
        (2, "sharded", 3, "sharded"),
        (3, "sharded", 2, "plain"),
        (2, "plain", 3, "sharded"),
        (2, "sharded", 2, "replicated"),
        (2, "replicated", 3, "sharded"),
    ],
)
def test_any_run_goes_on_with_what_any_other_saved(
    workers: WorkerPools, tmp_path: Path, first: int, saver: str, then: int, loader: str
) -> None:
    folder, reference = str(tmp_path / "checkpoint"), str(tmp_path / "reference")
    held = workers(first).run(save, saver, folder)
    workers(first).run(save, "plain", reference)
    expected = workers(then).run(load, "plain", reference, 0)
    assert len(set(expected)) == 1
    for steps in (0, 2):
        assert workers(then).run(load, loader, folder, steps) == expected
    numel = sum(parameter.numel() for parameter in WholeNumbers(1).parameters())
    assert sum(held) == (2 * numel if saver == "sharded" else 0)  # two averages, every element on one rank


def test_an_asynchronous_save_writes_what_was_there(workers: WorkerPools, tmp_path: Path) -> None:
    at_once, later = str(tmp_path / "sync"), str(tmp_path / "async")
    workers(2).run(save, "sharded", at_once)
    workers(2).run(save, "sharded", later)
    assert workers(2).run(load, "sharded", later, 0) == workers(2).run(load, "sharded", at_once, 0)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def masters(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    """Whether masters are saved and loaded, by any number of steps before; and whether a state without any is taken."""
    run = Run(world_size, "masters", adamw, torch.bfloat16)
    run.train(range(4))
    weights, state = run.get()
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    expected = run.train(range(4, 8))
    run.close()
    same = {}
    for steps in (0, 2):
        run = Run(world_size, "masters", adamw, torch.bfloat16)
        run.train(range(10, 10 + steps))
        weights, state = run.get()
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        run.set(weights, state)
        same[f"after {steps} steps"] = run.train(range(4, 8)) == expected
        run.close()
    plain = Run(world_size, "plain", adamw, torch.bfloat16)
    plain.train(range(2))
    weights, state = plain.get()
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}-plain")
    run = Run(world_size, "masters", adamw, torch.bfloat16)
    weights, state = run.get()
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}-plain", planner=planner)
    run.set(weights, state)
    weights, moments = run.get(FULL)
    theirs = plain.get(FULL)
    same["without masters"] = differences(weights, theirs[0]) == [] and all(
        torch.equal(moments["state"][name]["exp_avg"].bfloat16(), entries["exp_avg"])
        for name, entries in theirs[1]["state"].items()
    )
    run.close()
    return same


def test_masters_are_saved_and_loaded(workers: WorkerPools, tmp_path: Path) -> None:
    for same in workers(2).run(masters, str(tmp_path / "checkpoint")):
        assert all(same.values()), same


def errors(rank: int, world_size: int) -> dict[str, Any]:
    """What is refused, and what the optimizer is afterwards."""
    run = Run(world_size, "sharded", lambda model: torch.optim.SGD(model.parameters(), lr=0.5))
    assert run.state is not None
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.SGD, "_init_group", failing)
        found["step"] = message_of(run.get)
    found["rate"] = run.optimizer.param_groups[0]["lr"]
    found["gradients"] = [p.grad for p in run.ddp.parameters() if p.grad is not None]
    run.train(range(2))
    run.close()
    run.optimizer.zero_grad()
    found["closed"] = message_of(run.get)
    found["rate after close"] = run.optimizer.param_groups[0]["lr"]
    return found


def failing(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken")


def test_an_error_leaves_the_optimizer_as_it_was(workers: WorkerPools) -> None:
    for found in workers(2).run(errors):
        assert "broken" in found["step"] and "was closed" in found["closed"], found
        assert found["rate"] == found["rate after close"] == 0.5 and found["gradients"] == []
