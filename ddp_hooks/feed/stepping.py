"""Hooks next to an optimizer's step, whoever else has registered some, and whenever.

A state's hooks change what the optimizer holds for the time of its step: gradients are withheld, or are those of
shards. Another hook that looked at them then would clip by a part of the norm, without a word. So ours run last before
the step and first after it: other hooks meet guards, which raise, and parameters that wait for their values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_hooks.comm import torch_compat


class _Pair(NamedTuple):
    """The two hooks of one call, by the ids of their handles."""

    before: int
    after: int
    shows: bool


_around: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[_Pair]] = weakref.WeakKeyDictionary()
_watching: list[RemovableHandle] = []  # the one hook of all optimizers' steps


def around_step(
    optimizer: torch.optim.Optimizer,
    before: Callable[..., Any],
    after: Callable[..., Any],
    *,
    shows: bool = False,
) -> list[RemovableHandle]:
    """Register step hooks next to the step, in the order of the calls where there are several.

    Args:
        optimizer: whose step it is.
        before: a step pre-hook; it runs after those of others.
        after: a step post-hook; it runs before those of others.
        shows: ``before`` leaves whole, reduced gradients, as plain DDP has them: it runs first instead, so that others
            see them.

    Returns:
        The handles, which remove the hooks.
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
    before, after = torch_compat.step_hooks(optimizer)
    pairs[:] = [pair for pair in pairs if pair.before in before or pair.after in after]  # others were removed
    first = [pair.before for pair in pairs if pair.shows]
    last = [pair.before for pair in pairs if not pair.shows]
    _put(before, [*first, *_others(before, [*first, *last]), *last])
    ours = [pair.after for pair in pairs]
    _put(after, [*ours, *_others(after, ours)])


def _others(hooks: dict[int, Any], ours: Sequence[int]) -> list[int]:
    return [key for key in hooks if key not in ours]


def _put(hooks: dict[int, Any], order: Sequence[int]) -> None:
    """Bring the hooks into this order; those that are not there any more are left out."""
    order = [key for key in order if key in hooks]
    if list(hooks) != order:
        for key in order:
            hooks[key] = hooks.pop(key)
