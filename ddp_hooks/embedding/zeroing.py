"""Noticing that gradients were zeroed, by whatever call: tables' gradients are zeroed with the model's.

The ``zero_grad`` of optimizers, of the model and of DDP is extended; another wrapper's, or a loop over parameters, only
shows in what it leaves: a parameter that had a gradient and has none any more.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from ddp_hooks.feed import GradientGuard

_MAX_NUMEL = 1 << 16  # of a parameter whose values are looked at, which must not cost anything


class ZeroingWitness:
    """A dense parameter that has a gradient, and will not have one when gradients have been zeroed.

    Args:
        root: whose parameters are looked at.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._parameter: weakref.ref[Tensor] | None = None
        self._was_nonzero = False

    def watch(self) -> None:
        """A backward has ended: choose a parameter, a small one, whose gradient is not zero if there is such a one."""
        self._parameter, self._was_nonzero = None, False
        for parameter in sorted(self._root.parameters(), key=Tensor.numel):
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, GradientGuard):  # a hook looks after guarded ones
                continue
            if self._parameter is not None and parameter.numel() > _MAX_NUMEL:
                return
            self._parameter = weakref.ref(parameter)
            self._was_nonzero = parameter.numel() <= _MAX_NUMEL and _is_plain(gradient) and bool(gradient.any())
            if self._was_nonzero:
                return

    def saw_zeroing(self) -> bool:
        """Whether the parameter has lost its gradient; says so once."""
        parameter = self._parameter() if self._parameter is not None else None
        if parameter is None:
            return False
        gradient = parameter.grad
        if isinstance(gradient, GradientGuard):
            return False
        zeroed = gradient is None or (self._was_nonzero and _is_plain(gradient) and not bool(gradient.any()))
        if zeroed:
            self._parameter = None
        return zeroed


def _is_plain(gradient: Tensor) -> bool:
    """Whether looking at its values takes no other rank, and no device to be waited for."""
    return gradient.device.type == "cpu" and not hasattr(gradient, "full_tensor") and gradient.layout is torch.strided
