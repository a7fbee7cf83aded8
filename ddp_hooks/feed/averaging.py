"""``AveragedModel.update_parameters`` reads parameters outside of any forward: let it wait for gathers first."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

_synchronize: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod[Callable[[], None]]] = (
    weakref.WeakKeyDictionary()
)


def synchronize_before_averaging(module: nn.Module, synchronize: Callable[[], None]) -> None:
    """Call the bound method ``synchronize`` whenever ``module`` is averaged into an ``AveragedModel``.

    torch has no hook at this place; the method is wrapped once, for all models, and does nothing for other modules.
    """
    _synchronize[module] = weakref.WeakMethod(synchronize)
    original = AveragedModel.update_parameters
    if getattr(original, "_synchronizes", False):
        return

    @functools.wraps(original)
    def update_parameters(self: AveragedModel, model: nn.Module) -> Any:
        reference = _synchronize.get(model)
        method = reference() if reference is not None else None
        if method is not None:
            method()
        return original(self, model)

    update_parameters._synchronizes = True  # type: ignore[attr-defined]
    AveragedModel.update_parameters = update_parameters  # type: ignore[method-assign]
