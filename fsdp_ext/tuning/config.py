"""Settings of the search."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ddp_hooks.comm import at_least, check_whole, positive, whole


@dataclass(frozen=True)
class TuneConfig:
    """Range and length of the search of :func:`~fsdp_ext.tune`.

    Args:
        block_mb: granularities of wrapping, in MiB, for ``build``.
        default_block_mb: granularity without a search; stock FSDP2 is measured with it.
        prefetch: numbers of modules to gather ahead (``ExtConfig.prefetch``), on CPUs; None: the extension's default.
        lanes: numbers of lanes (``ExtConfig.lanes``), on CPUs; None: as the link's measurement suggests.
        max_trials: most trials of the search, the default included.
        dropped_steps: first steps of each trial, which are not measured: in them the order of modules is learned.
        steps_per_trial: measured steps; the median of the slowest rank counts.
        xi: improvement over the best that a trial should promise, in standard deviations of the measurements.
        min_gain: the search ends when every trial promises an improvement by less than this share.
        keep_bytes: budget for parameters that stay whole between forward and backward on every rank, in bytes, of the
            modules for which backwards wait longest. 0: none.
        profile: a JSON file of results, per model, number of ranks, link and settings, so that the next run needs a
            single trial. None: no file.
        seed: of the search.
    """

    block_mb: tuple[float, ...] = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0)
    default_block_mb: float = 25.0
    prefetch: tuple[int | None, ...] = (None, 1, 4, 8)
    lanes: tuple[int | None, ...] = (None,)
    max_trials: int = 10
    dropped_steps: int = 3
    steps_per_trial: int = 3
    xi: float = 0.1
    min_gain: float = 0.005
    keep_bytes: int = 0
    profile: str | os.PathLike[str] | None = "~/.cache/ddp_hooks/fsdp.json"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_mb", "prefetch", "lanes"):
            if not isinstance(getattr(self, name), tuple) or not getattr(self, name):
                raise ValueError(f"{name} must be a tuple of at least one value, got {getattr(self, name)!r}")
        if not all(positive(size) for size in (*self.block_mb, self.default_block_mb)):
            sizes = f"{self.block_mb!r}, {self.default_block_mb!r}"
            raise ValueError(f"block_mb and default_block_mb must be > 0 and finite, got {sizes}")
        if not all(depth is None or whole(depth, 0) for depth in self.prefetch):
            raise ValueError(f"prefetch must have whole numbers >= 0, or None, got {self.prefetch}")
        if not all(number is None or whole(number, 1) for number in self.lanes):
            raise ValueError(f"lanes must have whole numbers >= 1, or None, got {self.lanes}")
        # The first forward learns the order of modules, and lists of what to prefetch are set in the second.
        check_whole(self, max_trials=1, dropped_steps=2, steps_per_trial=1, keep_bytes=0, seed=0)
        for name in ("xi", "min_gain"):
            if not at_least(getattr(self, name), 0):
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)!r}")
        if self.profile is not None and not isinstance(self.profile, str | os.PathLike):
            raise TypeError(f"profile must be None or a path, got {self.profile!r}")
