"""Who reads or writes parameters outside of any forward, and can be told to wait for them first."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from ddp_hooks.feed.inert import InertOnCopy

_synchronize: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod[Callable[[], None]]] = (
    weakref.WeakKeyDictionary()
)


def wait_before_reading(root: nn.Module, wait: Callable[[], None]) -> list[Any]:
    """Call the bound method ``wait`` before ``root``, or a module below it, is saved, loaded or averaged.

    Returns:
        Handles of the hooks.
    """

    def hook(*_: Any) -> None:
        wait()

    handles: list[Any] = []
    waiting = InertOnCopy(hook)
    for module in root.modules():
        handles.append(module.register_state_dict_pre_hook(waiting))
        handles.append(module.register_load_state_dict_pre_hook(waiting))
        _synchronize_before_averaging(module, wait)
    return handles


def _synchronize_before_averaging(module: nn.Module, synchronize: Callable[[], None]) -> None:
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
