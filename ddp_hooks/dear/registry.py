"""Which DearState an optimizer belongs to, for code that is handed only the optimizer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ddp_hooks.dear.state import DearState

_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[DearState]] = weakref.WeakKeyDictionary()


def register(optimizer: torch.optim.Optimizer, state: DearState) -> None:
    """Remember that ``optimizer`` steps under ``state``."""
    _states[optimizer] = weakref.ref(state)


def forget(optimizer: torch.optim.Optimizer) -> None:
    """The optimizer's state was closed."""
    _states.pop(optimizer, None)


def state_of(optimizer: torch.optim.Optimizer) -> DearState | None:
    """The open state under which ``optimizer`` steps, or None."""
    reference = _states.get(optimizer)
    return reference() if reference is not None else None
