"""The end of the process, at which lanes must not be in the middle of anything."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable

logger = logging.getLogger("ddp_hooks")


class Undo:
    """A handle whose ``remove`` runs a function, like torch's."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.remove = function


def at_exit(
    close: Callable[[], None], abandon: Callable[[BaseException], None], is_stuck: Callable[[], bool]
) -> Undo:
    """When the process ends call the bound method ``close``, or ``abandon(error)`` if an error ends it.

    The last gathers must reach the other ranks before this process goes. If ``is_stuck`` afterwards, a thread waits in
    the backend for another rank. It would abort the process if it came back while the interpreter ends, so the
    process ends here.
    """
    references = weakref.WeakMethod(close), weakref.WeakMethod(abandon), weakref.WeakMethod(is_stuck)

    def finish() -> None:
        """What happens at the interpreter's end."""
        close, abandon, is_stuck = references[0](), references[1](), references[2]()
        error = getattr(sys, "last_value", None)
        if close is None or abandon is None or is_stuck is None:
            return
        if error is not None:
            abandon(error)
        else:
            close()
        if is_stuck():
            logger.warning("leaving while another rank is still waited for")
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0 if error is None else 1)

    atexit.register(finish)
    return Undo(lambda: atexit.unregister(finish))
