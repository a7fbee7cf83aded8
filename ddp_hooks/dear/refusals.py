"""Optimizers and models that have a DearState, and hooks that refuse calls which cannot work with it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ddp_hooks.comm import see
from ddp_hooks.comm.torch_compat.state_dict import undo_making_state

_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()
_claimed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def register(optimizer: torch.optim.Optimizer, root: torch.nn.Module, state: Any) -> None:
    """Remember that ``optimizer`` and ``root``, the module inside DDP, belong to the DearState ``state``."""
    _states[optimizer] = weakref.ref(state)
    _claimed.add(root)


def unregister(optimizer: torch.optim.Optimizer, root: torch.nn.Module) -> None:
    _states.pop(optimizer, None)
    _claimed.discard(root)


def state_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return the open DearState under which ``optimizer`` steps, or None."""
    reference = _states.get(optimizer)
    return reference() if reference is not None else None


def has_state(root: torch.nn.Module) -> bool:
    """Return True if the module inside DDP is trained under an open DearState."""
    return root in _claimed


def refuse_state_dict(*_: Any) -> None:
    """Raise: a hook of ``state_dict`` and ``load_state_dict`` after :meth:`DearState.close`."""
    raise RuntimeError(
        "DearState was closed, and this optimizer still holds a shard of its state: save it before close(), with "
        f"state.consolidate() or state.full_optimizer_state_dict(){see('the-state-was-closed')}"
    )


def refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise: a step pre-hook after :meth:`DearState.close`."""
    undo_making_state(optimizer)
    raise RuntimeError(
        "DearState was closed, and this optimizer still holds shards: make a new optimizer over the model's parameters"
        f"{see('the-state-was-closed')}"
    )
