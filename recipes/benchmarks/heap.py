"""How many bytes of the heap a process has in use, at most: what it asked for, without what the allocator keeps."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from types import TracebackType

_INTERVAL_S = 0.0005


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def used_heap_bytes() -> float:
    """Bytes in use, of all threads; not a number where the C library does not tell (glibc 2.33 or newer does)."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return math.nan
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return float(info.uordblks + info.hblkhd)


class HeapWatch:
    """Looks at the heap every half a millisecond, as long as the block lasts: ``with HeapWatch() as watch: …``."""

    def __init__(self) -> None:
        self.peak_bytes = used_heap_bytes()
        """The most that was seen."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="heap watch", daemon=True)

    def _look(self) -> None:
        while not self._stop.is_set():
            self.peak_bytes = max(self.peak_bytes, used_heap_bytes())
            time.sleep(_INTERVAL_S)

    def __enter__(self) -> HeapWatch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
