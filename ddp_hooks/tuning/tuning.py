"""Search for a fusion size while training runs: trials and decisions, equal on every rank.

1. Some steps go by, until buckets and memory are stable.
2. The first rank chooses a size in a thread of its own. All ranks receive the choice at the end of one step; until
   then training continues with the size in force.
3. Every rank applies the size and times some steps. The median of the slowest rank counts.
4. Steps 2 and 3 repeat until no trial promises more, or enough were made.
5. The fastest size and the default, which would stay without a tuner, are measured in turns. The faster one stays.

The first rank decides alone, and all ranks receive a decision in the same step, so they never diverge.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from dataclasses import replace
from enum import Enum, auto
from typing import Any, Protocol

import torch

from ddp_hooks.comm import Lanes
from ddp_hooks.tuning.candidates import Groups
from ddp_hooks.tuning.config import BucketTuner
from ddp_hooks.tuning.profile import Job, Role, Trial
from ddp_hooks.tuning.search import Searcher

logger = logging.getLogger("ddp_hooks")


class Tunable(Protocol):
    def groups_of(self, mb: float) -> Groups:
        """Return the groups that a size would form; called from another thread, also during a step."""

    def apply(self, mb: float) -> None:
        """Form the groups of a size; called on all ranks between steps, with no communication under way."""


class StepClock:
    """Records the end of every step; on CUDA by events in stream order, so that the host need not wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []  # seconds of the host, or torch.cuda.Event

    def restart(self) -> None:
        self._marks.clear()
        self.tick()

    def tick(self) -> None:
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def __len__(self) -> int:
        return max(0, len(self._marks) - 1)

    def seconds(self) -> list[float]:
        pairs = itertools.pairwise(self._marks)
        if self._device.type != "cuda":
            return [end - start for start, end in pairs]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


class Phase(Enum):
    SETTLING = auto()
    DECIDING = auto()
    MEASURING = auto()
    FINISHED = auto()


class Tuning:
    """Search on one rank, running or finished; :func:`begin` makes it."""

    def __init__(
        self, tuner: BucketTuner, tunable: Tunable, lanes: Lanes, device: torch.device, default_mb: float, job: Job
    ) -> None:
        self.tuner = tuner
        self.trials: list[Trial] = []
        """Trials of this run, the same on every rank. The first rank alone knows those of an earlier run."""
        self.mb = default_mb
        """Size in force, in MiB."""
        self.phase = Phase.SETTLING
        self.tunable = tunable
        self._lanes = lanes
        self._clock = StepClock(device)
        self._steps = 0  # in this phase
        self._next_poll = 0  # step of this phase in which the first rank is asked next
        self._role: Role = "search"  # of the present trial
        self._asked_s = time.perf_counter()
        self._searcher = Searcher(tuner, tunable.groups_of, default_mb, job) if lanes.rank == 0 else None

    @property
    def finished(self) -> bool:
        """True if the size will not change any more."""
        return self.phase is Phase.FINISHED

    def stepped(self) -> None:
        """Record the end of a step; called on all ranks, with no communication under way. Sometimes collective.

        Raises LaneError or LaneTimeout where another rank ended or did not come.
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

    def resume(self, mb: float, finished: bool) -> None:
        """Continue the search of a checkpoint, whose size is in force now, unless one has ended here; on all ranks."""
        self.mb = mb
        if finished:
            self._finish()
        elif not self.finished:
            self.phase, self._steps = Phase.SETTLING, 0

    def close(self) -> None:
        if self._searcher is not None:
            self._searcher.close()

    def _ask(self) -> None:
        if self._searcher is not None:
            self._searcher.ask(self.trials)
        self.phase, self._steps, self._next_poll = Phase.DECIDING, 0, 1
        self._asked_s = time.perf_counter()

    def _hear(self) -> None:
        answer = self._searcher.answer() if self._searcher is not None else None
        verdict, mb = self._lanes.broadcast_object(answer, "a decision of the tuner")
        if verdict == "wait":
            self._next_poll = 2 * self._steps  # a slow decision is asked for seldom
            return
        if mb != self.mb:
            self.tunable.apply(mb)
            self.mb = mb
        if verdict == "stop":
            self._finish()
            if self._searcher is not None:
                logger.info("the tuner has ended: %.3g MB; %d trials", mb, len(self.trials))
            return
        self.phase, self._steps, self._role = Phase.MEASURING, 0, verdict
        self._clock.restart()

    def _end_trial(self) -> None:
        median_s = statistics.median(self._clock.seconds()[self.tuner.dropped_steps :])
        step_s = max(self._lanes.gather_objects(median_s, "the times of a trial"))  # of the slowest rank
        num_groups = self.tunable.groups_of(self.mb).num_groups
        trial = Trial(self.mb, num_groups, step_s, self._role, time.perf_counter() - self._asked_s)
        self.trials.append(trial)
        if self._searcher is not None:
            fastest = min(self.trials, key=lambda trial: trial.step_s)
            check = " (check)" if trial.role == "check" else ""
            logger.info(
                f"trial {len(self.trials)}{check}: {trial.mb:.3g} MB, {num_groups} groups: {step_s:.4g} s per step, "
                f"{1 / step_s:.4g} steps/s ({trial.trial_s:.1f} s for the trial); fastest so far: {fastest.mb:.3g} MB"
            )

    def _finish(self) -> None:
        self.phase = Phase.FINISHED
        self.close()


def begin(
    tuner: BucketTuner, tunable: Tunable, lanes: Lanes, mb: float, job: Job, device: torch.device
) -> Tuning | None:
    """Start a search at ``mb``, the size in force and the default; return None with a single rank. Collective."""
    if lanes.world_size == 1:
        logger.info("one rank sends nothing, so the tuner has nothing to do")
        return None
    # The same settings with another range or number of lanes are another search.
    searched = f"{tuner.low_mb} to {tuner.high_mb} MB, {len(lanes)} lanes"
    return Tuning(tuner, tunable, lanes, device, mb, replace(job, settings=f"{job.settings}, {searched}"))
