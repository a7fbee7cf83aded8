"""Causes of gradients that were not reduced, told from the forwards, the model and its hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm.torch_compat.ddp import comm_hook_registered, ignored_parameter_names, shortened, sparse_parameters
from ddp_hooks.intercept.guards import ONE_BACKWARD, GradientGuard

LatestForward: TypeAlias = Literal["none", "no_sync", "synchronised"]
"""The last forward through DDP's hooks since the last reduced backward, as far as it recorded gradients."""


def why_not_reduced(
    ddp: DistributedDataParallel,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    without: Sequence[str],
    latest: LatestForward,
    state: str,
    hook: str,
    change: str | None = None,
) -> str:
    """Return the remedy and the cause; several causes where the facts do not tell which one it is.

    ``without`` names parameters to which the last backward gave no gradient; ``state`` and ``hook`` are names of the
    state's class and of its hook; ``change`` says how users may change gradients (None: no code can have set one).
    """
    if not comm_hook_registered(ddp):
        return f"the hook is missing: call ddp.register_comm_hook(state, {hook}) after creating {state}"
    changed = _changed_since(ddp, parameters, names)
    if changed is not None:
        return changed
    if latest == "no_sync":
        return "leave no_sync() before the last micro-batch of a step: the last forward ran under no_sync()"
    reduced = any(isinstance(parameter.grad, GradientGuard) for parameter in parameters)  # by the last backward
    if change is not None and reduced:
        return f"{change}: something other than the last backward through ddp(...) has set .grad"
    if latest == "synchronised" and without:
        return f"{remedy_for_unused(ddp)}: the last backward gave no gradient to {shortened(without)}"
    causes = [ONE_BACKWARD]
    if latest == "synchronised":
        causes.append(f"{remedy_for_unused(ddp)}, if the last backward gave some parameters no gradient")
    if change is not None:
        causes.append(f"{change}, if code has set .grad")
    return "; or ".join(causes)


def why_not_ended(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor], names: Sequence[str], missing: Sequence[str]
) -> str:
    """Return the remedy and the cause of a backward in which DDP has not handed over the buckets of ``missing``."""
    return _changed_since(ddp, parameters, names) or (
        f"{remedy_for_unused(ddp)}: the last backward ended without gradients for {shortened(missing)} or "
        "parameters of the same bucket. If it ended with an exception, wrap the model again"
    )


def remedy_for_unused(ddp: DistributedDataParallel) -> str:
    """Return how to train with parameters that get no gradient."""
    if ddp.static_graph:
        return (
            "pass find_unused_parameters=True to DistributedDataParallel in the place of static_graph=True, which "
            "needs the same parameters in every backward, at first those of all that the model returns"
        )
    if ddp.find_unused_parameters:
        return "return tensors, or tuples, lists or dicts of them, from the model, in which DDP finds what was used"
    return "pass find_unused_parameters=True to DistributedDataParallel"


def _changed_since(ddp: DistributedDataParallel, parameters: Sequence[Tensor], names: Sequence[str]) -> str | None:
    """Return how the trained parameters differ from those that the state was made for; None if they do not."""
    ignored = ignored_parameter_names(ddp)
    present = dict(ddp.module.named_parameters())
    known = {id(parameter) for parameter in parameters}
    left = {id(parameter) for parameter in sparse_parameters(ddp).values()}  # perhaps to another hook
    added = [
        name
        for name, parameter in present.items()
        if parameter.requires_grad and name not in ignored and id(parameter) not in known | left
    ]
    if added:
        return (
            f"{shortened(added)} was added, thawed or parametrised after the model was wrapped in "
            "DistributedDataParallel, which does not reduce it: do so before wrapping"
        )
    frozen = [name for name, parameter in zip(names, parameters, strict=True) if not parameter.requires_grad]
    if frozen and not ddp.find_unused_parameters:
        return (
            f"{shortened(frozen)} was frozen after the model was wrapped in DistributedDataParallel, "
            "which waits for its gradient: freeze it before wrapping, or pass find_unused_parameters=True"
        )
    return None
