"""Gradients that the optimizer may hold before they are reduced, so that it can begin while the last ones travel.

``optimizer.step()`` looks at every gradient's metadata first and at its values one parameter after another. A pending
gradient answers the first at once and waits for its reduce-scatter at the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ddp_hooks.feed.guard import METADATA


class PendingGradient(Tensor):
    """A gradient in its final memory; any function that takes it waits until that memory holds the final values."""

    plain: Tensor  # the same memory
    settle: Callable[[], None]  # waits; may be called again

    @staticmethod
    def of(plain: Tensor, settle: Callable[[], None]) -> PendingGradient:
        """A stand-in for ``plain``, whose values are there when ``settle`` has returned."""
        pending = plain.detach().as_subclass(PendingGradient)
        pending.plain = plain
        pending.settle = settle
        return pending

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        return func(*_settled(args), **{key: _settled(value) for key, value in (kwargs or {}).items()})


def _settled(value: Any) -> Any:
    if isinstance(value, PendingGradient):
        value.settle()
        return value.plain
    if isinstance(value, list | tuple):
        return type(value)(_settled(item) for item in value)
    return value
