"""Tables and a model whose branches change, moved by one coordinator, in one order of priority.

Prevents: rows that nobody waits for before gradients that everybody waits for, and hooks that only work alone.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook, shard_embeddings
from ddp_hooks.coordination import Coordinator, CoordinatorConfig, coordinate
from tests.support.embedding.twins import sum_and_divide
from tests.support.workers import WorkerPools

CONFIG = CoordinatorConfig(lanes=1, slice_mb=0.002, credit_mb=0.002, timeout_s=20, stall_warning_s=10, cycle_ms=0.2)


class Recommender(nn.Module):
    """A table of items, and a head for every task."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(200, 12, sparse=True)
        self.trunk = nn.Linear(12, 40)
        self.heads = nn.ModuleList(nn.Linear(40, 5 + index) for index in range(4))

    def forward(self, ids: Tensor, task: int) -> Tensor:
        return self.heads[task](self.trunk(self.items(ids)).relu()).pow(2).mean()


def train(rank: int, world_size: int, prefetch: bool) -> tuple[float, list[str], dict[str, int]]:
    """How far apart both models are in the end; what left, in order; priorities by name."""
    torch.manual_seed(5)
    model = Recommender().double()
    plain = copy.deepcopy(model)
    coordinator = Coordinator(config=CONFIG)
    tables = shard_embeddings(model, None, 100, torch.optim.SGD, coordinator=coordinator, lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    coordinated = coordinate(model, optimizer, coordinator=coordinator)
    tables.follow(optimizer)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    ddp.register_comm_hook(None, sum_and_divide)
    other = torch.optim.SGD(ddp.parameters(), lr=0.1)

    left: list[str] = []
    priorities: dict[str, int] = {}
    start = coordinator._control._executor.start

    def note(message: Any, mine: Any) -> Any:
        left.extend(request.name for request in message.requests)
        priorities.update({request.name: request.priority for request in message.requests})
        return start(message, mine)

    coordinator._control._executor.start = note  # type: ignore[method-assign]
    chance = torch.Generator().manual_seed(rank)
    data = [torch.randint(0, 200, (9,), generator=chance) for _ in range(8)]
    for step, ids in enumerate(tables.prefetch(data, lambda ids: ids) if prefetch else data):
        task = (step + rank) % 4 if step % 2 else step % 4
        for call, each in ((model, optimizer), (ddp, other)):
            each.zero_grad()
            call(ids, task).backward()
            each.step()
    full = tables.full_state_dict()
    gap = max(float((full[name] - value).abs().max()) for name, value in plain.state_dict().items())
    tables.close()
    coordinated.close()
    assert coordinator.all_reduce(torch.ones(1), "still there").wait().item() == world_size
    coordinator.close()
    return gap, left, priorities


@pytest.mark.quick("3-*")
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_one_coordinator_moves_both(workers: WorkerPools, world_size: int, prefetch: bool) -> None:
    found = workers(world_size).run(train, prefetch)
    for gap, left, priorities in found:
        assert gap < 1e-12
        assert left == found[0][1], "in one order"
        assert {priorities[name] for name in left if name.startswith(("prior", "lookup", "id"))} == {1}
        assert {priorities[name] for name in left if name.startswith("group")} == {0}
        if prefetch:
            assert {priorities[name] for name in left if name.startswith("delayed")} == {-1}


def refuse(rank: int, world_size: int) -> list[str]:
    pair: Any = dist.new_group([0, 1])
    coordinator = Coordinator(config=CONFIG)
    errors = []
    for attempt in range(3):
        model, others = Recommender(), pair if rank < 2 else None
        try:
            if attempt == 0 and rank < 2:
                shard_embeddings(model, others, 100, torch.optim.SGD, coordinator=coordinator, lr=0.1)
            if attempt == 1:
                shard_embeddings(
                    model, None, 100, torch.optim.SGD, coordinator=coordinator if rank else None, lr=0.1
                )
            if attempt == 2:
                coordinate(nn.Linear(2, 2), config=CONFIG, coordinator=coordinator)
        except ValueError as error:
            errors.append(str(error))
    coordinator.close()
    return errors


def test_coordinators_that_do_not_fit(workers: WorkerPools) -> None:
    found = workers(3).run(refuse)
    assert found[0] == found[1] and found[2] == found[0][1:]
    assert "the coordinator has ranks [0, 1, 2], and the tables have [0, 1]" in found[0][0]
    assert "coordinator is False on ranks [0], True on ranks [1, 2]" in found[0][1]
    assert "a coordinator has its own config" in found[0][2]


def beside_dear(rank: int, world_size: int) -> float:
    """How far the table is from plain DDP's, where delayed rows follow DeAR's gathers, work of other lanes."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(200, 12), nn.Flatten(), nn.Linear(36, 1)).double()
    plain = copy.deepcopy(model)
    coordinator = Coordinator(config=CONFIG)
    tables = shard_embeddings(model, None, 100, torch.optim.SGD, coordinator=coordinator, lr=0.1)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, DearConfig(timeout_s=20))
    ddp.register_comm_hook(state, dear_hook)
    other = DistributedDataParallel(plain)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    data = [torch.randint(0, 200, (8, 3), generator=generator) for _ in range(6)]
    delayed = 0
    for ids in tables.prefetch(data, lambda batch: {"0": batch}):
        for each, steps in ((ddp, optimizer), (other, other_optimizer)):
            steps.zero_grad()
            each(ids).pow(2).mean().backward()
            steps.step()
        delayed += tables.stats().num_delayed_rows
    assert delayed > 0, "some rows followed the gathers"
    distance = (tables.full_state_dict()["0.weight"] - plain[0].weight).abs().max().item()
    state.close()
    tables.close()
    coordinator.close()
    return float(distance)


def test_rows_follow_work_of_other_lanes(workers: WorkerPools) -> None:
    assert max(workers(2).run(beside_dear)) < 1e-12
