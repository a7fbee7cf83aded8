"""A stand-in for gradients that nobody may read.

Between backward and step the model's ``.grad`` may be neither local nor reduced: DDP's bucket holds partial sums, or
what is still on its way. A guard takes its place, raises on any use, and remembers being zeroed, so that ``zero_grad``
keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ddp_hooks.comm import see, torch_compat

# What may be asked of a gradient without touching its values.
METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "is_sparse", "grad_fn")]
    + [getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "ndim", "is_cuda", "is_meta")]
    + [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_complex, torch.is_complex]
    + [Tensor.is_floating_point, torch.is_floating_point, Tensor.requires_grad_, Tensor.detach_]
)
_ZEROING: frozenset[Any] = frozenset([Tensor.zero_, torch.zero_, torch._foreach_zero_])
# What module.to(), .cpu(), .float(), .share_memory() and .to_empty() call for every gradient.
_CONVERSIONS: frozenset[Any] = frozenset(
    [
        *(Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
        *(Tensor.share_memory_, torch.empty_like),
    ]
)

ONE_BACKWARD = (
    "run one backward for each forward through ddp(...), with the sum of the losses: the last one came for the second "
    "time through one forward (retain_graph=True), or as the second after two forwards, or its forward was called by "
    "ddp.module(...) or ddp.forward(...), or it came from parameters alone, as a penalty does"
)
"""Causes of a backward that DDP's hooks do not see, after what to do."""

clipping_of_frameworks: dict[str, str] = {}
"""How the loops clip that a state was attached to, by the framework's name; part of what guards advise."""


class GradientGuard(Tensor):
    """A tensor of the right shape, dtype and device, but without memory; any use raises.

    Metadata may be read. ``zero_()`` sets :attr:`zeroed`: the owner of the gradient then treats it as zeros. A
    conversion to another device or dtype, as ``module.to()`` makes of every gradient, gives a guard there.
    """

    owner: str  # the parameter's name
    explain: Callable[[str], str]  # of a function's name: what to do instead, and why it may not be called
    zeroed: bool

    @staticmethod
    def standing_for(parameter: Tensor, name: str, explain: Callable[[str], str]) -> GradientGuard:
        """A guard with the shape, dtype and device of ``parameter``."""
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
        if func in METADATA or torch_compat.compiler_looks():
            return super().__torch_function__(func, types, args, kwargs or {})
        guards = list(_guards_in(args)) + list(_guards_in((kwargs or {}).values()))
        if func in _ZEROING:
            for guard in guards:
                guard.zeroed = True
            plain = [g for g in _tensors_in(args) if not isinstance(g, GradientGuard)]
            for tensor in plain:
                tensor.zero_()
            return args[0] if args else None
        if func in _CONVERSIONS and guards and args[0] is guards[0]:
            return guards[0]._converted(func, args[1:], kwargs or {})
        if func in torch_compat.DATA_MAY_BE_SET:
            return False  # module.to() then sets .grad in the place of .grad.data
        what = getattr(func, "__name__", str(func))
        if not guards:
            raise RuntimeError(
                f"{what}() met a gradient that may not be used between backward and step{see('gradients-are-guarded')}"
            )
        raise RuntimeError(
            f"{what}() met the gradient of {guards[0].owner}. {guards[0].explain(what)}{see('gradients-are-guarded')}"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only what does not ask __torch_function__ comes here: autograd, which adds to a gradient.
        if torch_compat.in_backward():
            owner = next((guard.owner for guard in _guards_in(args)), "a parameter")
            raise RuntimeError(
                f"a backward adds to the gradient of {owner}, which an earlier one has reduced: {ONE_BACKWARD}"
                f"{see('late-gradients')}"
            )
        if torch_compat.ddp_prepares_forward():  # with its hooks, guards would have made room
            refuse_unhooked_forward()
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def _converted(self, convert: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A guard of the dtype and on the device that ``convert`` gives a tensor of this one's; itself if they stay."""
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        like = torch.zeros((), dtype=self.dtype, device=self.device)
        result = convert(like, *args, **kwargs)
        if not isinstance(result, Tensor) or (result.dtype == self.dtype and result.device == self.device):
            return self if isinstance(result, Tensor) else result
        guard = GradientGuard.standing_for(result.expand(self.shape), self.owner, self.explain)
        guard.zeroed = self.zeroed
        return guard

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientGuard({self.owner})"


def refuse_unhooked_forward() -> NoReturn:
    """Raise, because a forward goes around DDP's hooks."""
    raise RuntimeError(
        "call ddp(...), not ddp.forward(...), which goes around the hooks of the DDP module: without them the "
        "gradients of one backward are not kept apart from those of the next, and parameters are read before they "
        f"have arrived{see('late-gradients')}"
    )


def _tensors_in(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _guards_in(values: Iterable[Any]) -> Iterable[GradientGuard]:
    return (tensor for tensor in _tensors_in(values) if isinstance(tensor, GradientGuard))
