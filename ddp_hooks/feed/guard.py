"""A stand-in for gradients that nobody may read.

Between backward and step the model's ``.grad`` may be neither local nor reduced: DDP's bucket holds partial sums, or
what is still on its way. A guard takes its place, raises on any use, and remembers being zeroed, so that ``zero_grad``
keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import compat, see

# What may be asked of a gradient without touching its values.
METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "is_sparse", "grad_fn")]
    + [getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "ndim", "is_cuda", "is_meta")]
    + [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_complex, torch.is_complex]
    + [Tensor.requires_grad_, Tensor.detach_]
)
_ZEROING: frozenset[Any] = frozenset([Tensor.zero_, torch.zero_, torch._foreach_zero_])


class GradientGuard(Tensor):
    """A tensor of the right shape, dtype and device, but without memory; any use raises.

    Metadata may be read. ``zero_()`` sets :attr:`zeroed`: the owner of the gradient then treats it as zeros.
    """

    owner: str  # the parameter's name
    explain: Callable[[str], str]  # of a function's name: why it may not be called, and what to do instead
    zeroed: bool

    @staticmethod
    def standing_for(parameter: Tensor, name: str, explain: Callable[[str], str]) -> GradientGuard:
        """A guard with the shape, dtype and device of ``parameter``."""
        # Zero strides: an accumulation by autograd, which does not ask __torch_function__, fails as well.
        blank = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        guard = blank.as_subclass(GradientGuard)
        guard.owner = name
        guard.explain = explain
        guard.zeroed = False
        return guard

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in METADATA or compat.compiler_looks():
            return super().__torch_function__(func, types, args, kwargs or {})
        guards = list(_guards_in(args)) + list(_guards_in((kwargs or {}).values()))
        if func in _ZEROING:
            for guard in guards:
                guard.zeroed = True
            plain = [g for g in _tensors_in(args) if not isinstance(g, GradientGuard)]
            for tensor in plain:
                tensor.zero_()
            return args[0] if args else None
        what = getattr(func, "__name__", str(func))
        if not guards:
            raise RuntimeError(
                f"{what}() met a gradient that may not be used between backward and step{see('gradients-are-guarded')}"
            )
        raise RuntimeError(
            f"{what}() met the gradient of {guards[0].owner}, {guards[0].explain(what)}{see('gradients-are-guarded')}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientGuard({self.owner}, {self.explain('repr').split('.')[0]})"


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _guards_in(values: Iterable[Any]) -> Iterable[GradientGuard]:
    return (tensor for tensor in _tensors_in(values) if isinstance(tensor, GradientGuard))
