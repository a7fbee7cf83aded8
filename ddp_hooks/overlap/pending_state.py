"""``optimizer.state`` while updates are pending: readers wait for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


class PendingState(defaultdict[Any, Any]):
    """State of an optimizer that calls ``wait`` before every use; copies and pickles as a plain one.

    Args:
        state: the entries.
        wait: returns when every update has run.
    """

    def __init__(self, state: dict[Any, Any], wait: Callable[[], None]) -> None:
        super().__init__(dict, state)
        self._wait = wait

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def _waiting(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    def wait_and_call(self: PendingState, *args: Any, **kwargs: Any) -> Any:
        wait = self.__dict__.get("_wait")
        if wait is not None:
            wait()
        return method(self, *args, **kwargs)

    return wait_and_call


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__"),
    *("get", "items", "keys", "values", "pop", "popitem", "clear", "setdefault", "update", "copy"),
):
    setattr(PendingState, _name, _waiting(_name))


def let_state_wait(optimizer: torch.optim.Optimizer, wait: Callable[[], None]) -> None:
    """Put a :class:`PendingState` in the place of ``optimizer.state``, unless there is one."""
    if not isinstance(optimizer.state, PendingState):
        optimizer.state = PendingState(optimizer.state, wait)
