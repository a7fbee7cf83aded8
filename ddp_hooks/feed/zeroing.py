"""``zero_grad()`` of optimizers and models, for which torch has no hook."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch

from ddp_hooks.comm import RemovableHandle, torch_compat


def extend_zero_grad(owner: torch.optim.Optimizer | torch.nn.Module, also: Callable[[bool], None]) -> RemovableHandle:
    """Call ``also(set_to_none)`` before every ``owner.zero_grad(set_to_none)``."""
    # torch's own schedulers wrap step() on the instance in the same way.
    original = owner.zero_grad
    extended_before = "zero_grad" in vars(owner)

    def zero_grad(set_to_none: bool = True) -> None:
        also(set_to_none)
        # Removing gradients touches no value: no parameter in flight, and no guard, has to be asked one by one.
        with torch_compat.without_overrides() if set_to_none else nullcontext():
            original(set_to_none=set_to_none)

    zero_grad.__wrapped__ = original  # type: ignore[attr-defined]
    owner.zero_grad = zero_grad  # type: ignore[method-assign]
    extended, ours = weakref.ref(owner), weakref.ref(zero_grad)  # whoever keeps the handle does not keep the model

    def undo() -> None:
        owner = extended()
        if owner is None or vars(owner).get("zero_grad") is not ours():
            return  # somebody has extended ours meanwhile; it does no harm
        if extended_before:
            owner.zero_grad = vars(owner)["zero_grad"].__wrapped__  # type: ignore[method-assign]
        else:
            del owner.zero_grad

    return RemovableHandle(undo)
