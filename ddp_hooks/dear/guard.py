"""A stand-in for gradients that nobody may read.

Between backward and step the model's ``.grad`` is neither local nor reduced: DDP's bucket holds partial sums. A guard
takes its place, raises on any use, and remembers being zeroed, so that ``zero_grad`` keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import compat

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
    zeroed: bool

    @staticmethod
    def standing_for(parameter: Tensor, name: str) -> GradientGuard:
        """A guard with the shape, dtype and device of ``parameter``."""
        # Zero strides: an accumulation by autograd, which does not ask __torch_function__, fails as well.
        blank = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        guard = blank.as_subclass(GradientGuard)
        guard.owner = name
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
        owner = guards[0].owner if guards else "a parameter"
        what = getattr(func, "__name__", str(func))
        raise RuntimeError(
            f"{what}() met the gradient of {owner}, which DearState holds in shards: between backward and step it is "
            f"neither local nor reduced here. {_advice(what)}"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientGuard({self.owner}: its gradient is held in shards by DearState)"


def _advice(what: str) -> str:
    if "non_finite_check" in what:
        return (
            "torch.amp.GradScaler looks for overflows on one rank alone, so ranks would part: use ddp_hooks.GradScaler "
            "in its place, or bfloat16 autocast, which needs none."
        )
    return (
        "To clip, call state.clip_grad_norm_(max_norm) or state.clip_grad_value_(clip_value), or set "
        "DearConfig(max_grad_norm=...). To read or change gradients, use `with state.reduced_gradients() as shards:`, "
        "which gives this rank's reduced shard of each parameter."
    )


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _guards_in(values: Iterable[Any]) -> Iterable[GradientGuard]:
    return (tensor for tensor in _tensors_in(values) if isinstance(tensor, GradientGuard))
