"""Methods of one instance with other code around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any


class ExtendedMethod:
    """A method of one instance that runs other code; copies and pickles of the instance get the method of its class.

    Args:
        instance: the one whose method it is.
        name: of the method.
        function: is called with the method as it was, and with the arguments of the call.
    """

    def __init__(self, instance: object, name: str, function: Callable[..., Any]) -> None:
        self._instance, self._name, self._function = instance, name, function
        self._original = getattr(instance, name)
        update_wrapper(self, self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._original, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._instance, self._name)
