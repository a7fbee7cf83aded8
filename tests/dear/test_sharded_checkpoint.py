"""torch.distributed.checkpoint: every rank writes its part, any number of ranks reads what overlaps its own."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, dear_hook
from ddp_hooks.dear.checkpoint.sharded_checkpoint import (
    CheckpointKey,
    assemble,
    find_misfit,
    named_entries,
    overlapping_entries,
)
from ddp_hooks.dear.layout.placement import EvenSplit, ParameterRange
from tests.support.dear.saving import train_step, wrap
from tests.support.dear.twins import CONFIG
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["a", "b.c"]))
def test_pieces_of_any_cut_make_those_of_any_other(numel: int, before: int, after: int, parameter: str) -> None:
    values = torch.arange(numel)
    saved: dict[str, Any] = {}
    for rank in range(before):
        for elements in EvenSplit((numel,), before).ranges(rank):
            state = {"average": values[elements.start : elements.end], "step": torch.tensor(3.0)}
            saved |= named_entries({elements: state}, [parameter])
    metadata = {name: _Metadata(value) for name, value in saved.items()}
    assert find_misfit(saved, {parameter: numel}) is None
    assert "elements" in (find_misfit(saved, {parameter: numel + 1}) or "")
    for rank in range(after):
        ranges = EvenSplit((numel,), after).ranges(rank)
        wanted = overlapping_entries(metadata, ranges, [parameter])
        loaded = {name: saved[name] for name in wanted}
        for elements, state in assemble(loaded, ranges, [parameter]).items():
            assert torch.equal(state["average"], values[elements.start : elements.end]) and state["step"] == 3


class _Metadata:
    def __init__(self, value: torch.Tensor) -> None:
        self.size, self.properties = value.shape, value


def test_names_of_pieces() -> None:
    key = CheckpointKey("layers.0.weight", "exp_avg", 3, 17)
    assert CheckpointKey.of(str(key)) == key
    assert CheckpointKey.of("settings") is None and CheckpointKey.of("layers.0.weight") is None
    assert EvenSplit((5,), 2).ranges(1) == [ParameterRange(0, 2, 5)]


def train(rank: int, world_size: int, steps: int, read: str | None, read_after: int, write: str | None) -> bytes:
    """Train; load the checkpoint ``read`` before step ``read_after``, and save to ``write`` at the end."""
    ddp, optimizer, state = wrap(world_size, with_dear=True)
    assert state is not None
    for step in range(steps):
        if read is not None and step == read_after:
            model = {"model": ddp.module.state_dict()}
            dcp.load(model, checkpoint_id=read)
            ddp.module.load_state_dict(model["model"])
            state.load_sharded_optimizer(read)
        train_step(ddp, optimizer, rank, world_size, step)
    if write is not None:
        content = {"model": ddp.module.state_dict(), "optimizer": state.sharded_optimizer_state_dict()}
        if "async" in write:
            saving = dcp.async_save(content, checkpoint_id=write)
            assert isinstance(saving, Future)
            saving.result()
        else:
            dcp.save(content, checkpoint_id=write)
    state.close()
    return b"".join(p.detach().numpy().tobytes() for p in ddp.module.parameters())


def train_from_full_state(rank: int, world_size: int, steps: int, read: str, read_after: int) -> bytes:
    """The same, with the state in plain DDP's format instead."""
    ddp, optimizer, _ = wrap(world_size, with_dear=False)
    for step in range(steps):
        if step == read_after:
            saved = torch.load(read, weights_only=True)
            ddp.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        train_step(ddp, optimizer, rank, world_size, step)
    return b"".join(p.detach().numpy().tobytes() for p in ddp.module.parameters())


def begin(rank: int, world_size: int, folder: str, file: str) -> None:
    """Three steps, saved both ways."""
    ddp, optimizer, state = wrap(world_size, with_dear=True)
    assert state is not None
    for step in range(3):
        train_step(ddp, optimizer, rank, world_size, step)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5  # as by a scheduler: it is saved, too
    dcp.save(
        {"model": ddp.module.state_dict(), "optimizer": state.sharded_optimizer_state_dict()}, checkpoint_id=folder
    )
    full = state.full_optimizer_state_dict()
    if rank == 0:
        torch.save({"model": ddp.module.state_dict(), "optimizer": full}, file)
    state.close()


@pytest.mark.quick("0-2-3", "1-3-1", "0-4-2")
@pytest.mark.parametrize(("first", "then"), [(2, 2), (2, 3), (3, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("read_after", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_ranks_goes_on(
    workers: WorkerPools, tmp_path: Path, first: int, then: int, read_after: int
) -> None:
    folder, file = str(tmp_path / "sharded"), str(tmp_path / "full")
    workers(first).run(begin, folder, file)
    by_dear = workers(then).run(train, 6, folder, read_after, None)
    by_ddp = workers(then).run(train_from_full_state, 6, file, read_after)
    assert set(by_dear) == set(by_ddp) and len(set(by_dear)) == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_saved_again_without_a_step_between(workers: WorkerPools, tmp_path: Path, kind: str) -> None:
    """State that was loaded before there are shards is not lost when it is saved at once."""
    first, second = str(tmp_path / f"{kind}-1"), str(tmp_path / f"{kind}-2")
    workers(2).run(train, 4, None, 0, first)
    workers(3).run(copy_checkpoint, first, second)
    assert workers(2).run(train, 5, first, 1, None) == workers(2).run(train, 5, second, 1, None)


def copy_checkpoint(rank: int, world_size: int, read: str, write: str) -> int:
    ddp, optimizer, state = wrap(world_size, with_dear=True)
    assert state is not None
    model = {"model": ddp.module.state_dict()}
    dcp.load(model, checkpoint_id=read)
    state.load_sharded_optimizer(read)
    before = message_of(optimizer.state_dict)
    assert "state.consolidate(to=0)" in before, before
    assert len(state.full_optimizer_state_dict()["state"]) == 9
    dcp.save(
        {"model": model["model"], "optimizer": state.sharded_optimizer_state_dict()}, checkpoint_id=write
    )
    state.close()
    return len(optimizer.state)


def load_nothing(rank: int, world_size: int, folder: str) -> str:
    ddp, _, state = wrap(world_size, with_dear=True)
    assert state is not None
    dcp.save({"model": ddp.module.state_dict()}, checkpoint_id=folder)
    message = message_of(lambda: state.load_sharded_optimizer(folder))
    state.close()
    return message


def test_a_checkpoint_without_optimizer_is_refused(workers: WorkerPools, tmp_path: Path) -> None:
    for message in workers(2).run(load_nothing, str(tmp_path / "model only")):
        assert message.startswith("ValueError") and "sharded_optimizer_state_dict()" in message


def load_into_another_model(rank: int, world_size: int, folder: str, case: str) -> str:
    """A checkpoint of another size, of other names, of another memory format, or of other groups."""
    torch.manual_seed(0)

    def wrapped(model: nn.Module, groups: int) -> tuple[DistributedDataParallel, DearState]:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        parameters = list(model.parameters())
        optimizer = torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}][: groups])
        if groups == 1:
            optimizer = torch.optim.Adam(parameters)
        state = DearState(ddp, optimizer, CONFIG)
        ddp.register_comm_hook(state, dear_hook)
        for _ in range(2):
            ddp(torch.ones(2, 3, 8, 8)).sum().backward()
            optimizer.step()
        return ddp, state

    def network(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, 4, 3))

    _saved_ddp, saved = wrapped(network(5), 1)
    dcp.save({"optimizer": saved.sharded_optimizer_state_dict()}, checkpoint_id=folder)
    saved.close()
    others = {
        "larger": (network(6), 1),
        "smaller": (network(4), 1),
        "named otherwise": (nn.Sequential(nn.Sequential(*network(5))), 1),
        "channels last": (network(5).to(memory_format=torch.channels_last), 1),
        "two groups": (network(5), 2),
    }
    _ddp, state = wrapped(*others.get(case, (network(5), 1)))
    path = f"{folder}-absent" if case == "absent" else folder
    if case == "cut off on rank 1" and rank == 1:  # its node has another copy of the file
        path = f"{folder}-cut"
        shutil.copytree(folder, path)
        os.truncate(f"{path}/.metadata", os.path.getsize(f"{path}/.metadata") // 2)
    message = message_of(lambda: state.load_sharded_optimizer(path))
    state.close()
    return message


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("larger", "elements"),
        ("smaller", "elements"),
        ("named otherwise", "no parameter of this model"),
        ("channels last", "memory format"),
        ("two groups", "param_groups"),
        ("absent", "cannot read"),
        ("cut off on rank 1", "on ranks [1]: cannot read"),
    ],
)
def test_checkpoints_of_other_models_are_refused_everywhere(
    workers: WorkerPools, tmp_path: Path, case: str, expected: str
) -> None:
    messages = workers(2).run(load_into_another_model, str(tmp_path / "checkpoint"), case)
    assert len(set(messages)) == 1
    assert messages[0].startswith("ValueError") and expected in messages[0], messages[0]
    if case == "cut off on rank 1":
        assert f"{tmp_path}/checkpoint-cut/.metadata" in messages[0]
