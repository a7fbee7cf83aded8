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
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle as HookHandle

from ddp_hooks.comm.torch_compat.handles import RemovableHandle
from ddp_hooks.comm.torch_compat.optimizer import calls_hooks, step_hooks
from ddp_hooks.comm.torch_compat.overrides import without_overrides

# Optimizers whose update of an element looks at no other element.
ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    )
)  # fmt: skip

# Optimizers whose update of a parameter looks at no other parameter.
PARAMETERWISE = ELEMENTWISE + tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)


def find_problem_of_hooks(optimizer: torch.optim.Optimizer) -> str | None:
    """Return why an optimizer would never call hooks, with a remedy; None if it calls them."""
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
    optimizer: torch.optim.Optimizer,
    before: Callable[..., Any],
    after: Callable[..., Any],
    *,
    shows: bool = False,
) -> list[HookHandle]:
    """Register hooks next to the step; several pairs run in the order of registration.

    Args:
        optimizer: its step.
        before: step pre-hook; it runs after all others.
        after: step post-hook; it runs before all others.
        shows: ``before`` makes whole, reduced gradients, as plain DDP has them; it runs first, so that others see them.

    Returns:
        Handles that remove the hooks.
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
    first = [pair.before for pair in pairs if pair.shows]
    last = [pair.before for pair in pairs if not pair.shows]
    _put(before, [*first, *_others(before, [*first, *last]), *last])
    ours = [pair.after for pair in pairs]
    _put(after, [*ours, *_others(after, ours)])


def _others(hooks: dict[int, Any], ours: Sequence[int]) -> list[int]:
    return [key for key in hooks if key not in ours]


def _put(hooks: dict[int, Any], order: Sequence[int]) -> None:
    """Sort the hooks into this order, without those that were removed."""
    order = [key for key in order if key in hooks]
    if list(hooks) != order:
        for key in order:
            hooks[key] = hooks.pop(key)


def when_step_fails(optimizer: torch.optim.Optimizer, restore: Callable[[], None]) -> RemovableHandle:
    """Call ``restore()`` before an exception leaves ``optimizer.step()``, when post-hooks do not run."""
    # torch's own schedulers wrap step() on the instance in the same way, and unwrap a bound method.
    original = optimizer.step
    was_wrapped = "step" in vars(optimizer)

    @functools.wraps(getattr(original, "__func__", original))  # with the mark by which schedulers know their wrapper
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except BaseException:
            restore()
            raise

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    wrapped, ours = weakref.ref(optimizer), weakref.ref(step)

    def undo() -> None:
        optimizer = wrapped()
        present = vars(optimizer).get("step") if optimizer is not None else None
        if optimizer is None or ours() is None or getattr(present, "__func__", None) is not ours():
            return  # somebody has wrapped ours meanwhile; it does no harm
        if was_wrapped:
            optimizer.step = original  # type: ignore[method-assign]
        else:
            del optimizer.step

    return RemovableHandle(undo)


def extend_zero_grad(
    owner: torch.optim.Optimizer | torch.nn.Module, also: Callable[[bool], None]
) -> RemovableHandle:
    """Call ``also(set_to_none)`` before every ``owner.zero_grad(set_to_none)``, for which torch has no hook."""
    # torch's own schedulers wrap step() on the instance in the same way.
    original = owner.zero_grad
    extended_before = "zero_grad" in vars(owner)

    def zero_grad(set_to_none: bool = True) -> None:
        also(set_to_none)
        # Removing gradients touches no value: no parameter in flight, and no guard, has to be asked one by one.
        with without_overrides() if set_to_none else nullcontext():
            original(set_to_none=set_to_none)

    zero_grad.__wrapped__ = original  # type: ignore[attr-defined]
    owner.zero_grad = zero_grad  # type: ignore[method-assign]
    extended, ours = weakref.ref(owner), weakref.ref(zero_grad)  # whoever keeps the handle does not keep the model

    def undo() -> None:
        owner = extended()
        if owner is None or vars(owner).get("zero_grad") is not ours():
            return  # somebody has extended ours meanwhile; it does no harm
        if extended_before:
            owner.zero_grad = vars(owner)["zero_grad"].__wrapped__  # type: ignore[method-assign]
        else:
            del owner.zero_grad

    return RemovableHandle(undo)
