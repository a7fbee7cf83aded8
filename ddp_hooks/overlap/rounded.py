"""Parameters of which this rank has other ranks' ranges in 16 bits only, as ``torch.autocast`` would read them anyway.

They keep a waiting class (:mod:`~ddp_hooks.overlap.waiting`). Functions that read them only through autocast's casts
run at once, with the same bits. Any other read first gathers the owners' values, on all ranks together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ddp_hooks.comm import Work
from ddp_hooks.comm.torch_compat.autocast import casts_to, functions_are_overridden, reads_only_casts

_STEPS = 8  # the latest ones, of which half decide: a read costs what rounding saves in two steps


class Rounded:
    """Knowledge about rounded parameters, by number; :class:`~ddp_hooks.overlap.pipe.FeedPipe` asks it.

    ``gather_whole`` is called with a parameter that is read, or None, and submits gathers of the owners' values.
    """

    def __init__(
        self, dtype: torch.dtype, device_type: str, gather_whole: Callable[[int | None], Sequence[Work]]
    ) -> None:
        self.now: frozenset[int] = frozenset()  # those that are rounded, in flight or arrived
        self.is_tracing = False  # a forward notes how it reads parameters, and none shows its own class
        self.gather_whole = gather_whole
        self._dtype = dtype
        self._device_type = device_type
        self._cast: set[int] = set()  # those that the traced forward has read through casts
        self._otherwise: set[int] = set()  # those that it has read in other ways
        self._were_read: deque[bool] = deque(maxlen=_STEPS)  # with all their bits, per step since its launch
        self.count_anew()

    def function_casts(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if a function that is called now reads parameters only through casts to 16 bits."""
        return casts_to(self._device_type, self._dtype) and reads_only_casts(function, args, kwargs)

    def module_may_cast(self) -> bool:
        """Return True if a module that begins now shows by its functions how it reads its parameters."""
        return casts_to(self._device_type, self._dtype) and functions_are_overridden()

    def note(self, indices: Iterable[int], casts: bool) -> None:
        if self.is_tracing:
            (self._cast if casts else self._otherwise).update(indices)

    @property
    def candidates(self) -> set[int]:
        """Parameters that the traced forward has read, and only through casts."""
        return self._cast - self._otherwise

    def count_anew(self) -> None:
        """Forget reads: the last one may have been for a new layout."""
        self._were_read.extend([False] * _STEPS)

    def launched(self, rounded: Collection[int]) -> None:
        """Begin a step in which these parameters are rounded."""
        self._were_read.append(False)
        self.now = frozenset(rounded)

    def became_whole(self) -> list[int]:
        found, self.now = sorted(self.now), frozenset()
        self._were_read[-1] = True
        return found

    @property
    def is_in_vain(self) -> bool:
        """True if parameters were gathered whole after half of the latest steps; the same on every rank."""
        return 2 * sum(self._were_read) >= _STEPS
