"""Questions about the values of settings, to which what is no number is a wrong answer, not an error of its own."""

from __future__ import annotations


def above(value: object, bound: float) -> bool:
    """Whether ``value`` is a number greater than ``bound``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > bound


def at_least(value: object, least: float) -> bool:
    """Whether ``value`` is a number not less than ``least``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= least
