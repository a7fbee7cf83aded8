"""Settings of the bucket tuner, one frozen dataclass."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ddp_hooks.comm import at_least, check_whole, positive, refuse_unused

SearchName: TypeAlias = Literal["gp", "random", "grid"]
Scale: TypeAlias = Literal["log", "linear"]


@dataclass(frozen=True)
class BucketTuner:
    """Finds out, while training runs, how much should travel together (zhang2023dear, section IV-B).

    A trial is a few steps of the running job with one size. Between steps the size changes for all ranks at once. When
    the search has ended, the fastest size is measured once more beside the one that would be in use without a tuner,
    and kept only if it is faster again.

    A setting that has no effect beside the others raises a ValueError.

    Args:
        low_mb, high_mb: sizes that may be tried, in MiB. Only where another size makes other groups is anything tried.
        start_mb: the first trial, in MiB. The second is the size that would be in use without a tuner.
        scale: whether sizes are searched by their logarithm or, as in the paper, ``"linear"``: there half of all sizes
            are above 50 MiB, where most models make one or two groups.
        search: ``"gp"``: expected improvement over a Gaussian process; ``"random"`` or ``"grid"`` for comparison.
        xi: with ``"gp"``, how much more than the best so far a trial should promise, in standard deviations of what was
            measured; more explores more.
        max_trials: the search ends after so many trials, the start included.
        steps_per_trial: steps that are measured; their median counts, of the slowest rank.
        dropped_steps: steps after each change that are not measured.
        first_step: steps before the first trial, in which DDP rebuilds its buckets and memory is allocated.
        min_gain: ``"gp"`` ends when a trial promises to be faster than the best by less than this part.
        max_lanes: search for the number of lanes, too, from 1 to this. None: lanes stay as they are.
        profile: a JSON file that keeps what was found, per model, number of ranks, link and settings: read when
            training begins, written after every trial, by the first rank alone. None: nothing is kept.
        seed: of the search.
    """

    low_mb: float = 1.0
    high_mb: float = 100.0
    start_mb: float = 25.0
    scale: Scale = "log"
    search: SearchName = "gp"
    xi: float = 0.1
    max_trials: int = 10
    steps_per_trial: int = 10
    dropped_steps: int = 1
    first_step: int = 5
    min_gain: float = 0.005
    max_lanes: int | None = None
    profile: str | os.PathLike[str] | None = "~/.cache/ddp_hooks/tuning.json"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("scale", get_args(Scale)), ("search", get_args(SearchName))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name in ("low_mb", "high_mb", "start_mb"):
            if not positive(getattr(self, name)):
                raise ValueError(f"{name} must be > 0 and finite, got {getattr(self, name)!r}")
        if not self.low_mb < self.high_mb:
            raise ValueError(f"low_mb must be below high_mb, got {self.low_mb} and {self.high_mb}")
        if not self.low_mb <= self.start_mb <= self.high_mb:
            raise ValueError(f"start_mb must be from {self.low_mb} to {self.high_mb}, got {self.start_mb}")
        check_whole(self, max_trials=2, steps_per_trial=1, dropped_steps=0, first_step=2, max_lanes=1, seed=0)
        for name in ("xi", "min_gain"):
            if not at_least(getattr(self, name), 0):
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)!r}")
        if self.profile is not None and not isinstance(self.profile, str | os.PathLike):
            raise TypeError(f"profile must be None or a path, got {self.profile!r}")
        if self.search != "gp":
            unused = ("xi", "min_gain") if self.min_gain else ("xi",)  # 0 ends no search
            refuse_unused(self, unused, f'with search="{self.search}", but with "gp"')
