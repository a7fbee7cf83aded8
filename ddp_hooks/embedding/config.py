"""Settings of sharded tables, one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ddp_hooks.comm import check_booleans, check_waits

Schedule: TypeAlias = Literal["2d", "horizontal", "none"]
Clip: TypeAlias = Literal["all", "dense_only"]


@dataclass(frozen=True)
class TableConfig:
    """Settings of the exchange of tables.

    Args:
        schedule: ``"2d"``: rows that no rank's next batch uses travel under the next forward and backward, the rest
            before the next step's lookup (EmbRace, Algorithm 1); ``"horizontal"``: all rows travel before it;
            ``"none"``: all rows before it, and vectors are requested in a table's forward, also with
            :meth:`~EmbeddingTables.prefetch`. The result is the same; the last two are for comparison.
        deduplicate: send each row once per rank and batch, with the sum of its gradients. False, for comparison: one
            vector per id, as in the paper's Table 2.
        clip: gradients in the norm of ``ddp_hooks.clip_grad_norm_([state, tables], …)``. ``"all"``: as in plain DDP;
            the update waits until all rows have arrived. ``"dense_only"``: tables neither count nor are clipped.
        untie: give layers that share a table's weight (often an output layer) a weight of their own. False: refuse.
        init_sync: begin with the weights of the first rank, as DDP does. False: each rank cuts its columns out of its
            own weights, which must be equal already; spares sending tables over a slow link once.
        timeout_s: a wait that takes longer fails.
        stall_warning_s: a wait that takes longer is logged, with the exchange that it waits for.
    """

    schedule: Schedule = "2d"
    deduplicate: bool = True
    clip: Clip = "all"
    untie: bool = False
    init_sync: bool = True
    timeout_s: float = 600.0
    stall_warning_s: float = 60.0

    def __post_init__(self) -> None:
        for name, choices in (("schedule", get_args(Schedule)), ("clip", get_args(Clip))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        check_waits(self.timeout_s, self.stall_warning_s)
        check_booleans(self)
