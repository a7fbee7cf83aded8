"""Handles of hooks that torch has no hook for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class RemovableHandle:
    """Handle whose ``remove()`` runs a function, like torch's."""

    remove: Callable[[], None]
