"""Refusing ``load_state_dict(assign=True)``, which puts other parameters in the place of those that DDP reduces."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from ddp_hooks.comm import see, torch_compat
from ddp_hooks.feed.inert import InertOnCopy


def refuse_assigned_parameters(root: nn.Module, parameters: Collection[nn.Parameter]) -> list[Any]:
    """Raise ValueError when ``load_state_dict(assign=True)`` is about to replace some of ``parameters``.

    Returns:
        Handles of the hooks, on every module below ``root`` that owns one of them.
    """
    reduced = {id(parameter) for parameter in parameters}
    refuse = InertOnCopy(_refuse)
    return [
        module.register_load_state_dict_pre_hook(refuse)
        for module in root.modules()
        if not torch_compat.is_scripted(module)  # it takes no hooks, and keeps its parameters
        and any(id(parameter) in reduced for parameter in module.parameters(recurse=False))
    ]


def _refuse(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
    if local_metadata.get("assign_to_params_buffers"):
        raise ValueError(
            f"load_state_dict(assign=True) replaces the parameters of {prefix.rstrip('.') or 'the model'}, which DDP "
            f"and the optimizer would not notice: load without assign, or before wrapping the model in DDP"
            f"{see('storage-was-replaced')}"
        )
