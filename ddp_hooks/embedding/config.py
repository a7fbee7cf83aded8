"""Settings of sharded tables, one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ddp_hooks.comm import check_booleans, check_waits

Schedule: TypeAlias = Literal["2d", "horizontal", "none"]
Clip: TypeAlias = Literal["all", "dense_only"]


@dataclass(frozen=True)
class TableConfig:
    """How tables travel.

    Args:
        schedule: ``"2d"``: rows that no rank's next batch uses travel under the next forward and backward, the others
            before (EmbRace, Algorithm 1); ``"horizontal"``: all rows before; ``"none"``: likewise, and vectors are
            asked for when a table's forward runs, also with :meth:`~EmbeddingTables.prefetch`. For comparison; the
            result is the same.
        deduplicate: send each row once per rank and batch, and sum up its gradient beforehand. False, for comparison:
            one vector per id, as in the paper's Table 2.
        clip: whose norm ``ddp_hooks.clip_grad_norm_([state, tables], …)`` takes: ``"all"`` gradients', as plain DDP,
            for which the update waits until all rows have arrived; or ``"dense_only"``, without those of tables, which
            are not clipped then.
        untie: give layers that share a table's weight (an output layer, mostly) a weight of their own. False: refuse.
        init_sync: begin with the weights of the first rank, as DDP does. False: each rank cuts its columns out of its
            own weights, which must be equal already; spares sending tables over a slow link once.
        timeout_s: a wait that takes longer fails.
        stall_warning_s: a wait that takes longer is logged, with what it waits for.
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
