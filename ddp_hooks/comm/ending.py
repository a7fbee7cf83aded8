"""The end of the process, at which lanes must not be in the middle of anything."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Callable

from ddp_hooks.comm.failure import last_words

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
    process ends here, with status 1: others do not have what it had to send.
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
            logger.error("leaving with status 1 while another rank is still waited for")
            last_words()
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    atexit.register(finish)
    return Undo(lambda: atexit.unregister(finish))
