"""States of tables: whole ones under their old names, or every rank its columns; on any number of ranks afterwards.

Prevents: a checkpoint that has some columns only, one that was taken between the two parts of an update, a resumed run
that goes another way than one that was not stopped, and a rank that waits for ever because it saves alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
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
from torch.utils import _pytree as pytree

from ddp_hooks import DearConfig, DearState, TableConfig, dear_hook, shard_embeddings
from tests.support.embedding.twins import CONFIG, OPTIMIZERS, Side, Tables, Twins, batches, ids_of
from tests.support.messages import logged, message_of
from tests.support.workers import WorkerPools

NUM_STEPS, STOP = 8, 5
WHOLE = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def side_of(world_size: int, optimizer: str) -> Side:
    kind, options = OPTIMIZERS[optimizer]
    torch.manual_seed(7)
    model = Tables(world_size)
    tables = shard_embeddings(model, None, 1, kind, config=CONFIG, **options)
    ddp = DistributedDataParallel(model)
    main = torch.optim.SGD(ddp.parameters(), lr=0.5)
    tables.follow(main)
    return Side(ddp, [main], tables)


def train(side: Side, data: list[dict[str, Tensor]]) -> None:
    assert side.tables is not None
    for batch in side.tables.prefetch(data, ids_of):
        side.zero_grad()
        side.ddp(batch).backward()
        side.step()


def train_to_the_middle(side: Side, data: list[dict[str, Tensor]]) -> None:
    """Stops where rows are delayed: the loader has more."""
    assert side.tables is not None
    for number, batch in enumerate(side.tables.prefetch(data, ids_of)):
        side.zero_grad()
        side.ddp(batch).backward()
        side.step()
        if number == STOP - 1:
            assert side.tables._step._delayed  # there is something to flush
            break


def result_of(side: Side) -> tuple[dict[str, Tensor], dict[int, Any]]:
    assert side.tables is not None
    state = side.tables.full_state_dict(), side.tables.full_optimizer_state_dict()["state"]
    return {name: value.clone() for name, value in state[0].items()}, state[1]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(equal(first, second) for first, second in zip(one, other, strict=True))
    if isinstance(one, dict):
        return set(one) == set(other) and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def resume(rank: int, world_size: int, optimizer: str, folder: str, sharded: bool) -> bool:
    """Stop after some steps, begin anew from what was saved, and compare with a run that went through."""
    data = batches(rank, world_size, NUM_STEPS)
    through = side_of(world_size, optimizer)
    train(through, data)
    stopped = side_of(world_size, optimizer)
    train_to_the_middle(stopped, data)
    assert stopped.tables is not None and through.tables is not None
    path = os.path.join(folder, "state")
    if sharded:
        dcp.save({"tables": stopped.tables.sharded_state_dict()}, checkpoint_id=path)
        rest = {name: v for name, v in stopped.tables.full_state_dict().items() if "weight" not in name}
    else:
        torch.save(
            {"model": stopped.tables.full_state_dict(), "tables": stopped.tables.full_optimizer_state_dict()},
            f"{path}.{rank}",
        )
    resumed = side_of(world_size, optimizer)
    with torch.no_grad():
        for parameter in resumed.ddp.parameters():
            parameter.fill_(9.0)
    assert resumed.tables is not None
    if sharded:
        resumed.tables.load_sharded(path)
        with torch.no_grad():
            resumed.ddp.module.dense.copy_(rest["dense"])
    else:
        saved = torch.load(f"{path}.{rank}", weights_only=True)
        resumed.ddp.module.load_state_dict(saved["model"])
        resumed.tables.optimizer.load_state_dict(saved["tables"])
    train(resumed, data[STOP:])
    first, second = result_of(resumed), result_of(through)
    same = equal(first[0], second[0]) and equal(first[1], second[1])
    for side in (through, stopped, resumed):
        assert side.tables is not None
        side.tables.close()
    return same


@pytest.mark.quick("2-rowwise_adamw-full", "3-adagrad-sharded", "2-sparse_adam-sharded")
@pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_resumed_bit_for_bit(
    workers: WorkerPools, tmp_path: Path, world_size: int, optimizer: str, sharded: bool
) -> None:
    assert all(workers(world_size).run(resume, optimizer, str(tmp_path), sharded))


def save(rank: int, world_size: int, folder: str) -> tuple[Any, Any]:
    side = side_of(world_size, "rowwise_adamw")
    train_to_the_middle(side, batches(rank, world_size, NUM_STEPS))
    assert side.tables is not None
    dcp.save({"tables": side.tables.sharded_state_dict()}, checkpoint_id=os.path.join(folder, "parts"))
    full = result_of(side)
    side.tables.close()
    return full


def load(rank: int, world_size: int, folder: str, full: Any) -> tuple[bool, bool]:
    in_parts, whole = side_of(world_size, "rowwise_adamw"), side_of(world_size, "rowwise_adamw")
    assert in_parts.tables is not None and whole.tables is not None
    in_parts.tables.load_sharded(os.path.join(folder, "parts"))
    whole.ddp.module.load_state_dict(full[0])
    state = whole.tables.full_optimizer_state_dict()
    whole.tables.optimizer.load_state_dict({**state, "state": full[1]})
    loaded = [result_of(side) for side in (in_parts, whole)]
    tables = {name for name in full[0] if "weight" in name}
    same = [
        equal({n: weights[n] for n in tables}, {n: full[0][n] for n in tables}) and equal(state, full[1])
        for weights, state in loaded
    ]
    for side in (in_parts, whole):
        assert side.tables is not None
        side.tables.close()
    return same[0], same[1]


@pytest.mark.quick("2-3", "4-1")
@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (3, 2), (4, 1)])
def test_other_numbers_of_ranks(workers: WorkerPools, tmp_path: Path, before: int, after: int) -> None:
    full = workers(before).run(save, str(tmp_path))[0]
    assert workers(after).run(load, str(tmp_path), full) == [(True, True)] * after


def save_alone(rank: int, world_size: int) -> tuple[list[str], bool, bool]:
    side = side_of(world_size, "sparse_adam")
    tables = side.tables
    assert tables is not None
    data = batches(rank, world_size, NUM_STEPS)
    train_to_the_middle(side, data)
    messages = []
    if rank == 0:
        messages.append(message_of(lambda: side.ddp.module.state_dict()))
        messages.append(message_of(lambda: tables.optimizer.state_dict()))
        messages.append(message_of(lambda: side.ddp.module.encoder.weight))
    tables.consolidate(to=0)
    saved = None
    if rank == 0:
        saved = side.ddp.module.state_dict(), tables.optimizer.state_dict()
    else:
        messages.append(message_of(lambda: side.ddp.module.state_dict()))
    weights, state = tables.full_state_dict(), tables.full_optimizer_state_dict()
    same = saved is None or (equal(dict(saved[0]), dict(weights)) and equal(saved[1], state))
    plain = Tables(world_size)
    plain.load_state_dict(weights)  # the model that is not sharded
    loads = all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
    train(side, data[STOP:])
    if rank == 0:
        messages.append(message_of(lambda: side.ddp.module.state_dict()))  # what was gathered is old now
    dist.barrier()
    tables.close()
    return messages, same, loads


def test_saving_on_one_rank(workers: WorkerPools) -> None:
    results = workers(2).run(save_alone)
    assert all(same and loads for _, same, loads in results)
    assert [len(messages) for messages, _, _ in results] == [4, 1]
    for messages, _, _ in results:
        assert all("on all ranks" in message for message in messages), messages


CALLS = (
    ("consolidate()", "full_state_dict()"),
    ("get_model_state_dict()", "local()"),
    ("full_optimizer_state_dict()", "get_optimizer_state_dict()"),
    ("load_sharded()", "sharded_state_dict()"),
)


def call_differently(rank: int, world_size: int) -> tuple[list[str], str, list[str]]:
    """Ranks meet in different calls, and then one rank alone gathers tables."""
    model, other = (torch.nn.ModuleDict({"one": torch.nn.Embedding(10, 4)}) for _ in range(2))
    tables = shard_embeddings(model, modules=1, config=CONFIG)
    hasty = shard_embeddings(other, modules=1, config=TableConfig(timeout_s=1.5, stall_warning_s=0.2))
    calls: dict[str, Callable[[], Any]] = {
        "consolidate()": tables.consolidate,
        "full_state_dict()": tables.full_state_dict,
        "get_model_state_dict()": lambda: get_model_state_dict(model, options=WHOLE),
        "local()": lambda: tables.local().__enter__(),
        "full_optimizer_state_dict()": tables.full_optimizer_state_dict,
        "get_optimizer_state_dict()": lambda: get_optimizer_state_dict(model, tables.optimizer, options=WHOLE),
        "load_sharded()": lambda: tables.load_sharded("nowhere"),
        "sharded_state_dict()": tables.sharded_state_dict,
    }
    different = [message_of(calls[pair[rank]]) for pair in CALLS]

    def gather() -> Any:
        return get_model_state_dict(other, options=WHOLE)["one.weight"]

    with logged() as lines:
        alone = message_of(gather) if rank == 0 else ""
    dist.barrier()
    alone = alone or message_of(gather)
    assert gather().shape == (10, 4)  # nothing is broken
    tables.close()
    hasty.close()
    return different, alone, lines


def test_calls_of_one_rank_have_names(workers: WorkerPools) -> None:
    results = workers(2).run(call_differently)
    question = "rank 0 waits in get_model_state_dict(); rank 1 has not called it: is it under `if rank == 0`?"
    for different, alone, _ in results:
        for (first, second), message in zip(CALLS, different, strict=True):
            assert f"rank 0 waits in {first}; rank 1 waits in {second}" in message
        assert alone.startswith("LaneTimeout: ") and question in alone
    assert any(f"waited 0 s: {question}" in line for line in results[0][2])


def evaluate_then_load(rank: int, world_size: int) -> float:
    """Weights are loaded while vectors of the next batch are on their way."""
    twins = Twins.of(world_size)
    tables = twins.ours.tables
    assert tables is not None
    torch.manual_seed(11)
    other = Tables(world_size).state_dict()

    def loop(side: Side, data: Any) -> None:
        for number, batch in enumerate(data):
            if number == 3:
                side.ddp.module.load_state_dict(other)
            side.zero_grad()
            side.ddp(batch).backward()
            side.step()

    twins.train(loop, batches(rank, world_size, 6), prefetch=True)
    gap = twins.gap()
    tables.close()
    return gap


def test_loading_in_the_middle(workers: WorkerPools) -> None:
    assert workers(2).run(evaluate_then_load) == [0.0, 0.0]


def missing(rank: int, world_size: int, folder: str) -> list[str]:
    side = side_of(world_size, "sgd")
    tables = side.tables
    assert tables is not None
    path = os.path.join(folder, "empty")
    dcp.save({"other": {"x": torch.zeros(1)}}, checkpoint_id=path)
    full = tables.full_state_dict()
    wrong = {**full, "encoder.weight": full["encoder.weight"][:, :5]}
    messages = [
        message_of(lambda: tables.load_sharded(path)),
        message_of(lambda: side.ddp.module.load_state_dict(wrong)),
        message_of(lambda: side.ddp.module.load_state_dict({"dense": full["dense"]})),
        message_of(lambda: tables.consolidate(7)),
        message_of(lambda: tables.load_sharded(path if rank == 0 else f"{path}-absent")),
    ]
    tables.close()
    return messages


def test_states_that_do_not_fit(workers: WorkerPools, tmp_path: Path) -> None:
    expected = ["has no table", "shape (40, 10) of the whole table", "Missing key", "a rank from 0 to 1"]
    expected.append("on ranks [1]: cannot read")
    for messages in workers(2).run(missing, str(tmp_path)):
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


def save_by_name(rank: int, world_size: int, optimizer: str, folder: str) -> tuple[Any, Any]:
    """Save a model with tables as any program does that saves models of plain DDP or FSDP2."""
    side = side_of(world_size, optimizer)
    train_to_the_middle(side, batches(rank, world_size, NUM_STEPS))
    tables, model = side.tables, side.ddp.module
    assert tables is not None
    tables.consolidate(to=0)  # for another program: this one needs it not
    weights, state = get_state_dict(model, tables.optimizer)
    dcp.save({"model": weights, "tables": state}, checkpoint_id=folder)
    weights, state = get_state_dict(model, tables.optimizer, options=WHOLE)
    full = result_of(side)
    names = [f"{name}.weight" for name in ("encoder", "decoder.words", "narrow")]
    assert equal(dict(weights), full[0])
    assert equal(state["state"], {name: full[1][index] for index, name in enumerate(names)})
    tables.close()
    return full


def load_by_name(rank: int, world_size: int, optimizer: str, folder: str) -> tuple[Any, Any]:
    side = side_of(world_size, optimizer)
    tables, model = side.tables, side.ddp.module
    assert tables is not None
    weights, state = get_state_dict(model, tables.optimizer)
    dcp.load({"model": weights, "tables": state}, checkpoint_id=folder)
    set_state_dict(model, tables.optimizer, model_state_dict=weights, optim_state_dict=state)
    loaded = result_of(side)
    tables.close()
    return loaded


@pytest.mark.parametrize("optimizer", ["adagrad", "sparse_adam"])
def test_states_by_name_on_another_number_of_ranks(workers: WorkerPools, tmp_path: Path, optimizer: str) -> None:
    saved = workers(2).run(save_by_name, optimizer, str(tmp_path / "checkpoint"))
    for loaded in workers(3).run(load_by_name, optimizer, str(tmp_path / "checkpoint")):
        assert equal(loaded, saved[0])


def ask_in_the_middle(rank: int, world_size: int) -> tuple[list[bool], list[str]]:
    """Ask for states before the first step and between backward and step, where torch steps to make them."""
    data = batches(rank, world_size, 3)
    same, warnings = [], []
    for optimizer in OPTIMIZERS:
        asked, undisturbed = side_of(world_size, optimizer), side_of(world_size, optimizer)
        assert asked.tables is not None and undisturbed.tables is not None
        for batch in data:
            for side in (asked, undisturbed):
                side.zero_grad()
                side.ddp(batch).backward()
            with logged() as lines:
                get_state_dict(asked.ddp.module, [*asked.optimizers, asked.tables.optimizer])
            warnings += lines
            asked.step()
            undisturbed.step()
        asked.optimizers[0].zero_grad()
        with logged() as lines:
            for _ in range(2):
                get_state_dict(asked.ddp.module, asked.optimizers)  # SGD's hidden step is none of the tables
        warnings += lines
        same.append(equal(result_of(asked), result_of(undisturbed)))
        asked.tables.close()
        undisturbed.tables.close()
    return same, warnings


def test_asking_for_states_changes_nothing(workers: WorkerPools) -> None:
    """But a warning says, once, that the tables' optimizer was left out; SGD has no state."""
    for same, warnings in workers(2).run(ask_in_the_middle):
        assert same == [True] * len(OPTIMIZERS)
        assert len(warnings) == len(OPTIMIZERS) - 1
        for warning in warnings:
            assert "without that of the sharded tables encoder, decoder.words, narrow" in warning
            assert "get_state_dict(model, [optimizer, tables.optimizer])" in warning


def dear_side(world_size: int) -> tuple[Side, DearState]:
    model = Tables(world_size)
    tables = shard_embeddings(model, None, 1, config=CONFIG, lr=0.25)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    main = torch.optim.AdamW(ddp.parameters(), lr=0.5)
    dear = DearState(ddp, main, DearConfig(timeout_s=20))
    ddp.register_comm_hook(dear, dear_hook)
    return Side(ddp, [main], tables), dear


def with_dear(rank: int, world_size: int) -> bool:
    """Both optimizers' states go to a second model from the first rank, and there back to where they were."""
    data = batches(rank, world_size, NUM_STEPS)
    results = []
    states: Any = None
    for number in range(2):
        side, dear = dear_side(world_size)
        assert side.tables is not None
        both = [*side.optimizers, side.tables.optimizer]
        if number:
            weights, state = states if rank == 0 else ({}, {})
            set_model_state_dict(side.ddp, weights, options=FROM_FIRST)
            set_optimizer_state_dict(side.ddp, both, state, options=FROM_FIRST)
        else:
            train(side, data[:3])
        # torch 2.11 broadcasts what is not dense without its strides; whole tables of uneven columns are not.
        states = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.clone(memory_format=torch.contiguous_format),
            get_state_dict(side.ddp, both, options=WHOLE),
        )  # fmt: skip
        if number:
            train(side, data[:1])
            set_state_dict(side.ddp, both, model_state_dict=states[0], optim_state_dict=states[1], options=WHOLE)
        train(side, data[3:])
        results.append((*result_of(side), dear.full_optimizer_state_dict()["state"]))
        dear.close()
        side.tables.close()
    return equal(*results)


def test_states_by_name_with_dear(workers: WorkerPools) -> None:
    assert workers(2).run(with_dear) == [True, True]
