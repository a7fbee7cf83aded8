"""Optimizers beside a model's own that step with it, such as those of sharded tables.

Hooks do not import each other; here they find each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from ddp_hooks.comm import Work


class CoOptimizer(Protocol):
    """Gradients and updates of its own, beside the model's optimizer."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Step and zero with ``optimizer`` from now on."""

    def yield_link_to(self, works: Sequence[Work]) -> None:
        """Let ``works`` travel before what follows the step that is under way."""

    def would_miss_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if ``optimizer`` is the model's and no optimizer will apply the pending gradients."""

    def unscale(self, inverse_scale: float) -> bool:
        """Multiply the gradients; return True if some of this rank's are not finite."""

    def found_nonfinite(self) -> bool:
        """Return True if some of this rank's gradients are not finite."""

    def on_grads_restored(self) -> None:
        """Check again whether the model's gradients were zeroed: real gradients have replaced the guards."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def reduced_gradients(self) -> AbstractContextManager[list[torch.nn.Parameter]]:
        """Show this rank's part of all gradients while the context lasts; collective."""

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a small tensor over the ranks; collective."""

    def largest_over_ranks(self, value: Tensor) -> Tensor:
        """Return the largest values of a small tensor over the ranks; collective."""


_by_module: weakref.WeakKeyDictionary[nn.Module, weakref.ref[CoOptimizer]] = weakref.WeakKeyDictionary()
_by_optimizer: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[CoOptimizer]]] = (
    weakref.WeakKeyDictionary()
)


def join_module(module: nn.Module, co_optimizer: CoOptimizer) -> None:
    """Note that ``co_optimizer`` belongs to ``module``."""
    _by_module[module] = weakref.ref(co_optimizer)


def leave_module(module: nn.Module, co_optimizer: CoOptimizer) -> None:
    """Forget that ``co_optimizer`` belongs to ``module``."""
    if module in _by_module and _by_module[module]() in (None, co_optimizer):
        del _by_module[module]


def would_leave_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a table of the model that ``optimizer`` updates has gradients that nobody will apply."""
    found = [reference() for reference in _by_module.values()]
    return any(co_optimizer is not None and co_optimizer.would_miss_step(optimizer) for co_optimizer in found)


def join_optimizer(optimizer: torch.optim.Optimizer, co_optimizer: CoOptimizer) -> None:
    """Note that ``co_optimizer`` steps with ``optimizer``."""
    present = [reference for reference in _by_optimizer.get(optimizer, []) if reference() not in (None, co_optimizer)]
    _by_optimizer[optimizer] = [*present, weakref.ref(co_optimizer)]


def leave_optimizer(optimizer: torch.optim.Optimizer, co_optimizer: CoOptimizer) -> None:
    """Forget that ``co_optimizer`` steps with ``optimizer``."""
    _by_optimizer[optimizer] = [r for r in _by_optimizer.get(optimizer, []) if r() not in (None, co_optimizer)]


def co_optimizers_in(root: nn.Module) -> list[CoOptimizer]:
    """Return the co-optimizers of ``root`` and the modules below it."""
    found = (_by_module[module]() for module in root.modules() if module in _by_module)
    return list(dict.fromkeys(co_optimizer for co_optimizer in found if co_optimizer is not None))


def co_optimizers_of(optimizer: torch.optim.Optimizer) -> list[CoOptimizer]:
    """Return the co-optimizers that step with ``optimizer``."""
    found = (reference() for reference in _by_optimizer.get(optimizer, []))
    return [co_optimizer for co_optimizer in found if co_optimizer is not None]
