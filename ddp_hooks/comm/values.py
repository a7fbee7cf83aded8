"""Questions about the values of settings, to which what is no number is a wrong answer, not an error of its own."""

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


def message_size(value: object) -> bool:
    """Whether ``value`` is a size of messages in MiB: finite, and at least 1 KiB (smaller ones take for ever)."""
    return positive(value) and at_least(value, 1 / 1024)
