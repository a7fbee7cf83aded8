"""What the workers of the EmbRace benchmark are asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.benchmarks.embrace_workloads import EmbraceWorkload
from recipes.benchmarks.job import WorkloadJob

VARIANTS = {
    "ddp-dense": "plain DDP, dense gradients of tables",
    "ddp-sparse": "plain DDP, sparse gradients (gloo: all-gather of all rows)",
    "push-pull": "rows partitioned, pulled and pushed (as in Parallax), plain DDP",
    "dense-priority": "dense gradients by DeAR: in parts, in the order of the next forward (as ByteScheduler has them)",
    "embedding-hook": "sparse gradients by partition and exchange (embedding_hook), plain DDP",
    "sharded": "columns by AlltoAll without scheduling, plain DDP",
    "horizontal": "columns by AlltoAll, looked up ahead, DeAR",
    "2d-ddp": "columns by AlltoAll, prior and delayed rows, plain DDP",
    "2d": "columns by AlltoAll, prior and delayed rows, DeAR",
    "2d-topk": "columns by AlltoAll, prior and delayed rows, dense layers by SparDL at 1 %, which is not exact",
}
BASELINES = ("ddp-dense", "ddp-sparse", "push-pull", "dense-priority")
SWEPT = ("all-reduce", "all-gather", "push-pull", "alltoall")


@dataclass(frozen=True)
class EmbraceJob(WorkloadJob):
    """All variants of one model, or with ``densities`` one exchange of its tables by all approaches.

    Args:
        variants: of :data:`VARIANTS`.
        rounds: windows of each variant.
        warmup_steps, timed_steps: of a window.
        densities: of the rows that are looked up; empty: none of that.
    """

    workload_type = EmbraceWorkload

    workload: EmbraceWorkload
    variants: tuple[str, ...]
    rounds: int = 2
    warmup_steps: int = 3
    timed_steps: int = 5
    densities: tuple[float, ...] = ()
    result_path: str = ""  # set by the launcher
    rendezvous: str = "env://"
