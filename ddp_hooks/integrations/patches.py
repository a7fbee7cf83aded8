"""Attributes and methods of one instance, replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any


@contextmanager
def replaced(target: object, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an instance; its former value, or that of its class, returns at the end."""
    own = name in vars(target)
    before = vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if own:
            setattr(target, name, before)
        else:
            delattr(target, name)


class ExtendedMethod:
    """Method of one instance that calls ``function(former method, *args, **kwargs)``.

    Copies and pickles of the instance get the method of its class.
    """

    def __init__(self, instance: object, name: str, function: Callable[..., Any]) -> None:
        self._instance, self._name, self._function = instance, name, function
        self._original = getattr(instance, name)
        update_wrapper(self, self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._original, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._instance, self._name)
