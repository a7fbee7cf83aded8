"""Optimizers: which ones update element by element, and hooks around ``step()`` and ``zero_grad()``.

A state's hooks change what the optimizer holds during its step: gradients are withheld, or are those of shards. Another
hook that read them then would clip by a part of the norm, without a word. So ours run last before the step and first
after it: other hooks meet guards, which raise, and parameters that wait for their values.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle as HookHandle

from ddp_hooks.comm.torch_compat import RemovableHandle
from ddp_hooks.comm.torch_compat.optimizer import calls_hooks, step_hooks
from ddp_hooks.comm.torch_compat.overrides import without_overrides

# Optimizers whose update of an element looks at no other element.
ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam,
    optim.RAdam, optim.RMSprop, optim.Rprop,
)  # fmt: skip

# Optimizers whose update of a parameter looks at no other parameter.
PARAMETERWISE = (*ELEMENTWISE, optim.Adafactor, optim.Muon)


def find_problem_of_hooks(optimizer: torch.optim.Optimizer) -> str | None:
    if calls_hooks(optimizer):
        return None
    kind = type(optimizer).__name__
    return (
        f"{kind} does not run the constructor of torch.optim.Optimizer, so its step() calls no hooks: call "
        f"super().__init__(params, defaults) in {kind}.__init__, or take another optimizer. If it wraps one, as "
        f"Accelerate does, pass the inner one, unless {kind} changes parameters itself, as Lookahead does"
    )


class _Pair(NamedTuple):
    """Two hooks of one :func:`around_step`, by the ids of their handles."""

    before: int
    after: int
    shows: bool


_around: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Pair]] = weakref.WeakKeyDictionary()
_watching: list[HookHandle] = []  # one hook for all optimizers


def around_step(
    optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any], *, shows: bool = False
) -> list[HookHandle]:
    """Register hooks next to the step; several pairs run in the order of registration.

    ``shows``: ``before`` makes whole, reduced gradients, as plain DDP has them; it runs first, so that others see them.
    """
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_arrange))  # runs before each step's own hooks are listed
    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    _around.setdefault(optimizer, []).append(_Pair(handles[0].id, handles[1].id, shows))
    return handles


def _arrange(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    pairs = _around.get(optimizer)
    if pairs is None:
        return
    before, after = step_hooks(optimizer)
    pairs[:] = [pair for pair in pairs if pair.before in before or pair.after in after]  # others were removed
    shown = [pair.before for pair in pairs if pair.shows]
    _arrange_hooks(before, shown, [pair.before for pair in pairs if not pair.shows])
    _arrange_hooks(after, [pair.after for pair in pairs], [])


def _arrange_hooks(hooks: dict[int, Any], first: Sequence[int], last: Sequence[int]) -> None:
    """Sort hooks: those of ``first``, all others, and those of ``last``; some of ours may have been removed."""
    others = [key for key in hooks if key not in first and key not in last]
    order = [key for key in (*first, *others, *last) if key in hooks]
    if list(hooks) != order:
        for key in order:
            hooks[key] = hooks.pop(key)


def when_step_fails(optimizer: torch.optim.Optimizer, restore: Callable[[], None]) -> RemovableHandle:
    """Call ``restore()`` before an exception leaves ``optimizer.step()``, when post-hooks do not run."""
    original = optimizer.step

    @functools.wraps(getattr(original, "__func__", original))  # with the mark by which schedulers know their wrapper
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException:
            restore()
            raise

    return _wrap_method(optimizer, "step", step)


def extend_zero_grad(owner: torch.optim.Optimizer | torch.nn.Module, also: Callable[[bool], None]) -> RemovableHandle:
    """Call ``also(set_to_none)`` before every ``owner.zero_grad(set_to_none)``, for which torch has no hook."""
    original = owner.zero_grad

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        also(set_to_none)
        # Removing gradients touches no value: no parameter in flight, and no guard, has to be asked one by one.
        with without_overrides() if set_to_none else nullcontext():
            original(set_to_none=set_to_none)

    return _wrap_method(owner, "zero_grad", zero_grad)


def _wrap_method(owner: Any, name: str, wrapper: Any) -> RemovableHandle:
    """Make ``wrapper`` a method of the instance, as torch's schedulers do; the handle puts the former one back.

    Whoever keeps the handle does not keep the owner.
    """
    wrapper.former = vars(owner).get(name)  # None: the method of its class
    setattr(owner, name, types.MethodType(wrapper, owner))
    wrapped, ours = weakref.ref(owner), weakref.ref(wrapper)

    def undo() -> None:
        owner = wrapped()
        method = vars(owner).get(name) if owner is not None else None
        if method is None or getattr(method, "__func__", method) is not ours():
            return  # somebody has wrapped ours meanwhile; it does no harm
        if method.former is not None:
            setattr(owner, name, method.former)
        else:
            delattr(owner, name)

    return RemovableHandle(undo)
