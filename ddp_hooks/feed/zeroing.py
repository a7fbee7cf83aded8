"""``optimizer.zero_grad()``, for which torch has no hook."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_hooks.comm import Undo


def extend_zero_grad(optimizer: torch.optim.Optimizer, also: Callable[[bool], None]) -> Undo:
    """Call ``also(set_to_none)`` before every ``optimizer.zero_grad(set_to_none)``."""
    # torch's own schedulers wrap step() on the instance in the same way.
    original = optimizer.zero_grad
    extended_before = "zero_grad" in vars(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        also(set_to_none)
        original(set_to_none=set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def undo() -> None:
        if vars(optimizer).get("zero_grad") is not zero_grad:
            return  # somebody has extended ours meanwhile; it does no harm
        if extended_before:
            optimizer.zero_grad = original  # type: ignore[method-assign]
        else:
            del optimizer.zero_grad

    return Undo(undo)
