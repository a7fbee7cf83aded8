"""Rounded wires: replicas stay equal in every bit, and what rounding leaves out is not lost.

Prevents: residuals that are forgotten when DDP forms other buckets, masters that go stale when parameters are written
or loaded, saves that change a run, and ranks whose parameters part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from tests.dear.test_sums import Real, gradient
from tests.support.dear.twins import CONFIG
from tests.support.messages import logged
from tests.support.workers import WorkerPools

WIRES = {"bf16": 2**-8, "int8": 1 / 127, "int4": 1 / 7}  # with a bound of the relative error
STEPS = 8


class InOtherOrder(Real):
    """Gradients come in another order than DDP expects, so it forms other buckets in the second step."""

    def forward(self, step: int, rank: int) -> Tensor:
        total = torch.zeros(())
        for layer, weight in enumerate(self.weights):
            total = total + (weight * gradient(step, rank, layer, tuple(weight.shape))).sum()
        return total


def begin(
    config: DearConfig, rate: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DearState]:
    model = InOtherOrder() if config.node_size else Real().to(dtype)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate)
    state = DearState(ddp, optimizer, config)
    ddp.register_comm_hook(state, dear_hook)
    return ddp, optimizer, state


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(step, rank).backward()
        optimizer.step()


def masters(state: DearState, model: nn.Module) -> dict[int, Tensor]:
    """Return every parameter as the optimizer of its owners has it, (numel,), 0 where this rank owns nothing."""
    driver = state._driver
    whole = {i: torch.zeros(p.numel()) for i, p in enumerate(driver.parameters.tensors)}
    for shard in driver.update.shards:
        whole[shard.range.parameter][shard.range.start : shard.range.end] = shard.tensor.detach()
    return whole


def nothing_is_lost(rank: int, world_size: int, config: DearConfig) -> dict[str, Any]:
    """With a rate of 1 the weights' changes are the applied means. With the residuals they are all gradients."""
    ddp, optimizer, state = begin(config)
    names = [name for name, _ in ddp.module.named_parameters()]
    before = [parameter.detach().clone() for parameter in ddp.module.parameters()]
    train(ddp, optimizer, rank, range(STEPS))
    state.synchronize()
    after = [parameter.detach().clone() for parameter in ddp.module.parameters()]
    index_of = {name: index for index, name in enumerate(state._driver.parameters.names)}
    owned, residuals = masters(state, ddp.module), state._driver.wires._residuals.by_parameter()
    gap, distance = 0.0, 0.0
    for layer, name in enumerate(names):
        index = index_of[name]
        precise = state.sum_over_ranks(owned[index])
        shape = before[layer].shape
        given = sum(gradient(s, r, layer, tuple(shape)) for s in range(STEPS) for r in range(world_size))
        assert isinstance(given, Tensor)
        applied = world_size * (before[layer].flatten() - precise)
        left = state.sum_over_ranks(residuals[index].clone()) if index in residuals else torch.zeros(())
        gap = max(gap, float((applied + left - given.flatten()).abs().max()))
        distance = max(distance, float((after[layer].flatten() - precise).abs().max()))
    sent, stale = state.stats().sent_bytes, residuals_of_others(state, rank, config.node_size or 1)
    state.close()
    return {"gap": gap, "distance": distance, "weights": after, "sent": sent, "stale": stale}


def residuals_of_others(state: DearState, rank: int, node_size: int) -> float:
    """Return the largest residual that this rank has in ranges which it does not encode."""
    layout, largest = state._driver.layout.current, 0.0
    assert layout is not None
    for atom in layout.atoms:
        bucket = state._driver.wires._residuals.of_bucket(layout.buckets[atom.bucket])
        ranges = bucket[atom.start : atom.start + atom.numel].split([b - a for a, b in pairwise(atom.bounds)])
        others = [part for owner, part in enumerate(ranges) if (owner - rank) % node_size and part.numel()]
        largest = max([largest, *(float(part.abs().max()) for part in others)])
    return largest


@pytest.mark.quick("3")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_nothing_is_lost(workers: WorkerPools, world_size: int) -> None:
    whole = workers(world_size).run(nothing_is_lost, replace(CONFIG, wire="float32"))[0]["sent"]
    shares: dict[Any, float] = {"bf16": 0.5, "int8": 0.3, "int4": 0.2}
    for wire, share in shares.items():
        outcomes = workers(world_size).run(nothing_is_lost, replace(CONFIG, wire=wire))
        for outcome in outcomes:
            assert outcome["gap"] < 1e-3, (wire, outcome["gap"])
            assert all(map(torch.equal, outcome["weights"], outcomes[0]["weights"])), wire
            assert 0 < outcome["distance"] < 4 * WIRES[wire], "replicas do not follow the masters"
        assert outcomes[0]["sent"] < 1.5 * share * whole  # ranges are short here, and their last blocks are not full


def test_two_levels(workers: WorkerPools) -> None:
    config = replace(CONFIG, collective="two-level", node_size=2, wire="int8")
    outcomes = workers(4).run(nothing_is_lost, config)
    assert all(outcome["gap"] < 1e-3 and outcome["stale"] == 0 for outcome in outcomes)
    assert all(map(torch.equal, outcomes[0]["weights"], outcomes[3]["weights"]))


def written_and_resumed(rank: int, world_size: int) -> dict[str, bool]:
    """Masters follow what users write, and come back with a checkpoint, also in a run that has other atoms."""
    config = replace(CONFIG, wire="int8")
    ddp, optimizer, state = begin(config)
    train(ddp, optimizer, rank, range(4))
    state.synchronize()
    model, saved = copy.deepcopy((ddp.module.state_dict(), state.full_optimizer_state_dict()))
    before = masters(state, ddp.module)
    precise = [state.sum_over_ranks(before[index]) for index in range(len(before))]
    with torch.no_grad():
        ddp.module.weights[0].fill_(128.0)
    optimizer.param_groups[0]["lr"] = 0.0
    train(ddp, optimizer, rank, range(4, 5))
    first = state._driver.parameters.index_of(ddp.module.weights[0])
    assert first is not None
    written = state.sum_over_ranks(masters(state, ddp.module)[first])
    state.close()

    ddp, optimizer, state = begin(replace(config, atom_mb=0.005))
    ddp.module.load_state_dict(model)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.0
    train(ddp, optimizer, rank, range(4, 6))
    after = masters(state, ddp.module)
    resumed = [state.sum_over_ranks(after[index]) for index in range(len(after))]
    state.close()
    return {"written": bool((written == 128.0).all()), "resumed": all(map(torch.equal, resumed, precise))}


def test_masters_are_written_and_resumed(workers: WorkerPools) -> None:
    assert workers(2).run(written_and_resumed) == [{"written": True, "resumed": True}] * 2


class Spikes(nn.Module):
    """Gradients of which few are much larger than the others, in the second weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.zeros(4096))
        self.spiky = nn.Parameter(torch.zeros(4096))

    def forward(self, step: int) -> Tensor:
        values = torch.randn(4096, generator=torch.Generator().manual_seed(step))
        spikes = values.clone()
        spikes[::64] *= 15
        return (self.even * values + self.spiky * spikes).sum()


def warnings(rank: int, world_size: int) -> list[str]:
    with logged() as lines:
        for wire in ("int8", "int4"):
            ddp = DistributedDataParallel(Spikes(), gradient_as_bucket_view=True, bucket_cap_mb=0.01)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
            state = DearState(ddp, optimizer, replace(CONFIG, wire=wire, atom_mb=0.01))
            ddp.register_comm_hook(state, dear_hook)
            for step in range(2):
                ddp(step).backward()
                optimizer.step()
            state.close()
    return [line for line in lines if "rounding takes" in line]


def test_large_errors_of_four_bits_are_told_once(workers: WorkerPools) -> None:
    for rank, (line,) in enumerate(workers(2).run(warnings)):
        assert line.startswith(f'rank {rank}: with wire="int4"') and "(spiky)" in line and 'use wire="int8"' in line


SAVES: dict[str, Callable[[DistributedDataParallel, torch.optim.Optimizer, DearState], Any]] = {
    "nothing": lambda ddp, optimizer, state: None,
    "full": lambda ddp, optimizer, state: state.full_optimizer_state_dict()["state"],
    "on one rank": lambda ddp, optimizer, state: state.consolidate(),
    "sharded": lambda ddp, optimizer, state: state.sharded_optimizer_state_dict(),
    "spread": lambda ddp, optimizer, state: get_optimizer_state_dict(ddp, optimizer),
}


def save_while_swapped(rank: int, world_size: int, config: DearConfig, dtype: torch.dtype) -> list[str]:
    """Return the saves that change bits of later steps, made while other weights are in the model's place for once."""
    found, expected = [], None
    for name, save in SAVES.items():
        ddp, optimizer, state = begin(config, 0.01, dtype)
        train(ddp, optimizer, rank, range(4))
        trained = copy.deepcopy(ddp.module.state_dict())
        ddp.module.load_state_dict({key: 0.5 * value for key, value in trained.items()})
        saved = save(ddp, optimizer, state)
        if name == "full" and saved:
            found.append("the saved masters are not the weights that are saved with them")
        ddp.module.load_state_dict(trained)
        train(ddp, optimizer, rank, range(4, STEPS))
        state.synchronize()
        after = [*ddp.module.state_dict().values(), *masters(state, ddp.module).values()]
        expected = expected or copy.deepcopy(after)
        if not all(map(torch.equal, after, expected)):
            found.append(name)
        state.close()
    return found


@pytest.mark.parametrize(("config", "dtype"), [
    (replace(CONFIG, wire="int8"), torch.float32), (replace(CONFIG, master_dtype=torch.float32), torch.bfloat16),
], ids=["differences", "masters"])  # fmt: skip
def test_a_save_changes_nothing(workers: WorkerPools, config: DearConfig, dtype: torch.dtype) -> None:
    assert workers(2).run(save_while_swapped, config, dtype) == [[], []]
