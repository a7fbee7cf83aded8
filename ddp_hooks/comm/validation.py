"""What users get wrong: validators of settings, and links from errors to the documentation.

A setting is refused where the combination cannot do what the setting promises. A dataclass cannot tell a default from
the same value that was given. So a setting that others can switch off has a default that promises nothing: None, or
the behaviour without it. A value of the wrong type is invalid, not a TypeError.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

_PAGE = "docs/troubleshooting.md"


def see(anchor: str, quoted: object = None) -> str:
    """Return the end of an error's message: ``" (see docs/troubleshooting.md#anchor)"``, the section that explains it.

    Return nothing if another error, ``quoted`` at the end of the message, names a section itself.
    """
    return "" if f"(see {_PAGE}#" in str(quoted) else f" (see {_PAGE}#{anchor})"


def wrong_state(hook: str, made_by: str, found: object) -> TypeError:
    """Return the error of ``hook`` with ``found`` in place of the state that the expression ``made_by`` makes."""
    return TypeError(
        f"{hook} got {type(found).__name__} as its state: call ddp.register_comm_hook({made_by}, {hook})"
        f"{see('gradients-were-not-reduced')}"
    )


def above(value: object, bound: float) -> bool:
    """Return True if ``value`` is a number greater than ``bound``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > bound


def at_least(value: object, least: float) -> bool:
    """Return True if ``value`` is a number >= ``least``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= least


def positive(value: object) -> bool:
    """Return True if ``value`` is a finite number greater than 0."""
    return above(value, 0) and value != math.inf


def whole(value: object, least: int) -> bool:
    """Return True if ``value`` is an int >= ``least``."""
    return isinstance(value, int) and at_least(value, least)


def check_waits(timeout_s: object, stall_warning_s: object) -> None:
    """Raise ValueError unless these are limits of waits in seconds; an infinite ``stall_warning_s`` warns never."""
    if not positive(timeout_s):
        raise ValueError(f"timeout_s must be > 0 and finite, got {timeout_s!r}")
    if not above(stall_warning_s, 0):
        raise ValueError(f"stall_warning_s must be > 0, got {stall_warning_s!r}")


def check_node_size(node_size: object) -> None:
    """Raise ValueError unless this is a number of ranks per node, ``"auto"``, or None for one level."""
    if node_size not in (None, "auto") and not whole(node_size, 2):
        raise ValueError(
            f'node_size must be None, which is one level, "auto", or a whole number >= 2, got {node_size!r}'
        )


def check_slice(slice_mb: object) -> None:
    """Raise ValueError unless this is a size of slices in MiB; slices below 1 KiB take for ever."""
    if slice_mb is not None and not (positive(slice_mb) and at_least(slice_mb, 1 / 1024)):
        raise ValueError(f"slice_mb must be None, or >= 1/1024 (1 KiB) and finite, got {slice_mb!r}")


def check_whole(config: Any, **least: int) -> None:
    """Raise ValueError unless each setting is an int of at least ``least``; None is valid where it is the default."""
    for name, bound in least.items():
        value, may_be_none = getattr(config, name), getattr(type(config), name, bound) is None
        if not (whole(value, bound) or (value is None and may_be_none)):
            none = "None, or " if may_be_none else ""
            raise ValueError(f"{name} must be {none}a whole number >= {bound}, got {value!r}")


def check_booleans(config: Any) -> None:
    """Raise ValueError unless each setting whose default is a bool is a bool."""
    for each in fields(config):
        if isinstance(each.default, bool) and not isinstance(getattr(config, each.name), bool):
            raise ValueError(f"{each.name} must be True or False, got {getattr(config, each.name)!r}")


def refuse_unused(config: Any, names: tuple[str, ...], where: str) -> None:
    """Raise ValueError if one of these settings is not its default; ``where`` says why it has no effect."""
    for name in names:
        value = getattr(config, name)
        if value != getattr(type(config), name):
            raise ValueError(f"{name}={value!r} has no effect {where}: leave it out")
