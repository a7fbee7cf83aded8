"""How long steps take, on this rank."""

from __future__ import annotations

import itertools
import time

import torch


class StepClock:
    """Notes the end of every step; on accelerators in stream order, so that the host need not wait.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float | torch.cuda.Event] = []

    def restart(self) -> None:
        """Forget all steps; the next one begins now."""
        self._marks.clear()
        self.tick()

    def tick(self) -> None:
        """A step has ended."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def __len__(self) -> int:
        """Steps since the restart."""
        return max(0, len(self._marks) - 1)

    def seconds(self) -> list[float]:
        """What each step took; waits for the last one."""
        last = self._marks[-1]
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
        return [_between(first, second) for first, second in itertools.pairwise(self._marks)]


def _between(first: float | torch.cuda.Event, second: float | torch.cuda.Event) -> float:
    if isinstance(first, torch.cuda.Event):
        assert isinstance(second, torch.cuda.Event)
        return float(first.elapsed_time(second)) / 1e3
    assert not isinstance(second, torch.cuda.Event)
    return second - first
