"""Results of plain runs, which many cases compare with: made once in each process of a pool."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_made: dict[bytes, Any] = {}


def kept(make: Callable[[], _T], *key: Any) -> _T:
    """What ``make()`` returns, made once for each key; to be read only.

    Args:
        make: may be collective: all ranks ask with the same keys.
        key: all that the result depends on. What does not pickle, as a function inside of another, is made each time.
    """
    try:
        name = pickle.dumps(key)
    except (AttributeError, TypeError, pickle.PicklingError):
        return make()
    if name not in _made:
        _made[name] = make()
    result: _T = _made[name]
    return result
