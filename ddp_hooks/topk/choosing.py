"""Choice of an algorithm and its number of teams: as configured, or the fastest, found by trial.

Every candidate serves a few steps of the running job, which loses nothing by it: residuals are kept, whichever
algorithm leaves them. Then each group takes the candidate whose slowest rank was fastest, on all ranks the same.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddp_hooks.comm import Lanes
from ddp_hooks.sparse.spardl import SpAllGather
from ddp_hooks.topk.config import AlgorithmName, TopKConfig

logger = logging.getLogger("ddp_hooks")

_FIRST_TRIAL = 2  # steps before it: DDP rebuilds its buckets, and groups are formed anew
_STEPS_PER_TRIAL = 4
_WARM_UP = 1  # of them, not counted


class Variant(NamedTuple):
    algorithm: AlgorithmName
    teams: int = 1
    sag: SpAllGather = "r"

    @property
    def name(self) -> str:
        return f"{self.algorithm}, {self.teams} teams, {self.sag}-SAG" if self.teams > 1 else self.algorithm


def candidates(config: TopKConfig, num_nodes: int) -> list[Variant]:
    """Return the variants to try, the default first; a single one if there is no choice.

    On one level ``num_nodes`` is the number of ranks.
    """
    if config.algorithm != "spardl" and config.algorithm != "auto":
        return [Variant(config.algorithm)]
    if isinstance(config.teams, int):
        numbers = [config.teams]
    else:
        numbers = [teams for teams in range(1, num_nodes) if num_nodes % teams == 0] or [1]
    variants = []
    for teams in numbers:
        is_power_of_two = not teams & (teams - 1)
        if teams == 1 or (config.sag != "b" and is_power_of_two):
            variants.append(Variant("spardl", teams, "r"))
        if teams > 1 and config.sag != "r":
            variants.append(Variant("spardl", teams, "b"))
    return variants + ([Variant("dense")] if config.algorithm == "auto" else [])


class VariantChooser:
    def __init__(self, config: TopKConfig, lanes: Lanes) -> None:
        self.chosen: list[Variant] | None = None  # per group, after trials
        self.is_trying = False  # steps are timed, or will be
        self._candidates = candidates(config, lanes.nodes.num_nodes)
        self._warmup_steps = config.warmup_steps
        self._lanes = lanes
        self._times_s: dict[Variant, list[list[float]]] = {}  # per step, per group

    def begin(self, step: int, chosen: Sequence[Sequence[Any]] | None, later: bool) -> None:
        """Go on with ``step``: with an earlier choice, if the settings allow it, or with new trials.

        ``later``: use the first candidate, and try nothing, until this is called again.
        """
        former, self.chosen = [Variant(*variant) for variant in chosen or ()], None
        self.is_trying = len(self._candidates) > 1 and not later
        if former and self.is_trying and set(former) <= set(self._candidates):
            self.is_trying, self.chosen = False, former
        self._times_s.clear()
        self._first_trial = max(_FIRST_TRIAL, self._warmup_steps, step)

    def variant_of(self, group: int, step: int) -> Variant:
        return self.chosen[group] if self.chosen is not None else self._on_trial(step)

    def stepped(self, step: int, times_s: Sequence[float], names: Sequence[str]) -> None:
        """Note the time of each group in a step; collective after the last trial, which makes the choice."""
        if not self.is_trying or step < self._first_trial:
            return
        self._times_s.setdefault(self._on_trial(step), []).append(list(times_s))
        if step + 1 == self._first_trial + _STEPS_PER_TRIAL * len(self._candidates):
            self._choose(names)

    def _on_trial(self, step: int) -> Variant:
        trial = max(0, step - self._first_trial) // _STEPS_PER_TRIAL if self.is_trying else 0
        return self._candidates[min(trial, len(self._candidates) - 1)]

    def _choose(self, names: Sequence[str]) -> None:
        mine = [
            [statistics.median(column) for column in zip(*self._times_s[variant][_WARM_UP:], strict=True)]
            for variant in self._candidates
        ]
        everyone: list[list[list[float]]] = self._lanes.gather_objects(mine, "the choice of algorithms, after trials")
        self.is_trying, self.chosen = False, []
        for group, name in enumerate(names):
            slowest_s = [max(times[number][group] for times in everyone) for number in range(len(self._candidates))]
            best = self._candidates[slowest_s.index(min(slowest_s))]
            self.chosen.append(best)
            if self._lanes.rank == 0:
                pairs = zip(self._candidates, slowest_s, strict=True)
                tried = ", ".join(f"{variant.name} {seconds:.3f} s" for variant, seconds in pairs)
                logger.info("group %d (%s) uses %s: %s", group, name, best.name, tried)
