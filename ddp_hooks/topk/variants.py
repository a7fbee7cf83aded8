"""Which algorithm, with how many teams: as configured, or the fastest of those that are possible, found by trying.

Every candidate serves a few steps of the running job, which loses nothing by it: what is left out is kept, whichever
algorithm leaves it out. Then each group takes the one whose slowest rank was fastest, on all ranks the same.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from ddp_hooks.comm import Lanes
from ddp_hooks.topk.config import AlgorithmName, TopKConfig
from ddp_hooks.topk.spardl import SpAllGather

logger = logging.getLogger("ddp_hooks")

_FIRST_TRIAL = 2  # steps before it: DDP rebuilds its buckets, and groups are formed anew
_STEPS_PER_TRIAL = 4
_WARM_UP = 1  # of them, that does not count


class Variant(NamedTuple):
    """An algorithm with its parameters."""

    algorithm: AlgorithmName
    teams: int = 1
    sag: SpAllGather = "r"

    @property
    def name(self) -> str:
        return f"{self.algorithm}, {self.teams} teams, {self.sag}-SAG" if self.teams > 1 else self.algorithm


def candidates(config: TopKConfig, world_size: int) -> list[Variant]:
    """What may be tried, the default first; one if there is no choice."""
    if config.algorithm != "spardl" and config.algorithm != "auto":
        return [Variant(config.algorithm)]
    if isinstance(config.teams, int):
        numbers = [config.teams]
    else:
        numbers = [teams for teams in range(1, world_size) if world_size % teams == 0] or [1]
    variants = []
    for teams in numbers:
        is_power_of_two = not teams & (teams - 1)
        if teams == 1:
            variants.append(Variant("spardl"))
            continue
        if config.sag in ("r", "auto") and is_power_of_two:
            variants.append(Variant("spardl", teams, "r"))
        if config.sag in ("b", "auto"):
            variants.append(Variant("spardl", teams, "b"))
    return variants + ([Variant("dense")] if config.algorithm == "auto" else [])


class VariantChooser:
    """Says which variant each group uses in this step.

    Args:
        config: the settings.
        lanes: whose ranks agree.
    """

    def __init__(self, config: TopKConfig, lanes: Lanes) -> None:
        self.chosen: list[Variant] | None = None
        """Per group; None as long as variants are tried, or if there is but one."""
        self._candidates = candidates(config, lanes.world_size)
        self._warmup_steps = config.warmup_steps
        self._lanes = lanes
        self._times_s: dict[Variant, list[list[float]]] = {}  # per step, per group
        self.begin(0, None)

    def begin(self, step: int, chosen: Sequence[Sequence[Any]] | None) -> None:
        """Training goes on with ``step``, with what was chosen before, or with new trials."""
        self._is_postponed = False
        former = [Variant(*variant) for variant in chosen or ()]
        self.chosen = former if former and self.has_choice and set(former) <= set(self._candidates) else None
        if former and self.chosen is None and self._lanes.rank == 0:
            names = ", ".join(sorted({variant.name for variant in former}))
            logger.info("%s had been chosen by trial, which the present settings exclude: %s", names, self._now())
        self._times_s.clear()
        self._first_trial = max(_FIRST_TRIAL, self._warmup_steps, step)

    def postpone(self) -> None:
        """Use the first candidate, and try nothing, until :meth:`begin` is called."""
        self.chosen = None
        self._is_postponed = True

    @property
    def is_trying(self) -> bool:
        """Whether steps are timed, or will be."""
        return self.chosen is None and self.has_choice and not self._is_postponed

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one variant."""
        return len(self._candidates) > 1

    def _now(self) -> str:
        return "trying anew" if self.has_choice else f"using {self._candidates[0].name}"

    def variant_of(self, group: int, step: int) -> Variant:
        """The variant for a group in a step, counted from 0."""
        return self.chosen[group] if self.chosen is not None else self._on_trial(step)

    def stepped(self, step: int, times_s: Sequence[float], names: Sequence[str]) -> None:
        """A step is over; collective when it was the last of the trials.

        Args:
            step: which one.
            times_s: how long each group has taken.
            names: of the groups.
        """
        if not self.is_trying or step < self._first_trial:
            return
        self._times_s.setdefault(self._on_trial(step), []).append(list(times_s))
        if step + 1 == self._first_trial + _STEPS_PER_TRIAL * len(self._candidates):
            self._choose(names)

    def _on_trial(self, step: int) -> Variant:
        trial = 0 if self._is_postponed else max(0, step - self._first_trial) // _STEPS_PER_TRIAL
        return self._candidates[min(trial, len(self._candidates) - 1)]

    def _choose(self, names: Sequence[str]) -> None:
        mine = [
            [statistics.median(column) for column in zip(*self._times_s[variant][_WARM_UP:], strict=True)]
            for variant in self._candidates
        ]
        everyone: list[list[list[float]]] = self._lanes.gather_objects(mine, "the choice of algorithms, after trials")
        self.chosen = []
        for group, name in enumerate(names):
            slowest_s = [
                max(times[candidate][group] for times in everyone) for candidate in range(len(self._candidates))
            ]
            best = slowest_s.index(min(slowest_s))
            self.chosen.append(self._candidates[best])
            if self._lanes.rank == 0:
                tried = ", ".join(
                    f"{variant.name} {seconds:.3f} s"
                    for variant, seconds in zip(self._candidates, slowest_s, strict=True)
                )
                logger.info("group %d (%s) uses %s: %s", group, name, self._candidates[best].name, tried)
        self._times_s.clear()
