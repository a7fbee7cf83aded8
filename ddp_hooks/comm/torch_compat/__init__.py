"""Private and version-dependent names of torch 2.11 to 2.14; no other module of ``ddp_hooks`` uses any.

There is no public name for what a function does, unless it says so. A frame of torch's code is recognised by the names
of its module and function, where torch has no way to ask. FSDP2's private names are in :mod:`fsdp_ext.compat`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType


def frames_of(module: str, *functions: str) -> Iterator[FrameType]:
    """Yield the frames of ``functions`` of a module, or of all its functions if none is named; innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module and (not functions or frame.f_code.co_name in functions):
            yield frame
        frame = frame.f_back


def is_inside(module: str, *functions: str) -> bool:
    """Return True if one of these functions has called what runs."""
    return next(frames_of(module, *functions), None) is not None


@dataclass(frozen=True)
class RemovableHandle:
    """Handle whose ``remove()`` runs a function, like torch's, of a hook that torch has no hook for."""

    remove: Callable[[], None]
