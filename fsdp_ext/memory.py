"""Memory for whole parameters and gradients that is used again, instead of given back and taken anew.

FSDP2 allocates memory for every collective and frees it soon. Large blocks come from the kernel, which clears each page
first: with BERT-base on four ranks that costs an eighth of all processor time.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

_MIB = 1 << 20  # smaller tensors are allocated quickly


class Pool:
    """Tensors whose memory comes back when the last tensor that uses it is gone.

    Args:
        limit_bytes: most unused memory that is kept.
    """

    def __init__(self, limit_bytes: int = 64 * _MIB) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[Any]] = defaultdict(list)  # MiB -> arrays of bytes
        self._lock = threading.RLock()  # memory comes back on any thread, also while this one takes some
        self.free_bytes = 0

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, (numel,), on the CPU."""
        nbytes = numel * dtype.itemsize
        if nbytes < _MIB:
            return torch.empty(numel, dtype=dtype)
        block = self._take(-(-nbytes // _MIB))
        lent = block[:nbytes]  # an array of its own, which the memory of tensors keeps alive
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype)

    def _take(self, num_mib: int) -> Any:
        with self._lock:
            if not self._free[num_mib]:
                return torch.empty(num_mib * _MIB, dtype=torch.uint8).numpy()
            block = self._free[num_mib].pop()
            self.free_bytes -= block.nbytes
            return block

    def _give_back(self, block: Any) -> None:
        with self._lock:
            if self.free_bytes + block.nbytes <= self._limit_bytes:
                self._free[block.nbytes // _MIB].append(block)
                self.free_bytes += block.nbytes
