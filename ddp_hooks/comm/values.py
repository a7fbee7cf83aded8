"""What values of settings are right; what is no number is a wrong one, not an error of its own."""

from __future__ import annotations

import math


def above(value: object, bound: float) -> bool:
    """Whether ``value`` is a number greater than ``bound``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > bound


def at_least(value: object, least: float) -> bool:
    """Whether ``value`` is a number not less than ``least``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= least


def positive(value: object) -> bool:
    """Whether ``value`` is a finite number greater than 0."""
    return above(value, 0) and value != math.inf


def whole(value: object, least: int) -> bool:
    """Whether ``value`` is a whole number, as an int, not less than ``least``."""
    return isinstance(value, int) and at_least(value, least)


def check_timeout(timeout_s: object) -> None:
    """Raise a ValueError if that is no limit of waits, in seconds."""
    if not positive(timeout_s):
        raise ValueError(f"timeout_s must be > 0 and finite, got {timeout_s!r}")


def check_slice(slice_mb: object) -> None:
    """Raise a ValueError if that is no largest message of rings, in MiB: those of less than 1 KiB take for ever."""
    if slice_mb is not None and not (positive(slice_mb) and at_least(slice_mb, 1 / 1024)):
        raise ValueError(f"slice_mb must be None, or >= 1/1024 (1 KiB) and finite, got {slice_mb!r}")
