"""Saving and resuming: what is saved is what plain DDP would have saved; who loads it goes on with the same bits.

Prevents: optimizer state that is 1/P of itself, stale, of another layout, or that only as many ranks can load.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, dear_hook
from tests.support.dear import twins
from tests.support.dear.loops import adagrad, adamw_two_groups, momentum_sgd
from tests.support.dear.saving import differences, full_state, save_every_step, train_step, wrap
from tests.support.dear.twins import CONFIG, Trainee, WholeNumbers, compare, whole_batches
from tests.support.messages import message_of
from tests.support.models import MODELS, TOLERANCE
from tests.support.workers import WorkerPools


def scalar_tensors(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=0.01)


def mixed_dtypes(model: nn.Module) -> torch.optim.Optimizer:
    """Names in the groups, and state that exists before the first step."""
    named: list[Any] = list(model.named_parameters())
    groups: list[Any] = [{"params": named[:4], "lr": 0.5}, {"params": named[4:]}]
    return torch.optim.Adagrad(groups, lr=0.25)


OPTIMIZERS = [momentum_sgd, adamw_two_groups, adagrad, scalar_tensors, mixed_dtypes]


def saved_states(rank: int, world_size: int, optimizer: Callable[..., Any]) -> list[str]:
    collected: list[Any] = []

    def remember(twin: Trainee, step: int) -> None:
        save_every_step(twin, step)
        if step == 4:
            collected.append(twin.memory["saved"])

    outcome = compare(rank, world_size, WholeNumbers, whole_batches, optimizer, remember, 5)
    assert outcome.bitwise
    ours, theirs = collected
    assert len(ours[0]["state"]) == 9 and ours[0]["state"] is not ours[1]["state"]
    return differences(ours, theirs)


@pytest.mark.quick("momentum_sgd-2", "adamw_two_groups-3", "scalar_tensors-2", "mixed_dtypes-2")
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
def test_full_state_is_that_of_plain_ddp(workers: WorkerPools, world_size: int, optimizer: Any) -> None:
    for found in workers(world_size).run(saved_states, optimizer):
        assert found == []


def resume_after_a_detour(twin: Trainee, step: int) -> None:
    """Save, go on, come back, go on: momentum and step counts must be those of the save."""
    if step in (3, 7):
        buffer = io.BytesIO()
        torch.save({"model": twin.ddp.module.state_dict(), "optimizer": full_state(twin)}, buffer)
        twin.memory["file"] = buffer.getvalue()
    if step in (5, 9):
        saved = torch.load(io.BytesIO(twin.memory["file"]), weights_only=True)
        twin.ddp.module.load_state_dict(saved["model"])
        twin.optimizer.load_state_dict(saved["optimizer"])
    twins.plain(twin, step)


def save_between_backward_and_step(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if step % 3 == 1:
        twin.memory["saved"] = copy.deepcopy(full_state(twin))
    if step % 3 == 2:
        twin.optimizer.load_state_dict(twin.memory["saved"])
    twin.optimizer.step()


@pytest.mark.quick("*-adamw_two_groups-2", "*-mixed_dtypes-2", "resume_after_a_detour-scalar_tensors-1")
@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o.__name__)
@pytest.mark.parametrize("loop", [resume_after_a_detour, save_between_backward_and_step], ids=lambda f: f.__name__)
def test_loading(workers: WorkerPools, world_size: int, optimizer: Any, loop: Any) -> None:
    for outcome in workers(world_size).run(compare, WholeNumbers, whole_batches, optimizer, loop, 11):
        assert outcome.bitwise, outcome


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.slow), "gpt2"])
def test_loading_into_real_models(workers: WorkerPools, name: str) -> None:
    model, batches, optimizer = MODELS[name]
    config = {"ddp_options": {"bucket_cap_mb": 2}, "config": twins.DearConfig(lanes=2)} if name == "resnet" else {}
    run = workers(3).run
    for outcome in run(_compare_with, config, model, batches, optimizer, resume_after_a_detour, 10):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


def _compare_with(rank: int, world_size: int, options: dict[str, Any], *args: Any) -> Any:
    return compare(rank, world_size, *args, **options)


# -- from one number of ranks to another, and to plain DDP and back ---------------------------------------------------


def train_and_save(rank: int, world_size: int, with_dear: bool, steps: int, read: str | None, write: str) -> bytes:
    """Start, or go on from a file, for some steps; write a file; returns what the parameters are."""
    ddp, optimizer, state = wrap(world_size, with_dear)
    if read is not None:
        saved = torch.load(read, weights_only=True)
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(steps):
        train_step(ddp, optimizer, rank, world_size, step)
    if state is not None:
        state.consolidate(to=0)
    if rank == 0:
        torch.save({"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}, write)
    if state is not None:
        state.close()
    return b"".join(p.detach().numpy().tobytes() for p in ddp.module.parameters())


@pytest.mark.quick("2-3", "4-1")
@pytest.mark.parametrize(("first", "then"), [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_any_number_of_ranks_goes_on(workers: WorkerPools, tmp_path: Path, first: int, then: int) -> None:
    begun, ours, theirs = str(tmp_path / "begun"), str(tmp_path / "ours"), str(tmp_path / "theirs")
    workers(first).run(train_and_save, True, 4, None, begun)
    by_dear = workers(then).run(train_and_save, True, 4, begun, ours)
    by_ddp = workers(then).run(train_and_save, False, 4, begun, theirs)
    assert set(by_dear) == set(by_ddp) and len(set(by_dear)) == 1
    assert differences(torch.load(ours, weights_only=True), torch.load(theirs, weights_only=True)) == []


def test_from_plain_ddp_to_dear_and_back(workers: WorkerPools, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("a", "b", "c", "d")]
    workers(2).run(train_and_save, False, 3, None, files[0])
    dear = workers(2).run(train_and_save, True, 3, files[0], files[1])
    plain = workers(2).run(train_and_save, False, 3, files[0], files[2])
    assert dear == plain
    assert workers(2).run(train_and_save, False, 3, files[1], files[3]) == workers(2).run(
        train_and_save, True, 3, files[2], files[3]
    )


def trained_with_state(
    rank: int, world_size: int
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DearState]:
    ddp, optimizer, state = wrap(world_size, with_dear=True)
    assert state is not None
    for step in range(3):
        train_step(ddp, optimizer, rank, world_size, step)
    return ddp, optimizer, state


def resume_at_every_moment(rank: int, world_size: int) -> dict[str, bool]:
    """Whether a run that loads a state ends in the bits of the run that saved it and went on, by when it loads."""

    def start(weights: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 7))
        model.load_state_dict(weights or model.state_dict())
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
        return ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01)

    def attach(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> DearState:
        state = DearState(ddp, optimizer, CONFIG)
        ddp.register_comm_hook(state, dear_hook)
        return state

    def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range) -> bytes:
        for step in steps:
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
        return b"".join(value.numpy().tobytes() for value in ddp.module.state_dict().values())

    ddp, optimizer = start(None)
    state = attach(ddp, optimizer)
    train(ddp, optimizer, range(3))
    weights, saved = copy.deepcopy(ddp.module.state_dict()), copy.deepcopy(state.full_optimizer_state_dict())
    unbroken = train(ddp, optimizer, range(3, 7))
    state.close()
    by_plain_ddp = start(weights)[1]
    by_plain_ddp.load_state_dict(saved)
    same = {}
    for moment, content in [("before", saved), ("after", saved),
                            ("after plain DDP loaded and saved it", by_plain_ddp.state_dict())]:  # fmt: skip
        ddp, optimizer = start(weights)
        if moment.startswith("before"):
            optimizer.load_state_dict(content)
        state = attach(ddp, optimizer)
        if moment.startswith("after"):
            optimizer.load_state_dict(content)
        same[moment] = train(ddp, optimizer, range(3, 7)) == unbroken
        state.close()
    return same


def test_when_a_state_is_loaded_changes_no_bit(workers: WorkerPools) -> None:
    for same in workers(3).run(resume_at_every_moment):
        assert all(same.values()), same


# -- what is refused --------------------------------------------------------------------------------------------------


def consolidating(rank: int, world_size: int) -> dict[str, str]:
    ddp, optimizer, state = trained_with_state(rank, world_size)
    messages = {"never": message_of(optimizer.state_dict)}
    state.consolidate(to=1)
    messages["fresh"] = message_of(optimizer.state_dict) if rank != 1 else str(len(optimizer.state_dict()["state"]))
    optimizer.zero_grad()
    ddp(*whole_batches(rank, world_size, 9)).backward()
    optimizer.step()
    messages["stale"] = message_of(optimizer.state_dict)
    for name, to in [("nowhere", world_size), ("no rank", "0")]:
        messages[name] = message_of(partial(state.consolidate, to=to))  # type: ignore[arg-type]
    return messages


def test_a_rank_that_has_not_the_whole_state_raises(workers: WorkerPools) -> None:
    outcomes = workers(3).run(consolidating)
    for rank, messages in enumerate(outcomes):
        for moment in ("never", "stale"):
            assert messages[moment].startswith("RuntimeError") and "state.consolidate(to=0)" in messages[moment]
        assert messages["nowhere"].startswith("ValueError") and messages["no rank"].startswith("ValueError")
        if rank == 1:
            assert messages["fresh"] == "9"
        else:
            assert "it is on rank 1" in messages["fresh"]


def load_wrongly(rank: int, world_size: int) -> list[str]:
    _ddp, optimizer, state = trained_with_state(rank, world_size)
    full = state.full_optimizer_state_dict()
    other_groups = {**full, "param_groups": full["param_groups"] * 2}
    other_shapes = copy.deepcopy(full)
    other_shapes["state"][0]["exp_avg"] = torch.zeros(3, 3)
    return [message_of(partial(optimizer.load_state_dict, bad)) for bad in (other_groups, other_shapes)]


def test_states_of_other_models_are_refused(workers: WorkerPools) -> None:
    for groups, shapes in workers(2).run(load_wrongly):
        assert "param_groups" in groups and "saved for this model" in groups
        assert "exp_avg of layers.0.weight has shape (3, 3)" in shapes


def settings_change_after_consolidation(rank: int, world_size: int) -> tuple[float, int, str]:
    _ddp, optimizer, state = trained_with_state(rank, world_size)
    state.consolidate(to=0)
    optimizer.param_groups[0]["lr"] = 0.75  # as a scheduler does after the step
    lr, num_states = 0.75, 9
    if rank == 0:
        saved = optimizer.state_dict()
        lr, num_states = saved["param_groups"][0]["lr"], len(saved["state"])
    state.close()
    return lr, num_states, message_of(state.full_optimizer_state_dict)


def test_settings_are_those_of_the_moment_of_saving(workers: WorkerPools) -> None:
    for lr, num_states, after_close in workers(2).run(settings_change_after_consolidation):
        assert (lr, num_states) == (0.75, 9)
        assert "was closed" in after_close


def load_twice(rank: int, world_size: int, folder: str) -> bool:
    """A full state that is loaded after a sharded one, both before the first step, is the one that counts."""
    ddp, optimizer, state = wrap(world_size, with_dear=True)
    assert state is not None
    for step in range(2):
        train_step(ddp, optimizer, rank, world_size, step)
        if step == 0:
            dcp.save({"optimizer": state.sharded_optimizer_state_dict()}, checkpoint_id=folder)
    full = copy.deepcopy(state.full_optimizer_state_dict())
    state.close()
    _ddp, optimizer, state = wrap(world_size, with_dear=True)
    assert state is not None
    state.load_sharded_optimizer(folder)
    early = differences(state.full_optimizer_state_dict(), full)
    optimizer.load_state_dict(full)
    same = differences(state.full_optimizer_state_dict(), full) == []
    state.close()
    return bool(early) and same


def test_what_is_loaded_last_counts(workers: WorkerPools, tmp_path: Path) -> None:
    assert all(workers(2).run(load_twice, str(tmp_path / "sharded")))


def save_with_safetensors(rank: int, world_size: int, folder: str) -> tuple[list[str], list[str]]:
    """Names that Accelerate keeps of a state, and of storages that are larger than their tensors."""
    from accelerate.utils.other import clean_state_dict_for_safetensors
    from safetensors.torch import load_model, save_model

    model, batches, optimizer = cast("tuple[Any, Any, Any]", MODELS["encoder"])
    trained = model(world_size)
    ddp = DistributedDataParallel(trained, bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    opt = optimizer(trained)
    state = DearState(ddp, opt, CONFIG)
    ddp.register_comm_hook(state, dear_hook)
    for step in range(3):
        ddp(*batches(rank, world_size, step)).backward()
        opt.step()
        opt.zero_grad()
    weights = trained.state_dict()
    layout = state._driver.layout.current
    assert layout is not None and any(len(atom.members) > 1 for atom in layout.atoms), "they were to be neighbours"
    larger = [name for name, value in weights.items() if value.untyped_storage().nbytes() > value.nbytes]
    path = str(Path(folder) / f"{rank}.safetensors")
    save_model(trained, path)
    before = {name: value.clone() for name, value in weights.items()}
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    load_model(trained, path)
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    kept = clean_state_dict_for_safetensors(dict(trained.state_dict()))
    state.close()
    return sorted(set(weights) - set(kept)), larger


def test_every_parameter_is_a_storage_of_its_own(workers: WorkerPools, tmp_path: Path) -> None:
    """Safetensors and Accelerate leave out what shares a storage with something else."""
    assert workers(2).run(save_with_safetensors, str(tmp_path)) == [([], []), ([], [])]
