"""The call stack of this thread, for code of torch that has no way to ask who called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
