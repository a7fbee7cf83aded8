"""Optimizers beside a model's own that step with it, such as those of sharded tables.

Hooks do not import each other; here they find each other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ddp_hooks.comm import Work


@runtime_checkable
class GradientShards(Protocol):
    """Gradients of which every rank holds a part; :class:`~ddp_hooks.DearState` is one."""

    def reduced_gradients(self) -> AbstractContextManager[list[nn.Parameter]]:
        """Return this rank's shards, with their reduced gradients as ``.grad`` while the context lasts."""

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a small tensor over the ranks; collective."""

    def largest_over_ranks(self, value: Tensor) -> Tensor:
        """Return the largest values of a small tensor over the ranks; collective."""


class CoOptimizer(GradientShards, Protocol):
    """Gradients and updates of its own, beside the model's optimizer; see :class:`~ddp_hooks.EmbeddingTables`."""

    def follow(self, optimizer: torch.optim.Optimizer) -> None: ...

    def yield_link_to(self, works: Sequence[Work]) -> None: ...

    def would_miss_step(self, optimizer: torch.optim.Optimizer) -> bool: ...

    def unscale(self, inverse_scale: float) -> bool: ...

    def found_nonfinite(self) -> bool: ...

    def on_grads_restored(self) -> None: ...

    def zero_grad(self) -> None: ...


# The module that a co-optimizer belongs to, and the optimizer that it follows.
_joined: weakref.WeakKeyDictionary[
    CoOptimizer, tuple[weakref.ref[nn.Module], weakref.ref[torch.optim.Optimizer] | None]
] = weakref.WeakKeyDictionary()


def join(co_optimizer: CoOptimizer, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Note that ``co_optimizer`` belongs to ``module`` and steps with ``optimizer``, in the place of earlier notes."""
    _joined[co_optimizer] = weakref.ref(module), weakref.ref(optimizer) if optimizer is not None else None


def leave(co_optimizer: CoOptimizer) -> None:
    _joined.pop(co_optimizer, None)


def would_leave_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if a table of the model that ``optimizer`` updates has gradients that nobody will apply."""
    return any(co_optimizer.would_miss_step(optimizer) for co_optimizer in list(_joined))


def co_optimizers_in(root: nn.Module) -> list[CoOptimizer]:
    modules = set(root.modules())
    return [co_optimizer for co_optimizer, (module, _) in _joined.items() if module() in modules]


def co_optimizers_of(optimizer: torch.optim.Optimizer) -> list[CoOptimizer]:
    return [
        co_optimizer
        for co_optimizer, (_, followed) in _joined.items()
        if followed is not None and followed() is optimizer
    ]
