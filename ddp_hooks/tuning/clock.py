"""Durations of training steps on this rank."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch


class StepClock:
    """Records the end of every step; on CUDA by events in stream order, so that the host need not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # seconds of the host, or torch.cuda.Event

    def restart(self) -> None:
        """Forget all steps; the next one begins now."""
        self._marks.clear()
        self.tick()

    def tick(self) -> None:
        """Record the end of a step."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def __len__(self) -> int:
        """Return the number of steps since the restart."""
        return max(0, len(self._marks) - 1)

    def seconds(self) -> list[float]:
        """Return the duration of each step; wait for the last one."""
        pairs = itertools.pairwise(self._marks)
        if self._device.type != "cuda":
            return [end - start for start, end in pairs]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]
