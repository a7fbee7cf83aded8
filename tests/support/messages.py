"""Messages of errors and of the log, for tests to compare."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def message_of(function: Callable[[], Any]) -> str:
    """The message with which ``function`` raises."""
    try:
        function()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@contextmanager
def logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_hooks").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("ddp_hooks").removeHandler(handler)
