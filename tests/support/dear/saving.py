"""Training steps with saved states, and what differs between two states."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, dear_hook
from tests.support.dear import twins
from tests.support.dear.loops import adamw_two_groups
from tests.support.dear.twins import CONFIG, Trainee, WholeNumbers, whole_batches


def full_state(twin: Trainee) -> dict[str, Any]:
    return twin.optimizer.state_dict() if twin.state is None else twin.state.full_optimizer_state_dict()


def save_every_step(twin: Trainee, step: int) -> None:
    twins.plain(twin, step)
    twin.memory.setdefault("saved", []).append(copy.deepcopy(full_state(twin)))


def differences(ours: Any, theirs: Any, path: str = "state") -> list[str]:
    """Where two nests of dicts, lists, tensors and plain values differ, in any bit or in kind."""
    if type(ours) is not type(theirs):
        return [f"{path}: {type(ours).__name__} and {type(theirs).__name__}"]
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return [f"{path}: keys {list(ours)} and {list(theirs)}"]
        return [text for key in ours for text in differences(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(ours, list):
        if len(ours) != len(theirs):
            return [f"{path}: lengths {len(ours)} and {len(theirs)}"]
        return [t for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for t in differences(a, b, f"{path}[{i}]")]
    if isinstance(ours, Tensor):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.stride() == theirs.stride()
        return [] if same and torch.equal(ours, theirs) else [f"{path}: tensors differ"]
    return [] if ours == theirs else [f"{path}: {ours!r} and {theirs!r}"]


def wrap(world_size: int, with_dear: bool) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DearState | None]:
    torch.manual_seed(7)
    ddp = DistributedDataParallel(WholeNumbers(world_size), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    optimizer = adamw_two_groups(ddp.module)
    state = DearState(ddp, optimizer, CONFIG) if with_dear else None
    if state is not None:
        ddp.register_comm_hook(state, dear_hook)
    return ddp, optimizer, state


def train_step(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, world_size: int, step: int
) -> None:
    optimizer.zero_grad()
    ddp(*whole_batches(rank, world_size, step)).backward()
    optimizer.step()
