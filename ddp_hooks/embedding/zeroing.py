"""Noticing that gradients were zeroed, by whatever call: tables' gradients are zeroed with the model's.

The ``zero_grad`` of optimizers, of the model and of DDP is extended; another wrapper's, or a loop over parameters, only
shows in what it leaves: parameters that had gradients, and none of which has one any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddp_hooks.intercept import GradientGuard, is_suspended

_MAX_NUMEL = 1 << 16  # numbers of a gradient that are looked at, which must not cost anything


class ZeroingWitness:
    """A dense parameter that has a gradient; when it has lost it, all the others are asked.

    Args:
        model: whose parameters are looked at, asked for each time.
    """

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        self._model = model
        self._parameter: weakref.ref[Tensor] | None = None
        self._was_nonzero = False
        self._guard: GradientGuard | None = None  # that a hook has put in its place
        self._version = 0  # of its gradient, which counts changes in place
        self._before: Tensor | None = None  # whether it was not zero, on a device that nobody waits for

    def watch(self) -> None:
        """Gradients are as they are to be: choose a parameter, a small one, whose gradient is not zero if one is.

        All ranks see the same: gradients are reduced, or behind guards.
        """
        self._parameter, self._was_nonzero, self._guard, self._before = None, False, None, None
        for parameter in sorted(self._model().parameters(), key=Tensor.numel):
            gradient = parameter.grad
            if gradient is None:
                continue
            if self._parameter is not None and parameter.numel() > _MAX_NUMEL:
                return
            self._parameter = weakref.ref(parameter)
            self._guard = gradient if isinstance(gradient, GradientGuard) else None
            self._was_nonzero = not _is_gone(parameter)
            if self._guard is None and _is_plain(gradient) and not _is_at_hand(gradient):
                self._version, self._before = gradient._version, gradient.detach().reshape(-1)[:_MAX_NUMEL].any()
            if self._was_nonzero:
                return

    def saw_zeroing(self) -> bool:
        """Whether the parameter has lost its gradient, and no other one has any; says so once."""
        parameter = self._parameter() if self._parameter is not None else None
        if parameter is None:
            return False
        # Some loops drop gradients of a few layers, which is not the same: ask the witness first, then all.
        lost = self._has_lost(parameter)
        if not (lost and all(_is_gone(other, waits=True) for other in self._model().parameters())):
            return False
        self._parameter = None
        return True

    def _has_lost(self, parameter: Tensor) -> bool:
        if parameter.grad is None or not self._was_nonzero:  # else zeros say nothing
            return parameter.grad is None and not is_suspended(parameter)
        if self._guard is not None:  # nobody knows what was behind it
            return self._guard.zeroed
        if self._before is None or isinstance(parameter.grad, GradientGuard):
            return _is_gone(parameter)
        # Nobody waits for a device only to see that nothing has changed.
        version = parameter.grad._version
        if version == self._version or not bool(self._before):
            return False
        self._version = version
        return _is_gone(parameter, waits=True)


def _is_gone(parameter: Tensor, waits: bool = False) -> bool:
    """Whether it has no gradient, or zeros, as far as that can be seen without another rank.

    Args:
        waits: look also where that means to wait for a device; otherwise what is there does not count as zeros.
    """
    gradient = parameter.grad
    if gradient is None:
        return not is_suspended(parameter)
    if isinstance(gradient, GradientGuard):
        return gradient.zeroed
    if not _is_plain(gradient) or not (waits or _is_at_hand(gradient)):
        return False
    return not bool(gradient.detach().reshape(-1)[:_MAX_NUMEL].any())


def _is_plain(gradient: Tensor) -> bool:
    """Whether reading it takes no other rank."""
    return not hasattr(gradient, "full_tensor") and gradient.layout is torch.strided


def _is_at_hand(gradient: Tensor) -> bool:
    """Whether to read it costs next to nothing."""
    return gradient.device.type == "cpu"
