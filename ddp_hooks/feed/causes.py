"""Why a gradient was not reduced: told from what was seen of forwards, of the model and of its hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import compat
from ddp_hooks.feed.guard import GradientGuard

LatestForward: TypeAlias = Literal["none", "no_sync", "synchronised"]
"""The last forward through DDP's hooks since the last reduced backward, as far as it recorded gradients."""


def why_not_reduced(
    ddp: DistributedDataParallel,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    latest: LatestForward,
    state: str,
    hook: str,
) -> str:
    """The cause, and what to do about it; the most certain one if there may be several.

    Args:
        ddp: the model.
        parameters, names: those that DDP reduces, as the state knows them.
        latest: see :data:`LatestForward`.
        state, hook: names of the state's class and of its hook, for the message.
    """
    if not compat.comm_hook_registered(ddp):
        return f"the hook is missing: call ddp.register_comm_hook(state, {hook}) after creating {state}"
    changed = _changed_since(ddp, parameters, names)
    if changed is not None:
        return changed
    reduced = any(isinstance(parameter.grad, GradientGuard) for parameter in parameters)  # by the last backward
    if latest == "none" and not reduced:
        return (
            "no forward through ddp(...) came before this backward: call ddp(...), not the module inside of it, and "
            "run one backward for each forward, with the sum of the losses"
        )
    if latest == "no_sync":
        return "the last backward ran under no_sync(): leave no_sync() before the last one of a step"
    unused = [name for name, parameter in zip(names, parameters, strict=True) if parameter.grad is None]
    if unused and not reduced:
        return f"the last backward gave no gradient to {compat.shortened(unused)}: {remedy_for_unused(ddp)}"
    return (
        "something other than the last backward through ddp(...) has set .grad: leave it to backward, and change "
        "gradients in `with state.reduced_gradients() as shards:`"
    )


def why_not_ended(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor], names: Sequence[str], missing: Sequence[str]
) -> str:
    """Likewise, of a backward in which DDP has not handed over the buckets of ``missing``."""
    return _changed_since(ddp, parameters, names) or (
        f"the last backward ended without gradients for {compat.shortened(missing)} or parameters of the same bucket: "
        f"{remedy_for_unused(ddp)}; if it ended with an exception, wrap the model again"
    )


def remedy_for_unused(ddp: DistributedDataParallel) -> str:
    """What lets a parameter be without a gradient."""
    if ddp.static_graph:
        return (
            "static_graph=True needs the same parameters in every backward, at first those of all that the model "
            "returns: pass find_unused_parameters=True to DistributedDataParallel in its place"
        )
    if ddp.find_unused_parameters:
        return "its output was not found in what the model returned: return tensors, or tuples, lists or dicts of them"
    return "pass find_unused_parameters=True to DistributedDataParallel"


def _changed_since(ddp: DistributedDataParallel, parameters: Sequence[Tensor], names: Sequence[str]) -> str | None:
    """How the model's trained parameters differ from those that the state was made for."""
    ignored = compat.ignored_parameter_names(ddp)
    present = dict(ddp.module.named_parameters())
    known = {id(parameter) for parameter in parameters}
    left = {id(parameter) for parameter in compat.sparse_parameters(ddp).values()}  # perhaps to another hook
    added = [
        name
        for name, parameter in present.items()
        if parameter.requires_grad and name not in ignored and id(parameter) not in known | left
    ]
    if added:
        return (
            f"{compat.shortened(added)} was added, thawed or parametrised after the model was wrapped in "
            "DistributedDataParallel, which does not reduce it: do so before wrapping"
        )
    frozen = [name for name, parameter in zip(names, parameters, strict=True) if not parameter.requires_grad]
    if frozen and not ddp.find_unused_parameters:
        return (
            f"{compat.shortened(frozen)} was frozen after the model was wrapped in DistributedDataParallel, which "
            "waits for its gradient: freeze it before wrapping, or pass find_unused_parameters=True"
        )
    return None
