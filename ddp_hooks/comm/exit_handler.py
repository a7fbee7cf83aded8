"""Exit handlers: lanes end, or the process does, before the interpreter is taken down."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from ddp_hooks.comm.failure import LaneError, died, last_words, lost_ranks
from ddp_hooks.comm.torch_compat import RemovableHandle
from ddp_hooks.comm.torch_compat.distributed import default_store, serves
from ddp_hooks.comm.validation import see

logger = logging.getLogger("ddp_hooks")

T = TypeVar("T")
_LOOK_S = 0.25  # how often it is seen whether a rank died
_GRACE_S = 1.0  # what waits for a rank that died may end by itself in this time


def while_all_live(action: Callable[[], T], group: dist.ProcessGroup, what: str) -> T:
    """Return the result of ``action``, which waits for all ranks of ``group`` in torch, for a long time if one died.

    Raises:
        LaneError: a rank died; a thread may still wait for it.
    """
    future: Future[T] = Future()

    def act() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=act, name=f"ddp_hooks {what}", daemon=True)
    thread.start()
    ranks, lost = dist.get_process_group_ranks(group), list[int]()
    thread.join(_LOOK_S)
    while thread.is_alive() and not lost:
        lost = lost_ranks(group, ranks)
        thread.join(_LOOK_S)
    thread.join(_GRACE_S if lost else None)
    ended = future.done()
    error = future.exception() if ended else None
    if isinstance(error, RuntimeError) and not lost:
        lost = lost_ranks(group, ranks, patience_s=_GRACE_S)
    if lost and (not ended or isinstance(error, RuntimeError)):
        atexit.register(_leave_without, thread)
        text = f" ({str(error).splitlines()[0]})" if error is not None else ""
        raise LaneError(f"{what} cannot end: {died(lost)}{text}{see('a-rank-died')}") from error
    return future.result()


def _leave_without(thread: threading.Thread) -> None:
    # A thread that came back from torch while the interpreter ends would abort the process. It may hold the connection
    # to the store for as long as it waits, so there are no last words.
    if thread.is_alive():
        if dist.is_initialized() and serves(default_store()):
            time.sleep(2 * (_LOOK_S + _GRACE_S))  # others, too, find out by their own connections
        _leave()


def _leave() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def at_exit(
    close: Callable[[], None], abandon: Callable[[BaseException], None], is_stuck: Callable[[], bool]
) -> RemovableHandle:
    """When the process ends call the bound method ``close``, or ``abandon(error)`` if an error ends it.

    The last gathers must reach the other ranks before this process goes. If ``is_stuck`` afterwards, a thread waits in
    the backend for another rank, and would abort the process if it came back while the interpreter ends. So the
    process ends here, with status 1, which it also has if ``close`` raises: Python itself would end with 0.
    """
    references: list[Any] = [weakref.WeakMethod(method) for method in (close, abandon, is_stuck)]

    def finish() -> None:
        close, abandon, is_stuck = (reference() for reference in references)
        if close is None or abandon is None or is_stuck is None:
            return
        error, failed = getattr(sys, "last_value", None), False
        try:
            if error is not None:
                abandon(error)
            else:
                close()
        except Exception as found:
            failed = True
            logger.error("leaving with status 1, because communication failed: %s", found)
        if is_stuck():
            failed = True
            logger.error("leaving with status 1 while another rank is still waited for")
        if failed:
            last_words()
            _leave()

    atexit.register(finish)
    return RemovableHandle(lambda: atexit.unregister(finish))
