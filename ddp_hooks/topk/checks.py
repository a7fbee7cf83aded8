"""Checks of the set-up: everything that cannot work is refused before anything is changed, with a remedy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import agree, agree_on_node_size, see
from ddp_hooks.comm.torch_compat.ddp import managed_parameters
from ddp_hooks.intercept import ddp_checks
from ddp_hooks.intercept.optimizers import find_problem_of_hooks
from ddp_hooks.topk.choosing import candidates
from ddp_hooks.topk.config import TopKConfig


def agree_on_setup(
    ddp: DistributedDataParallel,
    config: TopKConfig,
    scaler: torch.amp.GradScaler | None,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[dist.ProcessGroup, int]:
    """Return the model's group, and the ranks per node, 1 for one level; collective.

    Raises:
        ValueError: on every rank, if the set-up cannot work, or if ranks differ.
    """
    group = getattr(ddp, "process_group", None) or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    problem = (
        ddp_checks.find_problem_of_types(ddp, config, TopKConfig, "TopKState")
        or ddp_checks.find_problem_of_ddp(ddp)
        or ddp_checks.find_problem_of_parameters(ddp, "TopKState")
        or ddp_checks.find_problem_of_dtypes(ddp)
        or _problem_of_nodes(ddp, config, dist.get_world_size(group))
        or (_problem_of_optimizer(optimizer, config) if optimizer is not None else None)
        or (_problem_of_pipeline(ddp, scaler, optimizer) if config.pipeline == "forward" else None)
    )
    entries: dict[str, object] = {}
    if problem is None:
        entries = ddp_checks.fingerprint(ddp, config) | {"a gradient scaler": "none" if scaler is None else "given"}
    agree(entries, problem, group, "the set-up of TopKState", config)
    node_size = agree_on_node_size(config.node_size, group, "the set-up of TopKState", config)
    problem = _problem_of_algorithm(ddp, config, dist.get_world_size(group) // node_size)
    if problem is not None:  # the same on every rank
        raise ValueError(f"{problem}{see('set-up-is-refused')}")
    return group, node_size


def _problem_of_nodes(ddp: DistributedDataParallel, config: TopKConfig, world_size: int) -> str | None:
    size = config.node_size
    device = next(iter(managed_parameters(ddp).values())).device
    if size is not None and config.algorithm == "dense" and device.type != "cpu":
        return (
            f'node_size={size!r} has no effect on {device.type} with algorithm="dense", whose collectives are native: '
            f"leave it out"
        )
    return ddp_checks.find_problem_of_nodes(size, world_size)


def _problem_of_algorithm(ddp: DistributedDataParallel, config: TopKConfig, num_nodes: int) -> str | None:
    teams = config.teams
    if config.algorithm in ("spardl", "auto") and isinstance(teams, int):
        if num_nodes % teams:
            possible = [number for number in range(1, num_nodes + 1) if num_nodes % number == 0]
            what = "ranks" if config.node_size is None else "nodes"
            return f"teams must divide the number of {what}, {num_nodes}: got {teams}, possible are {possible}"
        if config.sag == "r" and teams & (teams - 1):
            return f'sag="r" needs a power of two of teams, got {teams}: use sag="b" or "auto"'
    device = next(iter(managed_parameters(ddp).values())).device
    possible_variants = candidates(config, num_nodes)
    if device.type != "cpu" and len(possible_variants) > 1:
        names = ", ".join(variant.name for variant in possible_variants)
        return f"on {device.type} there is no choosing by trial yet: name algorithm, teams and sag, of {names}"
    return None


def _problem_of_optimizer(optimizer: torch.optim.Optimizer, config: TopKConfig) -> str | None:
    problem = ddp_checks.find_problem_of_optimizer_type(optimizer, "TopKState")
    if problem is None and config.momentum and any(group.get("momentum") for group in optimizer.param_groups):
        return (
            f"momentum={config.momentum!r} adds momentum before the selection, and {type(optimizer).__name__} has "
            f"momentum, too: give it to one of the two"
        )
    return problem


def _problem_of_pipeline(
    ddp: DistributedDataParallel, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer | None
) -> str | None:
    if scaler is not None:
        return (
            'a gradient scaler reads gradients before the step, when pipeline="forward" has none yet: use '
            'pipeline="backward", or bfloat16 autocast, which needs no scaler'
        )
    if optimizer is None:
        return (
            'pipeline="forward" runs the updates in forwards, so it needs the optimizer: '
            "TopKState(ddp, config, optimizer=optimizer)"
        )
    problem = find_problem_of_hooks(optimizer)
    if problem is not None:
        return problem
    if not ddp.gradient_as_bucket_view:
        return 'pipeline="forward" needs DistributedDataParallel(..., gradient_as_bucket_view=True)'
    parameters = managed_parameters(ddp)
    addresses = [p.data_ptr() for p in parameters.values() if p.numel()]
    if len(set(addresses)) < len(addresses):
        return (
            'with pipeline="forward" every module waits for its own parameters, and some of these share their memory '
            "without being the same: tie weights by assigning the parameter itself"
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in held]
    if missing:
        return (
            f'pipeline="forward" needs one optimizer of all parameters, and this one does not have '
            f"{', '.join(missing[:5])}: give it all, or use pipeline=\"backward\""
        )
    return None
