"""Checks: refuse, before anything is changed, a set-up that cannot be right, and say what to do instead."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import compare, in_storage_order, see
from ddp_hooks.comm.torch_compat.ddp import managed_parameters
from ddp_hooks.comm.torch_compat.optimizer import optimizes_in_backward
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.effects import Setup, find_setting_without_effect
from ddp_hooks.dear.layout.memory import overlapping
from ddp_hooks.dear.refusals import has_state, state_of
from ddp_hooks.intercept import ELEMENTWISE, PARAMETERWISE, ddp_checks
from ddp_hooks.intercept.optimizers import find_problem_of_hooks


def find_problem(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, config: DearConfig
) -> str | None:
    """Return the first reason why DeAR cannot be right here, with a remedy; None if there is none."""
    return (
        ddp_checks.find_problem_of_types(ddp, config, DearConfig, "DearState")
        or ddp_checks.find_problem_of_optimizer_type(optimizer, "DearState")
        or find_problem_of_hooks(optimizer)
        or _problem_of_other_states(ddp, optimizer)
        or ddp_checks.find_problem_of_ddp(ddp)
        or _problem_of_optimizer(optimizer, config)
        or ddp_checks.find_problem_of_parameters(ddp, "DearState")
        or _problem_of_parameters(ddp, optimizer)
        or find_setting_without_effect(config, _setup(ddp, optimizer, config))
    )


def updates_whole_parameters(optimizer: torch.optim.Optimizer, config: DearConfig) -> bool:
    """Return True if the settings, or else the optimizer, ask for replicated updates."""
    return config.update == "replicated" or (config.update == "auto" and not updates_elements(optimizer, config))


def updates_elements(optimizer: torch.optim.Optimizer, config: DearConfig) -> bool:
    """Return True if the optimizer is known, or vouched for, to update every element by itself."""
    return type(optimizer) in ELEMENTWISE or config.assume_elementwise


def updates_parameters(optimizer: torch.optim.Optimizer, config: DearConfig) -> bool:
    """Return True if the optimizer is known, or vouched for, to update every parameter by itself."""
    return type(optimizer) in PARAMETERWISE or config.assume_elementwise or config.assume_parameterwise


def fingerprint(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, config: DearConfig
) -> dict[str, object]:
    """Return everything that must be equal on all ranks, by name."""
    entries = ddp_checks.fingerprint(ddp, config) | {"optimizer": type(optimizer).__qualname__}
    for index, group in enumerate(optimizer.param_groups):
        entries[f"parameters of optimizer group {index}"] = len(group["params"])
        for key, value in group.items():
            if key not in ("params", "param_names"):
                value = value.tolist() if isinstance(value, torch.Tensor) else value  # on whichever device
                entries[f"{key} of optimizer group {index}"] = value
    return entries


def _problem_of_other_states(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> str | None:
    if state_of(optimizer) is not None:
        return (
            "the optimizer already steps under a DearState. If it is of this model, go on with it, or close() it "
            "first; if it is of another model, give every model an optimizer of its own"
        )
    if has_state(ddp.module):
        return (
            "the module already has a DearState, so another optimizer or state would step on the same "
            "parameters: use one optimizer with several param_groups, or close() the first state"
        )
    if not ddp.gradient_as_bucket_view:
        return (
            "DearState reduces gradients in DDP's buckets after backward has returned, but with "
            "gradient_as_bucket_view=False DDP copies the buckets back meanwhile: pass "
            "DistributedDataParallel(..., gradient_as_bucket_view=True)"
        )
    return None


def _problem_of_optimizer(optimizer: torch.optim.Optimizer, config: DearConfig) -> str | None:
    if isinstance(optimizer, torch.optim.LBFGS):
        return "LBFGS evaluates its closure several times per step; DeAR supports one: use another optimizer"
    kind = type(optimizer)
    known = ", ".join(each.__name__ for each in ELEMENTWISE)
    if config.assume_elementwise and kind in PARAMETERWISE and kind not in ELEMENTWISE:
        return (
            f"assume_elementwise=True is wrong for {kind.__name__}, which looks at whole parameters: leave it out, and "
            f'use DearConfig(update="replicated"), or one of {known}'
        )
    if config.update == "sharded" and not updates_elements(optimizer, config):
        vouch = "" if kind in PARAMETERWISE else ", or DearConfig(assume_elementwise=True) if you know that it does"
        return (
            f"{kind.__name__} is not known to update every element by itself, and would step on shards of "
            f'parameters: use DearConfig(update="replicated"), which lets it see whole ones, or one of {known}{vouch}'
        )
    return None


def _problem_of_parameters(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> str | None:
    parameters = managed_parameters(ddp)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if id(parameter) not in held:
            return (
                f"{name} is reduced by DDP but not in the optimizer: add it, freeze it with requires_grad_(False) "
                f"before wrapping, or use one optimizer with several param_groups"
            )
        if parameter.is_complex():
            return (
                f"{name} is {parameter.dtype}, and gradients are reduced as real numbers: hold it as "
                f"nn.Parameter(torch.view_as_real(...)), and use torch.view_as_complex(...) of it in the forward"
            )
        if parameter.dtype == torch.float16:
            return (
                f"{name} is float16, and sums over ranks could overflow before they are divided: keep parameters in "
                f"float32 under torch.autocast, or use bfloat16"
            )
        if optimizes_in_backward(parameter):
            return f"{name} is updated inside backward by its own optimizer: use a plain optimizer.step()"
    shared = overlapping(list(parameters.values()))
    if shared is not None:
        names = list(parameters)
        return (
            f"{names[shared[0]]} and {names[shared[1]]} share memory but are different parameters: tie them by "
            f"assigning the same Parameter object"
        )
    return None


def _setup(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, config: DearConfig) -> Setup:
    parameters = managed_parameters(ddp).values()
    return Setup(
        update="replicated" if updates_whole_parameters(optimizer, config) else "sharded",
        optimizer=type(optimizer).__name__,
        device=next(iter(parameters)).device.type,
        dtypes=frozenset(parameter.dtype for parameter in parameters),
    )


def refuse_different_replicas(
    parameters: Sequence[Tensor], names: Sequence[str], step: int, group: dist.ProcessGroup, config: DearConfig
) -> None:
    """Raise RuntimeError, on every rank, if a parameter differs between ranks in any bit; collective."""
    digests = {f"the hash of {name}": _digest(p) for name, p in zip(names, parameters, strict=True)}
    _, difference = compare(digests, None, group, f"the model after step {step}", config)
    if difference is not None:
        raise RuntimeError(
            f"{difference}. Look for code that only some ranks run: writing parameters, seeding, skipping a step or a "
            f"backward{see('replicas-differ')}"
        )


def _digest(parameter: Tensor) -> str:
    content = in_storage_order(parameter.detach()).cpu().view(torch.uint8).numpy()
    return hashlib.blake2b(content.data, digest_size=6).hexdigest()
