"""Detection of zeroed gradients: tables' gradients are zeroed with the model's, by whatever call.

The ``zero_grad`` of optimizers, of the model and of DDP is extended. Another wrapper's ``zero_grad``, or a loop over
parameters, shows in its effect only: parameters had gradients, and none of them has one any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddp_hooks.comm.torch_compat.overrides import version_of
from ddp_hooks.intercept import GradientGuard, is_suspended

_MAX_NUMEL = 1 << 16  # elements of a gradient that are read, so that reading costs next to nothing


class ZeroGradDetector:
    """Watches one dense parameter of ``model()`` that has a gradient; when it has lost it, all parameters are asked."""

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        self._model = model
        self._parameter: weakref.ref[Tensor] | None = None
        self._was_nonzero = False
        self._guard: GradientGuard | None = None  # in place of the parameter's gradient
        self._version = 0  # of the gradient; counts changes in place
        self._before: Tensor | None = None  # on a device that nobody waits for: True if the gradient was not zero

    def watch(self) -> None:
        """Choose a small parameter with a gradient; all ranks choose alike, as gradients are reduced or guarded."""
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
            if self._guard is None and _is_local(gradient) and not _is_on_cpu(gradient):
                self._version = version_of(gradient)
                self._before = gradient.detach().reshape(-1)[:_MAX_NUMEL].any()
            if self._was_nonzero:
                return

    def was_zeroed(self) -> bool:
        """Return True, once, if the watched parameter has lost its gradient and no other parameter has one."""
        parameter = self._parameter() if self._parameter is not None else None
        if parameter is None:
            return False
        # Some loops drop the gradients of a few layers only.
        lost = self._has_lost(parameter)
        if not (lost and all(_is_gone(other, waits=True) for other in self._model().parameters())):
            return False
        self._parameter = None
        return True

    def _has_lost(self, parameter: Tensor) -> bool:
        if parameter.grad is None or not self._was_nonzero:  # zeros say nothing if it was zero before
            return parameter.grad is None and not is_suspended(parameter)
        if self._guard is not None:  # nobody knows the gradient behind it
            return self._guard.zeroed
        if self._before is None or isinstance(parameter.grad, GradientGuard):
            return _is_gone(parameter)
        # Read from a device only if something has changed.
        version = version_of(parameter.grad)
        if version == self._version or not bool(self._before):
            return False
        self._version = version
        return _is_gone(parameter, waits=True)


def _is_gone(parameter: Tensor, waits: bool = False) -> bool:
    """Return True if this rank sees no gradient, or zeros, which are read from devices only if it ``waits``."""
    gradient = parameter.grad
    if gradient is None:
        return not is_suspended(parameter)
    if isinstance(gradient, GradientGuard):
        return gradient.zeroed
    if not _is_local(gradient) or not (waits or _is_on_cpu(gradient)):
        return False
    return not bool(gradient.detach().reshape(-1)[:_MAX_NUMEL].any())


def _is_local(gradient: Tensor) -> bool:
    return not hasattr(gradient, "full_tensor") and gradient.layout is torch.strided


def _is_on_cpu(gradient: Tensor) -> bool:
    return gradient.device.type == "cpu"
