"""Hooks that stay with their module: a copied or pickled module gets a hook that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_REASON = "ddp_hooks waits for parameters between graphs: compile with fullgraph=False"


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy of its module."""


class InertOnCopy:
    """Calls ``function``; copies and pickles as :func:`do_nothing`.

    Module hooks are copied with their module. A copied hook would act for the original: an averaged model would wait
    for gathers of the trained one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        # A traced hook would act as it did when it was traced. Not a decorator: that would import the compiler here.
        if not getattr(InertOnCopy.__call__, "_torchdynamo_disable", False):
            InertOnCopy.__call__ = torch.compiler.disable(InertOnCopy.__call__, reason=_REASON)  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _inert, ()


def _inert() -> Callable[..., None]:
    return do_nothing
