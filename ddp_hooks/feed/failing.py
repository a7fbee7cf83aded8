"""Noticing that an optimizer's step has ended with an exception, for which torch has no hook."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ddp_hooks.comm import RemovableHandle


def when_step_fails(optimizer: torch.optim.Optimizer, restore: Callable[[], None]) -> RemovableHandle:
    """Call ``restore()`` before an exception leaves ``optimizer.step()``: post-hooks do not run then."""
    # torch's own schedulers wrap step() on the instance in the same way, and unwrap a bound method.
    original = optimizer.step
    was_wrapped = "step" in vars(optimizer)

    @functools.wraps(getattr(original, "__func__", original))  # with the mark by which schedulers know their wrapper
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException:
            restore()
            raise

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    wrapped, ours = weakref.ref(optimizer), weakref.ref(step)

    def undo() -> None:
        optimizer = wrapped()
        present = vars(optimizer).get("step") if optimizer is not None else None
        if optimizer is None or ours() is None or getattr(present, "__func__", None) is not ours():
            return  # somebody has wrapped ours meanwhile; it does no harm
        if was_wrapped:
            optimizer.step = original  # type: ignore[method-assign]
        else:
            del optimizer.step

    return RemovableHandle(undo)
