"""Guards in the place of gradients that nobody may read.

Between backward and step the model's ``.grad`` is neither local nor reduced: DDP's bucket holds partial sums, or data
still on its way. A guard takes its place, raises on any use, and remembers being zeroed, so that ``zero_grad`` keeps
its meaning. During ``optimizer.step()`` guards are suspended, because optimizers skip parameters whose ``.grad`` is
None.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor

from ddp_hooks.comm import see
from ddp_hooks.comm.torch_compat.autograd import in_backward
from ddp_hooks.comm.torch_compat.compiler import compiler_looks
from ddp_hooks.comm.torch_compat.ddp import ddp_prepares_forward
from ddp_hooks.comm.torch_compat.overrides import DATA_MAY_BE_SET, FOREACH_ZERO

# Functions that read no value of a gradient.
METADATA: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "is_sparse", "grad_fn")]
    + [getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "ndim", "is_cuda", "is_meta")]
    + [Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_complex, torch.is_complex]
    + [Tensor.is_floating_point, torch.is_floating_point, Tensor.requires_grad_, Tensor.detach_]
)
_ZEROING: frozenset[Any] = frozenset([Tensor.zero_, torch.zero_, FOREACH_ZERO])
# Functions that module.to(), .cpu(), .float(), .share_memory() and .to_empty() call for every gradient.
_CONVERSIONS: frozenset[Any] = frozenset(
    [
        *(Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.type, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
        *(Tensor.share_memory_, torch.empty_like),
    ]
)

ONE_BACKWARD = (  # where a backward goes around DDP's hooks
    "run one backward for each forward through ddp(...), with the sum of the losses: the last one came for the second "
    "time through one forward (retain_graph=True), or as the second after two forwards, or its forward was called by "
    "ddp.module(...) or ddp.forward(...), or it came from parameters alone, as a penalty does"
)

clipping_of_frameworks: dict[str, str] = {}  # clipping calls of the frameworks in use, which guards advise


class GradientGuard(Tensor):
    """Tensor of the right shape, dtype and device, but without memory; any use but of its metadata raises.

    ``zero_()`` sets ``zeroed``: the owner of the gradient then treats it as zeros.
    """

    owner: str  # the parameter's name
    explain: Callable[[str], str]  # name of a function -> remedy, and why it may not be called
    zeroed: bool

    @staticmethod
    def standing_for(parameter: Tensor, name: str, explain: Callable[[str], str]) -> GradientGuard:
        blank = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        guard = blank.as_subclass(GradientGuard)
        guard.owner = name
        guard.explain = explain
        guard.zeroed = False
        return guard

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA or compiler_looks():
            return super().__torch_function__(func, types, args, kwargs or {})
        tensors = list(_tensors_in((*args, *(kwargs or {}).values())))
        guards = [tensor for tensor in tensors if isinstance(tensor, GradientGuard)]
        if func in _ZEROING:
            for guard in guards:
                guard.zeroed = True
            for tensor in tensors:
                if not isinstance(tensor, GradientGuard):
                    tensor.zero_()
            return args[0] if args else None
        if func in _CONVERSIONS and guards and args[0] is guards[0]:
            return guards[0]._converted(func, args[1:], kwargs or {})
        if func in DATA_MAY_BE_SET:
            return False  # module.to() then sets .grad in the place of .grad.data
        what = getattr(func, "__name__", str(func))
        met = "a gradient that may not be used between backward and step"
        if guards:
            met = f"the gradient of {guards[0].owner}. {guards[0].explain(what)}"
        raise RuntimeError(f"{what}() met {met}{see('gradients-are-guarded')}")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only code that does not ask __torch_function__ comes here: autograd, which adds to a gradient.
        if in_backward():
            owner = next((met.owner for met in _tensors_in(args) if isinstance(met, GradientGuard)), "a parameter")
            raise RuntimeError(
                f"a backward adds to the gradient of {owner}, which an earlier one has reduced: {ONE_BACKWARD}"
                f"{see('late-gradients')}"
            )
        if ddp_prepares_forward():  # with its hooks, guards would have made room
            refuse_unhooked_forward()
        return super().__torch_dispatch__(func, types, args, kwargs or {})

    def _converted(self, convert: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return a guard of the dtype and device that ``convert`` gives such a tensor; this guard if both stay."""
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
        like = torch.zeros((), dtype=self.dtype, device=self.device)
        result = convert(like, *args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if result.dtype == self.dtype and result.device == self.device:
            return self
        guard = GradientGuard.standing_for(result.expand(self.shape), self.owner, self.explain)
        guard.zeroed = self.zeroed
        return guard

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradientGuard({self.owner})"


def refuse_unhooked_forward() -> NoReturn:
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


class SuspendedGuards:
    """Guards that are removed during ``optimizer.step()``; readers of ``.grad`` find None meanwhile."""

    known: ClassVar[weakref.WeakSet[SuspendedGuards]] = weakref.WeakSet()

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._guards: dict[int, GradientGuard] = {}
        self.known.add(self)

    def __bool__(self) -> bool:
        return bool(self._guards)

    def holds(self, parameter: Tensor) -> bool:
        return bool(self._guards) and self._index_of.get(id(parameter)) in self._guards

    def take(self, indices: Iterable[int]) -> None:
        for index in indices:
            parameter = self._parameters[index]
            self._guards[index] = cast(GradientGuard, parameter.grad)
            parameter.grad = None

    def put_back(self, consumed: Iterable[int] = ()) -> None:
        """Restore the guards, except where the optimizer's code has seen (``consumed``) and removed the gradient."""
        taken = {index for index in consumed if self._parameters[index].grad is None}
        guards = self._forget()
        for index, guard in guards.items():
            if index not in taken:
                self._parameters[index].grad = guard

    def zero(self, set_to_none: bool) -> None:
        """Apply a ``zero_grad()`` that another hook of the optimizer has called inside of the step."""
        for guard in self._guards.values():
            guard.zeroed = True
        if set_to_none:
            self._forget()

    def _forget(self) -> dict[int, GradientGuard]:
        guards, self._guards = self._guards, {}
        return guards


def is_suspended(parameter: Tensor) -> bool:
    """Return True if the parameter has no gradient because a hook has suspended its guard during a step."""
    return any(guards.holds(parameter) for guards in list(SuspendedGuards.known))
