"""Hooks of modules: a copied or pickled module gets one that does nothing; replaced parameters are refused."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from ddp_hooks.comm import see

_REASON = "ddp_hooks waits for parameters between graphs: compile with fullgraph=False"


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a hook in a copy of its module."""


def _inert() -> Callable[..., None]:
    return _do_nothing


class InertInCopies:
    """Hook that copies and pickles as a function that does nothing: an averaged model does not wait for gathers."""

    __slots__ = ()

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _inert, ()


class NonCopyableHook(InertInCopies):
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        # A traced hook would act as it did when it was traced. Not a decorator: that would import the compiler here.
        if not getattr(NonCopyableHook.__call__, "_torchdynamo_disable", False):
            NonCopyableHook.__call__ = torch.compiler.disable(NonCopyableHook.__call__, reason=_REASON)  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def refuse_assigned_parameters(root: nn.Module, parameters: Collection[nn.Parameter]) -> list[Any]:
    """Raise ValueError when ``load_state_dict(assign=True)`` is about to replace some of ``parameters``."""
    reduced = {id(parameter) for parameter in parameters}
    refuse = NonCopyableHook(_refuse)
    return [
        module.register_load_state_dict_pre_hook(refuse)
        for module in root.modules()
        if not isinstance(module, torch.jit.ScriptModule)  # it takes no hooks, and keeps its parameters
        and any(id(parameter) in reduced for parameter in module.parameters(recurse=False))
    ]


def refuse_join(state: str, why: str, *_: Any, **__: Any) -> Any:
    """Raise: in the place of ``join`` and ``join_hook`` of a DDP module."""
    raise RuntimeError(
        f"join() cannot work with {state}: a rank that has run out of data {why}. Give every rank the same number of "
        "batches: DistributedSampler(drop_last=True), or stop with the rank that has the fewest "
        f"(itertools.islice(loader, smallest), all-reduced with ReduceOp.MIN){see('uneven-batches')}"
    )


def _refuse(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
    if local_metadata.get("assign_to_params_buffers"):
        raise ValueError(
            f"load_state_dict(assign=True) replaces the parameters of {prefix.rstrip('.') or 'the model'}, which DDP "
            f"and the optimizer would not notice: load without assign, or before wrapping the model in DDP"
            f"{see('storage-was-replaced')}"
        )
