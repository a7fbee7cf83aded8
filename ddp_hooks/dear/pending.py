"""Gradients that the optimizer may hold before they are reduced, so that it can begin while the last ones travel.

``optimizer.step()`` looks at every gradient's metadata first and at its values one parameter after another. A pending
gradient answers the first at once and waits for its reduce-scatter at the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ddp_hooks.intercept.guards import METADATA


class PendingGradient(Tensor):
    """A gradient in its final memory; any function that takes it waits until that memory holds the final values.

    It is a plain tensor from then on, which costs the functions that follow nothing.
    """

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
        kwargs = kwargs or {}
        _settle_in(args)
        _settle_in(kwargs.values())
        return func(*args, **kwargs)


def _settle_in(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, PendingGradient):
            settle = vars(value).get("settle")
            if settle is not None:  # else another thread has just done it
                settle()
            value.__class__ = Tensor  # type: ignore[assignment]
            vars(value).clear()  # what it has waited for
        elif isinstance(value, list | tuple):
            _settle_in(value)
