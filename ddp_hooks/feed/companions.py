"""What is updated beside a model's parameters, when their optimizer steps: sharded tables.

Hooks do not know each other; here they find each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from ddp_hooks.comm import Work


class Companion(Protocol):
    """Something with gradients and updates of its own."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Step and zero with ``optimizer`` from now on."""

    def let_pass(self, works: Sequence[Work]) -> None:
        """What is sent after the step that is under way is less urgent than this."""

    def misses_step_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` is the model's, and will not apply the gradients that are here, nor will another."""

    def unscale(self, inverse_scale: float) -> bool:
        """Multiply the gradients; whether some of this rank's are not finite."""

    def found_nonfinite(self) -> bool:
        """Whether some of this rank's gradients are not finite."""

    def look_again(self) -> None:
        """The model's gradients are there now, in the place of guards, by which one tells whether they are zeroed."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def reduced_gradients(self) -> AbstractContextManager[list[torch.nn.Parameter]]:
        """This rank's part of all gradients, for as long as the context lasts; collective."""

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of a small tensor over the ranks; collective."""

    def largest_over_ranks(self, value: Tensor) -> Tensor:
        """The largest values of a small tensor over the ranks; collective."""


_by_module: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Companion]] = weakref.WeakKeyDictionary()
_by_optimizer: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[Companion]]] = (
    weakref.WeakKeyDictionary()
)


def join_module(module: nn.Module, companion: Companion) -> None:
    """``companion`` belongs to ``module``."""
    _by_module[module] = weakref.ref(companion)


def leave_module(module: nn.Module, companion: Companion) -> None:
    """``companion`` has ended."""
    if module in _by_module and _by_module[module]() in (None, companion):
        del _by_module[module]


def left_behind_by(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some companion of the model that ``optimizer`` updates has gradients, and follows nobody."""
    found = [reference() for reference in _by_module.values()]
    return any(companion is not None and companion.misses_step_of(optimizer) for companion in found)


def join_optimizer(optimizer: torch.optim.Optimizer, companion: Companion) -> None:
    """``companion`` steps with ``optimizer``."""
    present = [reference for reference in _by_optimizer.get(optimizer, []) if reference() not in (None, companion)]
    _by_optimizer[optimizer] = [*present, weakref.ref(companion)]


def leave_optimizer(optimizer: torch.optim.Optimizer, companion: Companion) -> None:
    """``companion`` no longer steps with ``optimizer``."""
    _by_optimizer[optimizer] = [r for r in _by_optimizer.get(optimizer, []) if r() not in (None, companion)]


def companions_in(root: nn.Module) -> list[Companion]:
    """Those that belong to ``root`` or a module below it."""
    found = (_by_module[module]() for module in root.modules() if module in _by_module)
    return list(dict.fromkeys(companion for companion in found if companion is not None))


def companions_of(optimizer: torch.optim.Optimizer) -> list[Companion]:
    """Those that step with ``optimizer``."""
    found = (reference() for reference in _by_optimizer.get(optimizer, []))
    return [companion for companion in found if companion is not None]
