"""Functions that are timed in turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from rich.progress import track


def time_in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, prepare: Callable[[], object]
) -> dict[str, list[float]]:
    """Return the seconds of every run; ``prepare`` comes before each, and is not timed. The first round warms up."""
    times_s: dict[str, list[float]] = {what: [] for what in ways}
    for index in track(range(rounds + 1), description="rounds"):
        for what, way in ways.items():
            prepare()
            _wait_for(device)
            start_s = time.perf_counter()
            way()
            _wait_for(device)
            if index:
                times_s[what].append(time.perf_counter() - start_s)
    return times_s


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
