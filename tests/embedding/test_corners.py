"""Loops that are unusual but right, and wrong ones that look right.

Prevents: updates that depend on whether batches were prefetched, settings that are changed behind the tables' back,
whole tables that are old, batches of one loader taken for those of another, and memory that grows.
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_hooks import GradScaler, TableConfig, shard_embeddings
from ddp_hooks.intercept import co_optimizers
from tests.support.embedding.twins import CONFIG, Batch, Side, Twins, batches, ids_of
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


class Two(nn.Module):
    """The second table is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(20, 4, sparse=True), nn.Embedding(20, 4, sparse=True)
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor, with_second: bool = True) -> Tensor:
        loss = (self.first(ids) * self.factor).sum()
        return loss + self.second(ids).square().sum() if with_second else loss


def sometimes_unused(rank: int, world_size: int, prefetch: bool) -> list[int]:
    """Adam's steps of both tables."""
    torch.manual_seed(3)
    model = Two()
    tables = shard_embeddings(model, None, 1, torch.optim.SparseAdam, config=CONFIG, lr=0.1)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    tables.follow(optimizer)
    data = [torch.randint(0, 20, (5,), generator=torch.Generator().manual_seed(9 * rank + i)) for i in range(8)]
    loader = tables.prefetch(data, lambda ids: {"first": ids, "second": ids}) if prefetch else data
    for number, ids in enumerate(loader):
        optimizer.zero_grad()
        ddp(ids, number % 2 == 0).backward()
        optimizer.step()
    state = tables.full_optimizer_state_dict()["state"]
    tables.close()
    return [state[position]["step"] for position in range(2)]


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
def test_a_table_that_is_not_used_is_not_updated(workers: WorkerPools, prefetch: bool) -> None:
    assert workers(2).run(sometimes_unused, prefetch) == [[8, 4]] * 2


def one_step(side: Side, batch: Batch) -> None:
    side.zero_grad()
    side.ddp(batch).backward()
    side.step()


def misused(rank: int, world_size: int) -> list[str]:
    messages = []
    data = batches(rank, world_size, 9)

    twins = Twins.of(world_size, "sgd")
    tables = twins.ours.tables
    assert tables is not None
    one_step(twins.ours, data[0])
    messages.append(message_of(twins.ours.step))  # again
    twins.ours.ddp(data[1]).backward()  # without zero_grad
    messages.append(message_of(twins.ours.step))
    twins.ours.zero_grad()
    settings: Any = tables.optimizer
    settings.param_groups[0]["momentum"] = 0.5
    twins.ours.ddp(data[2]).backward()
    messages.append(message_of(twins.ours.step))
    messages.append(message_of(lambda: shard_embeddings(twins.ours.ddp.module, modules=1)))
    messages.append(message_of(lambda: settings.step(lambda: 0.0)))
    with tables.local():
        with tables.local():
            pass
        assert twins.ours.ddp.module.encoder.weight.shape == (40, 10)
        messages.append(message_of(twins.ours.step))
        messages.append(message_of(lambda: twins.ours.ddp.module.load_state_dict(twins.plain.ddp.module.state_dict())))
    tables.close()

    twins = Twins.of(world_size, "sgd")
    tables = twins.ours.tables
    assert tables is not None
    tables.unfollow()
    scaler = GradScaler("cpu")
    scaler.scale(twins.ours.ddp(data[3])).backward()
    messages.append(message_of(lambda: scaler.step(twins.ours.optimizers[0])))
    twins.ours.zero_grad()
    messages.append(message_of(tables.step))
    tables.close()
    messages.append(message_of(tables.optimizer.state_dict))
    messages.append(message_of(twins.ours.ddp.module.state_dict))
    messages.append(message_of(lambda: tables.follow(twins.ours.optimizers[0])))
    messages.append(message_of(lambda: tables.prefetch([], ids_of)))
    assert co_optimizers.co_optimizers_in(twins.ours.ddp.module) == []
    return messages


def test_misuse(workers: WorkerPools) -> None:
    expected = [
        "a second step with the same gradients",
        "a backward after a step, without zero_grad()",
        "SGD's momentum moves rows that have no gradient",
        "has sharded tables already",
        "takes no closure",
        "a step inside of tables.local()",
        "leave it before",
        "call tables.follow(optimizer) once",
        "call tables.step() before optimizer.zero_grad()",
        "before the next step and tables.close()",
        "state_dict(): the tables were closed",
        "the tables were closed",
        "the tables were closed",
    ]
    for messages in workers(2).run(misused):
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


def stale(rank: int, world_size: int) -> tuple[bool, bool]:
    """What was gathered to be saved is old when something else has been loaded."""
    twins = Twins.of(world_size)
    side, tables = twins.ours, twins.ours.tables
    assert tables is not None
    for batch in tables.prefetch(batches(rank, world_size, 4), ids_of):
        one_step(side, batch)
    tables.consolidate(0)
    full = tables.full_state_dict()
    side.ddp.module.load_state_dict(full)
    weights = message_of(side.ddp.module.state_dict)
    state = tables.full_optimizer_state_dict()
    tables.consolidate(0)
    state["param_groups"][0]["lr"] = 0.7
    tables.optimizer.load_state_dict(state)
    settings = message_of(tables.optimizer.state_dict)
    assert tables.optimizer.param_groups[0]["lr"] == 0.7
    dist.barrier()
    tables.close()
    return "on all ranks" in weights, "on all ranks" in settings


def test_what_was_gathered_is_old_after_loading(workers: WorkerPools) -> None:
    assert workers(2).run(stale) == [(True, True)] * 2


def other_loaders(rank: int, world_size: int, case: str) -> float:
    """Prefetched loaders beside each other."""
    # Adagrad counts steps in a tensor, which an update after inference mode must be able to write.
    twins = Twins.of(world_size, "adagrad" if case == "evaluation first" else "sparse_adam")
    tables = twins.ours.tables
    assert tables is not None
    data, others = batches(rank, world_size, 10), batches(rank + 10, world_size, 10)
    tables_of_plain: list[Any] = [twins.ours, twins.plain]
    for side in tables_of_plain:
        sharded = side.tables is not None
        loader: Any = tables.prefetch(data, ids_of) if sharded else data
        evaluation: Iterator[Batch] = iter(tables.prefetch(others, ids_of) if sharded else others)
        if case == "workers":
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
            loader = DataLoader(data, batch_size=None, num_workers=2)  # type: ignore[arg-type]
            loader = tables.prefetch(loader, ids_of) if sharded else loader
        for epoch in range(2):
            iterator = iter(loader)
            for number, batch in enumerate(iterator):
                if case == "evaluation between" and number % 2:
                    with torch.no_grad():
                        side.ddp(next(evaluation, data[0]))
                if case == "evaluation first":
                    with torch.inference_mode():
                        side.ddp.module(data[0])
                one_step(side, batch)
                if case == "left early" and number == 4 and epoch == 0:
                    kept = iterator  # which ends later on one rank
                    break
            if case == "left early" and epoch == 0 and rank == 0:
                del kept
                gc.collect()
    gap = twins.gap()
    tables.close()
    return gap


@pytest.mark.quick("left early")
@pytest.mark.parametrize("case", ["workers", "evaluation between", "evaluation first", "left early"])
def test_several_loaders(workers: WorkerPools, case: str) -> None:
    assert workers(2).run(other_loaders, case) == [0.0, 0.0]


def cast(rank: int, world_size: int) -> list[tuple[float, float]]:
    """Losses of prefetched batches, one of them on its way when the model is cast; and the same from whole tables."""
    torch.manual_seed(3)
    model = Two()
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.1)
    data = [torch.randint(0, 20, (5,), generator=torch.Generator().manual_seed(9 * rank + i)) for i in range(6)]
    losses = []
    for number, ids in enumerate(tables.prefetch(data, lambda ids: {"first": ids, "second": ids})):
        if number == 3:
            model.double()
        with tables.local(), torch.no_grad():
            expected = float(model(ids))
        tables.zero_grad()
        loss = model(ids)
        assert loss.dtype is (torch.float64 if number >= 3 else torch.float32)
        loss.backward()
        tables.step()
        losses.append((loss.item(), expected))
    tables.close()
    return losses


def test_casts_between_steps(workers: WorkerPools) -> None:
    for losses in workers(2).run(cast):
        assert all(loss == expected for loss, expected in losses)


class Opaque:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


class WithOpaqueOutput(Two):
    def forward(self, ids: Tensor, with_second: bool = True) -> Any:
        return Opaque(super().forward(ids, with_second))


class WithoutOutput(Two):
    def forward(self, ids: Tensor, with_second: bool = True) -> Any:
        self.loss = super().forward(ids, with_second)


class WithParameterAsOutput(Two):
    def forward(self, ids: Tensor, with_second: bool = True) -> Any:
        return super().forward(ids, with_second), self.factor


def outputs(rank: int, world_size: int) -> tuple[list[str], int]:
    messages = []
    for other in (WithOpaqueOutput(), WithoutOutput()):
        tables = shard_embeddings(other, None, 1, torch.optim.SGD, config=CONFIG, lr=0.1)
        holder: Any = other(torch.tensor([1, 2])) or other
        messages.append(message_of(holder.loss.backward))
        tables.close()
    model = WithParameterAsOutput()
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.1)
    for _ in range(4):
        tables.zero_grad()
        model(torch.tensor([1, 2]))[0].backward()
        tables.step()
    hooks = model.factor._backward_hooks
    tables.close()
    return messages, len(hooks or ())


def test_outputs(workers: WorkerPools) -> None:
    for messages, hooks in workers(2).run(outputs):
        assert len(messages) == 2
        assert all("return tensors, or tuples, lists or dicts of them" in message for message in messages)
        assert hooks == 0


def forwards_without_backward(rank: int, world_size: int) -> int:
    """Bytes of vectors that are kept after evaluation with gradients."""
    twins = Twins.of(world_size)
    tables = twins.ours.tables
    assert tables is not None
    for batch in batches(rank, world_size, 10):
        twins.ours.ddp.module(batch)
    kept = [lookup.vectors for lookup in tables._scheduler.expected.lookups()]
    tables.close()
    return sum(vectors is not None for vectors in kept)


def test_vectors_are_not_kept(workers: WorkerPools) -> None:
    assert workers(2).run(forwards_without_backward) == [8, 8]  # of the last two forwards' four calls


def desynchronized(rank: int, world_size: int, case: str) -> str:
    """Ranks do different things without prefetch: nobody's process ends, and everybody is told."""
    config = TableConfig(timeout_s=3, stall_warning_s=1)
    model = Two()
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=config, lr=0.1)
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    tables.follow(optimizer)

    def train() -> None:
        for number in range(4):
            optimizer.zero_grad()
            ddp(torch.tensor([1, 2]), case != "another table" or rank == 0 or number < 2).backward()
            optimizer.step()
        if case == "evaluation":
            with torch.no_grad():
                for _ in range(2 + rank):
                    model(torch.tensor([3]))
            tables.full_state_dict()
        if case == "saving" and rank == 0:
            tables.full_state_dict()
        if case == "saving":
            model(torch.tensor([3]))

    message = message_of(train)
    tables._scheduler.closed = True
    return message


@pytest.mark.slow
@pytest.mark.parametrize("case", ["evaluation", "saving", "another table"])
def test_desynchronized_ranks(workers: WorkerPools, case: str) -> None:
    pool = workers(2)
    outcomes = pool.outcomes(desynchronized, case, timeout_s=60)
    pool.end()
    for kind, message, *_ in outcomes:
        assert kind == "ok", outcomes  # a rank that aborts is lost
        assert "Error" in message or "Timeout" in message, outcomes
    named = ("of a batch", "prior rows", "columns")
    assert any(name in message for _, message, *_ in outcomes for name in named), outcomes
