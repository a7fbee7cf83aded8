"""Schedules are compared when they are fixed, and not again; with DDP_HOOKS_VERIFY=1, before every collective.

Prevents: hooks that talk about their order in every step, and differences between ranks that show as a hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, TopKConfig, TopKState, dear_hook, shard_embeddings, topk_hook
from ddp_hooks.comm import LaneError, Lanes, LaneSettings, Partition, Recorder, agreement, aligned_bounds
from ddp_hooks.comm.agreement import VERIFY
from ddp_hooks.coordination import coordinate
from ddp_hooks.embedding import EmbeddingState, embedding_hook
from fsdp_ext import extend
from tests.support.workers import WorkerPools


class Net(nn.Module):
    """A table and two layers."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 8, sparse=sparse)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.table(ids)).sum()


def _dear(model: nn.Module) -> Any:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    state = DearState(ddp, optimizer)
    ddp.register_comm_hook(state, dear_hook)
    return ddp, [optimizer], state.close


def _topk(algorithm: str) -> Callable[[nn.Module], Any]:
    def begin(model: nn.Module) -> Any:
        ddp = DistributedDataParallel(model)
        state = TopKState(ddp, TopKConfig(density=0.1, algorithm=algorithm))  # type: ignore[arg-type]
        ddp.register_comm_hook(state, topk_hook)
        return ddp, [torch.optim.SGD(ddp.parameters(), lr=0.01)], state.close

    return begin


def _tables(model: nn.Module) -> Any:
    tables = shard_embeddings(model, None, 32, torch.optim.SGD, lr=0.01)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    tables.follow(optimizer)
    return ddp, [optimizer], tables.close


def _sparse_tables(model: nn.Module) -> Any:
    ddp = DistributedDataParallel(model)
    state = EmbeddingState(ddp)
    ddp.register_comm_hook(state, embedding_hook)
    return ddp, [torch.optim.SGD(ddp.parameters(), lr=0.01)], state.close


def _sharded(model: nn.Module) -> Any:
    for layer in model.get_submodule("body").children():
        fully_shard(layer)
    fully_shard(model)
    extension = extend(model)
    return model, [torch.optim.SGD(model.parameters(), lr=0.01)], extension.close


def _coordinated(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, [optimizer], coordinate(model, optimizer).close


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "dear": _dear,
    "spardl": _topk("spardl"),
    "gtopk": _topk("gtopk"),
    "topka": _topk("topka"),
    "tables": _tables,
    "sparse tables": _sparse_tables,
    "fsdp2": _sharded,
    "coordinated": _coordinated,
}


def train(rank: int, world_size: int, hook: str, verify: bool) -> tuple[list[float], list[int]]:
    """Losses, and how often anything was compared so far, step by step."""
    torch.manual_seed(1)
    if verify:
        os.environ[VERIFY] = "1"
    try:
        with mock.patch.object(agreement, "compare", wraps=agreement.compare) as compare:
            model, optimizers, close = HOOKS[hook](Net(hook in ("tables", "sparse tables")))
            losses, compared = [], []
            for step in range(6):
                ids = torch.randint(0, 64, (5,), generator=torch.Generator().manual_seed(10 * step + rank))
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = model(ids)
                loss.backward()
                for optimizer in optimizers:
                    optimizer.step()
                losses.append(float(loss.detach()))
                compared.append(compare.call_count)
            close()
        return losses, compared
    finally:
        os.environ.pop(VERIFY, None)


@pytest.mark.quick("*-2", "dear-3")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("hook", HOOKS)
def test_compared_once_and_before_everything_if_asked(workers: WorkerPools, hook: str, world_size: int) -> None:
    silent = workers(world_size).run(train, hook, False)
    for _, compared in silent:
        assert compared[0] > 0 and len(set(compared[2:])) == 1, "from the third step on nobody compares anything"
    verified = workers(world_size).run(train, hook, True)
    assert [losses for losses, _ in verified] == [losses for losses, _ in silent]


def move(rank: int, world_size: int, case: str) -> tuple[str, int, list[float]]:
    settings = LaneSettings(timeout_s=20, stall_warning_s=10, verify=True)
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, 1, torch.device("cpu"), settings, Recorder())
    flat = torch.full((10,), float(rank))
    partition = Partition(flat, aligned_bounds(10, world_size, 4))
    error = ""
    try:
        lanes.reduce_scatter([partition], "layer 3").wait()
        rounds = lanes.traffic.rounds
        lanes.all_gather([partition], "layer 4" if case == "label" and rank == 1 else "layer 3").wait()
        odd = case == "size" and rank == 2
        other = torch.full((11 if odd else 10,), float(rank))
        lanes.reduce_scatter([Partition(other, aligned_bounds(len(other), world_size, 4))], "layer 5").wait()
    except LaneError as found:
        error = str(found)
    lanes.close()
    return error, rounds, flat.tolist()


@pytest.mark.quick("3")
@pytest.mark.parametrize("world_size", [3, 4])
def test_what_differs_is_said_before_it_moves(workers: WorkerPools, world_size: int) -> None:
    everyone = list(range(world_size))
    same = workers(world_size).run(move, "none")
    assert all(not error and rounds == world_size for error, rounds, _ in same), "P - 1 to compare, one to move"
    total = float(sum(everyone))
    assert all(flat == [total] * 10 for _, _, flat in same)

    errors = {error for error, _, _ in workers(world_size).run(move, "label")}
    others = [rank for rank in everyone if rank != 1]
    assert len(errors) == 1
    assert f"is all-gather of layer 3: 10 of torch.float32 in {world_size} on ranks {others}" in min(errors)
    assert "all-gather of layer 4" in min(errors) and "on ranks [1]" in min(errors)

    errors = {error for error, _, _ in workers(world_size).run(move, "size")}
    assert len(errors) == 1 and "11 of torch.float32" in min(errors) and "on ranks [2]" in min(errors)


def begin_alone(rank: int, world_size: int) -> str:
    if rank == 1:
        os.environ[VERIFY] = "1"
    try:
        model = Net(False)
        coordinate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ValueError as error:
        return str(error)
    finally:
        os.environ.pop(VERIFY, None)
    return ""


def test_all_ranks_verify_or_none(workers: WorkerPools) -> None:
    errors = workers(2).run(begin_alone)
    assert len(set(errors)) == 1 and f"{VERIFY} is 0 on ranks [0], 1 on ranks [1]" in errors[0]
