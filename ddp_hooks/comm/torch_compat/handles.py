"""Handles of hooks that torch has no hook for, and notes of errors."""

from __future__ import annotations

import sys
from collections.abc import Callable


class RemovableHandle:
    """Handle whose ``remove()`` runs a function, like torch's."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self.remove = remove


def add_note(error: BaseException, note: str) -> None:
    """Call ``error.add_note(note)``; do nothing before Python 3.11."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
