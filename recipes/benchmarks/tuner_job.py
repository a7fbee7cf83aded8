"""What the workers of the tuner's benchmark are asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.benchmarks.job import WorkloadJob
from recipes.benchmarks.workloads import Workload


@dataclass(frozen=True)
class TunerJob(WorkloadJob):
    """One workload under DeAR: a live search, then every size of a grid and what was found, alternating.

    Args:
        workload: the model.
        slow: factor on its computing time.
        bucket_mb: of DDP.
        steps_per_trial: of the search.
        start: its first trial: what the cost model predicts, or the tuner's default.
        sizes_mb: the grid.
        rounds: how often every size of it is measured.
        timed_steps: steps each time, after one that does not count.
    """

    workload: Workload
    slow: float
    bucket_mb: float
    steps_per_trial: int
    max_trials: int
    sizes_mb: tuple[float, ...]
    rounds: int
    timed_steps: int
    start: str = "predicted"
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"
