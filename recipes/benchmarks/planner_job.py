"""What the workers of the planner's benchmark are asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.benchmarks.job import WorkloadJob
from recipes.benchmarks.workloads import Workload

VARIANTS = ("ddp-25mb", "dear", "dear:update=replicated", "topk")
DENSITY = 0.01


@dataclass(frozen=True)
class PlannerJob(WorkloadJob):
    """One workload on one network: what a planner measures, then real steps, of all variants in turns.

    Args:
        workload: the model.
        slow: factor on its computing time.
        variants: of the real steps, names as in :mod:`recipes.benchmarks.variants`.
        rounds: windows of each.
        warmup_steps, timed_steps: of a window.
    """

    workload: Workload
    slow: float
    variants: tuple[str, ...] = VARIANTS
    rounds: int = 2
    warmup_steps: int = 2
    timed_steps: int = 3
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"
