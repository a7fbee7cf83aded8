"""Embedding tables that travel by row inside of FSDP2 models: trained, saved and loaded with the rest.

Prevents: tables that FSDP2 shards a second time, and checkpoints in which they are missing or of another rank.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    set_model_state_dict,
)

from tests.support.fsdp_ext.tables import WHOLE, Net, as_one_process, build, end, resume, train, train_and_save, whole
from tests.support.workers import WorkerPools

# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick("2", "3")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_trains_as_one_process(workers: WorkerPools, world_size: int) -> None:
    assert max(workers(world_size).run(as_one_process)) < 1e-12


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.quick("2-3", "3-1")
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 2), (3, 1), (1, 2)])
def test_checkpoints(workers: WorkerPools, tmp_path: Path, before: int, after: int) -> None:
    saved, later = workers(before).run(train_and_save, str(tmp_path))[0]
    for loaded, resumed in workers(after).run(resume, str(tmp_path)):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert after != before or all(torch.equal(resumed[name], later[name]) for name in later)


def load_whole(rank: int, world_size: int) -> bool:
    """The state of a model that is not sharded."""
    model, tables, optimizer = build(extended=False)
    torch.manual_seed(17)
    other = Net().double().state_dict()
    set_model_state_dict(model, {name: value.clone() for name, value in other.items()}, options=WHOLE)
    found = whole(model)
    train(model, tables, optimizer, rank, range(1))
    changed = whole(model)
    end(model, tables)
    same = all(torch.equal(found[name], other[name]) for name in other)
    return same and not torch.equal(changed["words.weight"], found["words.weight"])


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_takes_whole_states(workers: WorkerPools, world_size: int) -> None:
    assert all(workers(world_size).run(load_whole))


def after_closing(rank: int, world_size: int) -> str:
    model, tables, _ = build()
    end(model, tables)
    try:
        model.state_dict()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_closed_tables_are_not_saved(workers: WorkerPools) -> None:
    for message in workers(2).run(after_closing):
        assert "the tables were closed" in message
