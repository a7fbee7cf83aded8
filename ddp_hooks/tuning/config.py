"""Settings of the bucket tuner."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ddp_hooks.comm import at_least, check_whole, positive


@dataclass(frozen=True)
class BucketTuner:
    """Search for the fusion size while training runs (zhang2023dear, section IV-B).

    A trial is a few steps of the running job with one size; all ranks change it between the same steps. A Gaussian
    process over the logarithm of sizes proposes trials (the paper: over sizes). After the search the fastest size is
    measured again beside the default, the size without a tuner, and stays only if it is faster again.

    Args:
        low_mb, high_mb: range of sizes, in MiB. Of sizes that form the same groups one is tried.
        start_mb: size of the first trial, in MiB. The second trial is the default.
        xi: improvement over the best that a trial should promise, in standard deviations of the measurements; a larger
            value explores more.
        max_trials: the search ends after this number of trials, the first one included.
        steps_per_trial: measured steps; the median of the slowest rank counts.
        dropped_steps: steps after each change that are not measured.
        first_step: steps before the first trial, in which DDP rebuilds its buckets and memory is allocated.
        min_gain: the search ends when no trial promises to be faster than the best by this part.
        profile: JSON file of results per model, number of ranks, link and settings. The first rank reads it when
            training begins, and writes it after every trial. None: no file.
        seed: of the search.

    Raises:
        TypeError, ValueError: a setting is wrong.
    """

    low_mb: float = 1.0
    high_mb: float = 100.0
    start_mb: float = 25.0
    xi: float = 0.1
    max_trials: int = 10
    steps_per_trial: int = 10
    dropped_steps: int = 1
    first_step: int = 5
    min_gain: float = 0.005
    profile: str | os.PathLike[str] | None = "~/.cache/ddp_hooks/tuning.json"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("low_mb", "high_mb", "start_mb"):
            if not positive(getattr(self, name)):
                raise ValueError(f"{name} must be > 0 and finite, got {getattr(self, name)!r}")
        if not self.low_mb < self.high_mb:
            raise ValueError(f"low_mb must be below high_mb, got {self.low_mb} and {self.high_mb}")
        if not self.low_mb <= self.start_mb <= self.high_mb:
            raise ValueError(f"start_mb must be from {self.low_mb} to {self.high_mb}, got {self.start_mb}")
        check_whole(self, max_trials=2, steps_per_trial=1, dropped_steps=0, first_step=2, seed=0)
        for name in ("xi", "min_gain"):
            if not at_least(getattr(self, name), 0):
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)!r}")
        if self.profile is not None and not isinstance(self.profile, str | os.PathLike):
            raise TypeError(f"profile must be None or a path, got {self.profile!r}")
