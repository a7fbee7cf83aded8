"""Search for a fusion size while training runs: trials and decisions, equal on every rank.

1. Some steps go by, until buckets and memory are stable.
2. The first rank chooses a setting in a thread of its own. All ranks receive the choice at the end of one step; until
   then training continues with the setting in force.
3. Every rank applies the setting and times some steps. The median of the slowest rank counts.
4. Steps 2 and 3 repeat until no trial promises more, or enough were made.
5. The fastest setting and the default, which would stay without a tuner, are measured in turns. The faster one stays.

The first rank decides alone, and all ranks receive a decision in the same step, so they never diverge.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol, get_args

import torch

from ddp_hooks.comm import Lanes, Partition
from ddp_hooks.tuning.candidates import Groups, Setting
from ddp_hooks.tuning.clock import StepClock
from ddp_hooks.tuning.config import BucketTuner
from ddp_hooks.tuning.profile import Job, Role, Trial
from ddp_hooks.tuning.search import Decision, Searcher, Verdict

logger = logging.getLogger("ddp_hooks")

_VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # ranks exchange an index


class Tunable(Protocol):
    """Fusion size and number of lanes of a hook."""

    def groups_of(self, mb: float) -> Groups:
        """Return the groups that a size would form; called from another thread, also during a step."""

    def apply(self, setting: Setting) -> None:
        """Apply ``setting``; called on all ranks between steps, with no communication under way."""


class Phase(Enum):
    """Purpose of the present steps."""

    SETTLING = auto()
    DECIDING = auto()
    MEASURING = auto()
    FINISHED = auto()


class Tuning:
    """Search on one rank, running or finished; :func:`begin` makes it."""

    def __init__(
        self, tuner: BucketTuner, tunable: Tunable, lanes: Lanes, device: torch.device, default: Setting, job: Job
    ) -> None:
        self.tuner = tuner
        self.trials: list[Trial] = []
        """Trials of this run, the same on every rank. The first rank alone knows those of an earlier run."""
        self.setting = default
        """Setting in force."""
        self.phase = Phase.SETTLING
        self.tunable = tunable
        self._lanes = lanes
        self._device = device
        self._default = default
        self._clock = StepClock(device)
        self._steps = 0  # in this phase
        self._next_poll = 0  # step of this phase in which the first rank is asked next
        self._role: Role = "search"  # of the present trial
        self._asked_s = time.perf_counter()
        self._searcher = Searcher(tuner, tunable.groups_of, default, job) if lanes.rank == 0 else None

    @property
    def finished(self) -> bool:
        """True if the setting will not change any more."""
        return self.phase is Phase.FINISHED

    @property
    def advice_s(self) -> list[float]:
        """Durations of the first rank's decisions; the first one includes imports. Empty on other ranks."""
        return self._searcher.seconds if self._searcher is not None else []

    def stepped(self) -> None:
        """Record the end of a step; called on all ranks, with no communication under way. Sometimes collective.

        Raises:
            LaneError, LaneTimeout: a rank failed, or took no part in an exchange.
        """
        if self.finished:
            return
        self._clock.tick()
        self._steps += 1
        tuner = self.tuner
        if self.phase is Phase.SETTLING and self._steps >= tuner.first_step:
            self._ask()
        elif self.phase is Phase.DECIDING and self._steps >= self._next_poll:
            self._hear()
        elif self.phase is Phase.MEASURING and len(self._clock) >= tuner.dropped_steps + tuner.steps_per_trial:
            self._end_trial()
            self._ask()

    def resume(self, mb: float, lanes: int, finished: bool) -> None:
        """Continue the search of a checkpoint with these values, whose size is in force now; called on all ranks.

        At most the existing lanes are used. A search that has ended here does not begin again.
        """
        if self.finished and not finished:
            lanes = self.setting.lanes  # the best number found; it changes no result
        self.setting = Setting(mb, min(lanes, max(self._default.lanes, self.tuner.max_lanes or 0)))
        self._lanes.use(self.setting.lanes)
        if finished:
            self._finish()
        elif not self.finished:
            self.phase, self._steps = Phase.SETTLING, 0

    def close(self) -> None:
        """End the first rank's thread."""
        if self._searcher is not None:
            self._searcher.close()

    def _ask(self) -> None:
        if self._searcher is not None:
            self._searcher.ask(self.trials)
        self.phase, self._steps, self._next_poll = Phase.DECIDING, 0, 1
        self._asked_s = time.perf_counter()

    def _hear(self) -> None:
        answer = self._searcher.answer() if self._searcher is not None else Decision("wait")
        numbers = [_VERDICTS.index(answer.verdict), answer.setting.mb, answer.setting.lanes]
        first, *_ = self._exchange(numbers, "a decision of the tuner")
        verdict, setting = _VERDICTS[round(first[0])], Setting(first[1], round(first[2]))
        if verdict == "wait":
            self._next_poll = 2 * self._steps  # a slow decision is asked for seldom
            return
        if setting != self.setting:
            self.tunable.apply(setting)
            self.setting = setting
        if verdict == "stop":
            self._finish()
            if self._searcher is not None:
                logger.info("the tuner has ended: %s; %d trials", setting, len(self.trials))
            return
        self.phase, self._steps, self._role = Phase.MEASURING, 0, verdict
        self._clock.restart()

    def _end_trial(self) -> None:
        median_s = statistics.median(self._clock.seconds()[self.tuner.dropped_steps :])
        step_s = max(row[0] for row in self._exchange([median_s], "the times of a trial"))  # of the slowest rank
        num_groups = self.tunable.groups_of(self.setting.mb).num_groups
        trial = Trial(*self.setting, num_groups, step_s, self._role, time.perf_counter() - self._asked_s)
        self.trials.append(trial)
        if self._searcher is not None:
            fastest = min(self.trials, key=lambda trial: trial.step_s)
            logger.info(
                f"trial {len(self.trials)}{' (check)' if trial.role == 'check' else ''}: {trial.setting}, {num_groups} "
                f"groups: {step_s:.4g} s per step, {1 / step_s:.4g} steps/s ({trial.trial_s:.1f} s for the trial); "
                f"fastest so far: {fastest.setting}"
            )

    def _exchange(self, numbers: Sequence[float], label: str) -> list[list[float]]:
        """Gather every rank's numbers, by rank; collective."""
        world_size, length = self._lanes.world_size, len(numbers)
        rows = torch.zeros(world_size, length, dtype=torch.float64, device=self._device)
        rows[self._lanes.rank] = torch.tensor(numbers, dtype=torch.float64)
        bounds = tuple(rank * length for rank in range(world_size + 1))
        self._lanes.all_gather([Partition(rows.view(-1), bounds)], label).wait()
        return [list(map(float, row)) for row in rows.tolist()]

    def _finish(self) -> None:
        self.phase = Phase.FINISHED
        self.close()


def begin(
    tuner: BucketTuner, tunable: Tunable, lanes: Lanes, mb: float, job: Job, device: torch.device
) -> Tuning | None:
    """Start a search at the size in force; return None with a single rank. Collective.

    Args:
        tuner: the settings.
        tunable: applies a setting.
        lanes: of the ranks that decide together; they grow to ``max_lanes``.
        mb: size in force; with the present number of lanes the default, which would stay without a tuner.
        job: key of the profile.
        device: of the model.
    """
    if lanes.world_size == 1:
        logger.info("one rank sends nothing, so the tuner has nothing to do")
        return None
    default = Setting(mb, len(lanes))
    # The same settings with another range or number of lanes are another search.
    searched = f"{tuner.low_mb} to {tuner.high_mb} MB, {default.lanes} to {tuner.max_lanes} lanes"
    if tuner.max_lanes is not None:
        lanes.grow(tuner.max_lanes)
        lanes.use(default.lanes)
    return Tuning(tuner, tunable, lanes, device, default, replace(job, settings=f"{job.settings}, {searched}"))
