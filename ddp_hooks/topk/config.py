"""Settings of sparse all-reduce, one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ddp_hooks.comm import (
    above,
    at_least,
    check_booleans,
    check_node_size,
    check_waits,
    check_whole,
    positive,
    refuse_unused,
    whole,
)
from ddp_hooks.sparse.codec import Format
from ddp_hooks.sparse.error_feedback import Collection
from ddp_hooks.tuning import BucketTuner

AlgorithmName: TypeAlias = Literal["spardl", "topka", "topkdsa", "gtopk", "oktopk", "dense"]
Choice: TypeAlias = Literal["auto"]
Sag: TypeAlias = Literal["r", "b", "auto"]
OnNonfinite: TypeAlias = Literal["skip", "raise"]
Pipeline: TypeAlias = Literal["backward", "forward"]

_DENSITY, _WARMUP_DENSITY = 0.01, 0.25


@dataclass(frozen=True)
class TopKConfig:
    """Settings of sparse all-reduce: which part of a gradient travels, and how. The rest is added to the next gradient.

    A setting that has no effect beside the others raises a ValueError.

    Args:
        density: part of the elements to keep, in (0, 1]. 1: everything, as plain DDP. None: 0.01, with ``"dense"`` 1.
        algorithm: ``"spardl"``, one of its baselines ``"topka"``, ``"topkdsa"``, ``"gtopk"``, ``"oktopk"``, or
            ``"dense"``. ``"auto"``: per group SparDL or dense, whichever a few steps show to be faster.
        teams: of SparDL; a divisor of the number of ranks. ``"auto"``: the fastest, found in the same way, but never as
            many teams as ranks, which leave out more.
        sag: Spar-All-Gather between teams: ``"r"``, recursive, for a power of two of teams; ``"b"``, Bruck's;
            ``"auto"``: the faster of the possible ones.
        node_size: ranks per node, for two levels: gradients are summed in full within nodes, and sparse between them,
            where the links are slow; a residual is a node's, and each of its ranks keeps a part. Neighbouring ranks
            share a node; their number is a divisor of the number of ranks, >= 2, and there are several nodes. Teams are
            of nodes then. ``"auto"``: as the names of hosts tell; one level if they tell no such size. None: one level.
        collection: of residuals. ``"global"`` keeps everything (zhao2024spardl, section III-C); ``"partial"`` and
            ``"local"``, for comparison, lose some.
        wire: ``"compact"``, four bytes per entry, values in bfloat16 (rounding errors are kept, too); ``"exact"``,
            eight.
        group_mb: gradients that are selected from and travel together, in MiB.
        tuner: finds ``group_mb`` while training runs, and before ``"auto"`` chooses anything; see
            :class:`~ddp_hooks.BucketTuner`. Groups decide which elements are selected, so the step in which a gradient
            arrives then depends on measurements. None: ``group_mb`` stays.
        dense_below_numel: parameters with fewer elements are summed in full, such as biases.
        momentum: momentum correction (deep gradient compression): momentum is added here, before the selection, so the
            optimizer must have none. Costs another copy of the gradients. None: no momentum here.
        warmup_steps: steps in which the density falls, by the same factor each:
            ``warmup_density * (density / warmup_density) ** (step / warmup_steps)``.
        warmup_density: density of the first of these steps. None: 0.25.
        on_nonfinite: if a gradient is infinite or NaN on any rank: ``"skip"`` the update on all ranks (with a gradient
            scaler it does that), or ``"raise"`` on all ranks. Such values enter no residual. Finite gradients of that
            step are kept for the next one where gradients are sparse, and dropped where they are dense.
        pipeline: ``"backward"``: gradients arrive before the backward ends. ``"forward"``: in the next forward, where
            each parameter is updated just before it is read, to the same bits; needs the optimizer, and DDP's
            ``gradient_as_bucket_view=True``. Until then gradients may not be read.
        assume_parameterwise: with ``pipeline="forward"``, vouch for an optimizer that is not from ``torch.optim``: the
            update of each parameter depends on that parameter, its gradient and its state alone. Other optimizers wait
            for all gradients inside of ``step()``.
        lanes: streams of communication side by side, and so selections.
        timeout_s: a wait that takes longer fails.
        stall_warning_s: a wait that takes longer is logged, with its reason.
    """

    density: float | None = None
    algorithm: AlgorithmName | Choice = "spardl"
    teams: int | Choice = 1
    sag: Sag = "auto"
    node_size: int | Choice | None = None
    collection: Collection = "global"
    wire: Format = "compact"
    group_mb: float = 25.0
    tuner: BucketTuner | None = None
    dense_below_numel: int = 0
    momentum: float | None = None
    warmup_steps: int = 0
    warmup_density: float | None = None
    on_nonfinite: OnNonfinite = "skip"
    pipeline: Pipeline = "backward"
    assume_parameterwise: bool = False
    lanes: int = 2
    timeout_s: float = 600.0
    stall_warning_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("density", "warmup_density"):
            value = getattr(self, name)
            if value is not None and not (above(value, 0) and value <= 1):
                raise ValueError(f"{name} must be None, or in (0, 1], got {value!r}")
        allowed = {
            "algorithm": (*get_args(AlgorithmName), "auto"),
            "sag": get_args(Sag),
            "collection": get_args(Collection),
            "wire": get_args(Format),
            "on_nonfinite": get_args(OnNonfinite),
            "pipeline": get_args(Pipeline),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {values}, got {getattr(self, name)!r}")
        if self.tuner is not None and not isinstance(self.tuner, BucketTuner):
            raise TypeError(f"tuner must be None or a BucketTuner(...), got {type(self.tuner).__name__}")
        if self.teams != "auto" and not whole(self.teams, 1):
            raise ValueError(f'teams must be a whole number >= 1 or "auto", got {self.teams!r}')
        check_node_size(self.node_size)
        if self.momentum is not None and not (at_least(self.momentum, 0) and self.momentum < 1):
            raise ValueError(f"momentum must be None or in [0, 1), got {self.momentum!r}")
        if not positive(self.group_mb):
            raise ValueError(f"group_mb must be > 0 and finite, got {self.group_mb!r}")
        check_waits(self.timeout_s, self.stall_warning_s)
        check_whole(self, lanes=1, warmup_steps=0, dense_below_numel=0)
        check_booleans(self)
        if self.algorithm == "dense":
            names = ("collection", "warmup_steps") + (("density",) if self.density != 1 else ())
            refuse_unused(self, names, 'with algorithm="dense", which sends everything')
        if self.algorithm not in ("spardl", "auto"):
            refuse_unused(self, ("teams", "sag"), f'with algorithm="{self.algorithm}", but with "spardl"')
        if self.teams == 1:
            refuse_unused(self, ("sag",), "with teams=1, but with several")
        if not self.warmup_steps:
            refuse_unused(self, ("warmup_density",), "without warmup_steps")
        if self.pipeline == "backward":
            refuse_unused(self, ("assume_parameterwise",), 'with pipeline="backward", but with "forward"')

    def density_at(self, step: int) -> float:
        """Return the density of a step, counted from 0."""
        density = self.density
        if density is None:
            density = 1.0 if self.algorithm == "dense" else _DENSITY
        if step >= self.warmup_steps:
            return density
        first = self.warmup_density or _WARMUP_DENSITY
        return float(first * (density / first) ** (step / self.warmup_steps))
