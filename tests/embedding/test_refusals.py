"""What cannot be right is refused on every rank, with what was found and a remedy; nothing hangs.

Prevents: an error on one rank that is a hang on the others, ids that read another row, batches that were scheduled for
another step, and models that are changed in part.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TableConfig, shard_embeddings
from tests.support.dear.misuse import Wrapping
from tests.support.embedding.twins import CONFIG, Side, Twins, batches, ids_of
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 4)
        self.output = nn.Linear(4, 5000, bias=False)
        self.output.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.words(ids))


class Shared(nn.Module):
    """Two modules with one weight, and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(5000, 6)
        self.decoder = nn.Embedding(5000, 6)
        self.decoder.weight = self.encoder.weight
        self.again = self.encoder
        self.factor = nn.Parameter(torch.ones(6))

    def forward(self, ids: Tensor) -> Tensor:
        return ((self.encoder(ids) + self.decoder(ids.flip(0)) + self.again(ids)) * self.factor).sum()


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2.0 * super().forward(input)


def holder(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"table": module})


def frozen() -> nn.Embedding:
    module = nn.Embedding(5000, 4)
    module.weight.requires_grad_(False)
    return module


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "none": (lambda: holder(nn.Embedding(10, 4)), {}, "its embeddings: table (10 rows)"),
    "unknown name": (lambda: holder(nn.Embedding(10, 4)), {"modules": ["x"]}, "'x', which is no nn.Embedding"),
    "tied": (Tied, {}, "words.weight is also output.weight"),
    "max_norm": (lambda: holder(nn.Embedding(5000, 4, max_norm=1.0)), {}, "max_norm changes rows"),
    "frequency": (lambda: holder(nn.Embedding(5000, 4, scale_grad_by_freq=True)), {}, "counts ids"),
    "subclass": (lambda: holder(Scaled(5000, 4)), {}, "Scaled has a forward of its own"),
    "frozen": (lambda: holder(frozen()), {"modules": ["table"]}, "is frozen"),
    "meta": (lambda: holder(nn.Embedding(5000, 4, device="meta")), {}, "materialise the model first"),
    "adam": (lambda: holder(nn.Embedding(5000, 4)), {"optimizer_class": torch.optim.Adam}, "SparseAdam for Adam"),
    "momentum": (
        lambda: holder(nn.Embedding(5000, 4)),
        {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9},
        "momentum moves rows that have no gradient",
    ),
    "decay": (
        lambda: holder(nn.Embedding(5000, 4)),
        {"optimizer_class": torch.optim.SGD, "lr": 0.1, "weight_decay": 0.1},
        "use RowwiseAdamW",
    ),
}


def construct(rank: int, world_size: int, case: str) -> tuple[str, bool]:
    make, options, _ = CASES[case]
    model = make()
    before = {name: id(module) for name, module in model.named_modules()}
    message = message_of(lambda: shard_embeddings(model, **options))
    return message, before == {name: id(module) for name, module in model.named_modules()}


@pytest.mark.parametrize("case", list(CASES))
def test_construction(workers: WorkerPools, case: str) -> None:
    results = workers(2).run(construct, case)
    assert all(CASES[case][2] in message and unchanged for message, unchanged in results), results
    assert len({message for message, _ in results}) == 1


def differently(rank: int, world_size: int) -> list[str]:
    messages = []
    for rows, options in ((5000 + rank, {}), (5000, {"lr": 0.1 * (rank + 1)})):
        model = holder(nn.Embedding(rows, 4))
        messages.append(message_of(lambda model=model, options=options: shard_embeddings(model, **options)))  # type: ignore[misc]
    return messages


def test_ranks_that_differ(workers: WorkerPools) -> None:
    for messages in workers(2).run(differently):
        assert "table table is (5000, 4)" in messages[0] and "ranks [1]" in messages[0]
        assert "the optimizer's options is [('lr', 0.1)] on ranks [0]" in messages[1]


def untied(rank: int, world_size: int) -> tuple[bool, bool]:
    model = Tied()
    weight = model.words.weight.detach().clone()
    dist.broadcast(weight, 0)
    tables = shard_embeddings(model, config=TableConfig(untie=True, timeout_s=20))
    DistributedDataParallel(model)
    with tables.local():
        same = torch.equal(model.words.weight, weight), torch.equal(model.output.weight, weight)
    tables.close()
    return same


def test_untied_on_request(workers: WorkerPools) -> None:
    assert workers(2).run(untied) == [(True, True)] * 2


def begun(rank: int, world_size: int, init_sync: bool) -> list[float]:
    """The second row after sharding, where each rank has made other weights, and rank 1 has them column by column."""
    table = nn.Embedding(5000, 4)
    model = holder(table)
    if rank == 1:
        table.weight.data = table.weight.data.t().contiguous().t()
    table.weight.data.copy_(torch.arange(20_000).view(5000, 4) + 0.5 * rank)
    tables = shard_embeddings(model, config=TableConfig(init_sync=init_sync, timeout_s=20))
    row: list[float] = tables.full_state_dict()["table.weight"][1].tolist()
    tables.close()
    return row


def test_whose_weights_tables_begin_with(workers: WorkerPools) -> None:
    assert workers(2).run(begun, True) == [[4.0, 5.0, 6.0, 7.0]] * 2
    assert workers(2).run(begun, False) == [[4.0, 5.0, 6.5, 7.5]] * 2


def shared(rank: int, world_size: int) -> tuple[float, list[str], int]:
    torch.manual_seed(3)
    model = Shared().double()
    plain = copy.deepcopy(model)
    tables = shard_embeddings(model, optimizer_class=torch.optim.SGD, config=CONFIG, lr=0.1)
    pairs = []
    for module in (model, plain):
        ddp = DistributedDataParallel(module)
        pairs.append((ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)))
    tables.follow(pairs[0][1])
    data = [torch.randint(0, 5000, (9,), generator=torch.Generator().manual_seed(7 * rank + i)) for i in range(4)]
    loaders: list[Any] = [tables.prefetch(data, lambda ids: [ids]), data]
    for (ddp, optimizer), loader in zip(pairs, loaders, strict=True):
        for ids in loader:
            optimizer.zero_grad()
            ddp(ids).backward()
            optimizer.step()
    full = tables.full_state_dict()
    gap = max(float((full[name] - value).abs().max()) for name, value in plain.state_dict().items())
    names = tables.names
    tables.close()
    return gap, names, len(full)


def test_tables_with_several_modules(workers: WorkerPools) -> None:
    for gap, names, count in workers(2).run(shared):
        assert gap < 1e-12
        assert names == ["encoder", "decoder", "again"]
        assert count == 4


# -- ids and batches ------------------------------------------------------------------------------------------------


def out_of_range(rank: int, world_size: int, prefetch: bool, bad: int) -> list[str]:
    """The last rank has a bad id in its third batch; two steps go well."""
    twins = Twins.of(world_size)
    tables = twins.ours.tables
    assert tables is not None
    data = batches(rank, world_size, 4)
    if rank == world_size - 1:
        data[2]["encoder"] = torch.tensor([[1, bad, 2]])
    messages = []
    try:
        for batch in tables.prefetch(data, ids_of) if prefetch else data:
            twins.ours.zero_grad()
            twins.ours.ddp(batch).backward()
            twins.ours.step()
            messages.append("a step")
    except ValueError as error:
        messages.append(str(error))
    dist.barrier()
    tables.close()
    return messages


@pytest.mark.parametrize("bad", [40, -1])
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
def test_ids_out_of_range(workers: WorkerPools, prefetch: bool, bad: int) -> None:
    results = workers(3).run(out_of_range, prefetch, bad)
    for messages in results:
        assert messages[:-1] == ["a step", "a step"]
        assert f"rank 2 looks up id {bad} in encoder, which has the rows 0 to 39" in messages[-1]


def changed(rank: int, world_size: int, way: str) -> list[str]:
    """Only the last rank does something else with a batch than prefetch was told; every rank is to hear of it."""
    twins = Twins.of(world_size)
    tables = twins.ours.tables
    assert tables is not None
    data = batches(rank, world_size, 8)
    messages = []
    last = rank == world_size - 1
    iterator = iter(tables.prefetch(data, ids_of))
    try:
        for number in range(6):
            batch = next(iterator)
            if number == 3 and last and way == "skipped":
                batch = next(iterator)
            if number == 3 and last and way == "changed":
                batch = {**batch, "encoder": torch.arange(40).view(-1, 4)}
            twins.ours.zero_grad()
            twins.ours.ddp(batch).backward()
            twins.ours.step()
            messages.append("a step")
    except RuntimeError as error:
        messages.append(str(error))
    iterator.close()  # type: ignore[attr-defined]
    return messages


@pytest.mark.parametrize("way", ["skipped", "changed"])
def test_batches_that_change_after_prefetch(workers: WorkerPools, way: str) -> None:
    results = workers(2).run(changed, way)
    for messages in results:
        assert messages[:-1] == ["a step"] * 3
        if way == "changed":
            assert "on rank 1 forward 4 asks encoder for id" in messages[-1]
        else:
            assert "ranks are at different places" in messages[-1]
            assert "rank 1: at the beginning of forward 4" in messages[-1]
    workers(2).end()


def other_tables(rank: int, world_size: int) -> str:
    """Ranks that ask different tables first."""
    model = nn.ModuleDict({"one": nn.Embedding(10, 4), "two": nn.Embedding(10, 4)})
    tables = shard_embeddings(model, modules=1, config=CONFIG)
    message = message_of(lambda: model["one" if rank == 0 else "two"](torch.tensor([1])))
    tables.close()
    return message


def test_ranks_that_use_different_tables(workers: WorkerPools) -> None:
    for message in workers(2).run(other_tables):
        assert "rank 0: one; rank 1: two" in message


def alone(rank: int, world_size: int) -> tuple[str, float]:
    """One rank evaluates alone, outside of local(): it does not wait for ever, and is told what to do."""
    model = nn.ModuleDict({"one": nn.Embedding(10, 4)})
    tables = shard_embeddings(model, modules=1, config=TableConfig(timeout_s=2, stall_warning_s=1))
    started_s = time.monotonic()
    message = message_of(lambda: model["one"](torch.tensor([1]))) if rank == 0 else ""
    waited_s = time.monotonic() - started_s
    dist.barrier()
    tables._scheduler.closed = True
    return message, waited_s


def test_a_rank_that_looks_up_alone(workers: WorkerPools) -> None:
    (message, waited_s), _ = workers(2).run(alone)
    assert "LaneTimeout" in message and "ids of a batch" in message
    assert waited_s < 30
    workers(2).end()


def misuse(rank: int, world_size: int) -> list[str]:
    twins = Twins.of(world_size)
    side: Side = twins.ours
    tables = side.tables
    assert tables is not None
    (batch,) = batches(rank, world_size, 1)
    messages = [
        message_of(lambda: copy.deepcopy(side.ddp.module)),
        message_of(lambda: copy.deepcopy(tables.prefetch([batch], ids_of))),
        message_of(lambda: side.ddp.module.encoder(batch["encoder"].float())),
        message_of(lambda: tables.rows_of({"nothing": batch["encoder"]})),
        message_of(lambda: tables.rows_of(batch["encoder"])),
        message_of(lambda: tables.clip_grad_norm_(1.0)),
    ]
    old = torch.nn.Embedding(5000, 4)
    stale = torch.optim.SGD(old.parameters(), lr=0.1)
    other = shard_embeddings(holder(old), config=CONFIG)
    messages.append(message_of(lambda: other.follow(stale)))
    messages.append(message_of(lambda: other.follow(Wrapping(stale))))
    other.close()
    with side.ddp.no_sync():
        side.ddp(batch).backward()
    messages.append(message_of(side.step))
    side.zero_grad()
    loss = side.ddp(batch)
    loss.backward(retain_graph=True)
    messages.append(message_of(loss.backward))
    tables.close()
    messages.append(message_of(lambda: side.ddp(batch)))
    return messages


def test_misuse(workers: WorkerPools) -> None:
    expected = [
        "cannot be copied",
        "prefetching loaders cannot be copied or pickled",
        "must be int32 or int64, got torch.float32",
        "unknown table 'nothing'; expected keys: encoder, decoder.words, narrow",
        "must return ids by table",
        "ddp_hooks.clip_grad_norm_([ddp.parameters(), tables], max_norm)",
        "the optimizer still holds the whole weight of table",
        "Wrapping does not run the constructor of torch.optim.Optimizer",
        "after backwards under no_sync() only",
        "belongs to a forward whose gradients have been sent",
        "the tables were closed",
    ]
    for messages in workers(2).run(misuse):
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages
