"""Guards that make room while an optimizer's own code runs, which passes parameters without gradients by.

Whoever looks at ``.grad`` meanwhile finds none: :func:`is_aside` tells such a gradient from one that was zeroed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ddp_hooks.feed.guard import GradientGuard

_of: dict[int, weakref.ref[GuardsAside]] = {}  # by id, because tensors do not compare as keys have to


def is_aside(parameter: Tensor) -> bool:
    """Whether the parameter has no gradient only because a hook has put its guard aside, for the time of a step."""
    reference = _of.get(id(parameter))
    guards = reference() if reference is not None else None
    return guards is not None and guards.holds(parameter)


def _forget(ids: Iterable[int], gone: weakref.ref[GuardsAside]) -> None:
    for key in ids:
        if _of.get(key) is gone:
            del _of[key]


class GuardsAside:
    """Of one optimizer's parameters, from a step's begin to its end.

    Args:
        parameters: in a fixed order.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._guards: dict[int, GradientGuard] = {}
        _of.update(dict.fromkeys(self._index_of, weakref.ref(self, partial(_forget, tuple(self._index_of)))))

    def __bool__(self) -> bool:
        return bool(self._guards)

    def holds(self, parameter: Tensor) -> bool:
        """Whether the guard of this parameter is here."""
        return bool(self._guards) and self._index_of.get(id(parameter)) in self._guards

    def take(self, indices: Iterable[int]) -> None:
        """Put the guards of these parameters aside."""
        for index in indices:
            parameter = self._parameters[index]
            self._guards[index] = cast(GradientGuard, parameter.grad)
            parameter.grad = None

    def put_back(self, consumed: Iterable[int] = ()) -> None:
        """Put guards back where they were, but for parameters whose gradients the optimizer's code has taken away.

        Args:
            consumed: parameters that the optimizer's code has seen with their gradients.
        """
        taken = {index for index in consumed if self._parameters[index].grad is None}
        guards = self._forget()
        for index, guard in guards.items():
            if index not in taken:
                self._parameters[index].grad = guard

    def zero(self, set_to_none: bool) -> None:
        """``zero_grad()`` inside of the step, from another hook of the optimizer, means what guards stand for."""
        for guard in self._guards.values():
            guard.zeroed = True
        if set_to_none:
            self._forget()

    def _forget(self) -> dict[int, GradientGuard]:
        guards, self._guards = self._guards, {}
        return guards
