"""The search for a fusion size while training runs: trials, decisions, and the same of both on every rank.

1. A few steps go by; buckets and memory settle.
2. The first rank decides, in a thread of its own, what to try next; the others hear of it at the end of a step. As long
   as it has not decided, training goes on as it is.
3. Every rank changes the setting, and times some steps. The slowest rank's median counts.
4. Again from 2, until nothing promises more or enough was tried.
5. The fastest setting and the one that would be in use without a tuner are measured in turns. The faster one stays.

Every decision is the first rank's, and all ranks hear it in the same step, so they never part.
"""

from __future__ import annotations

import importlib
import logging
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ddp_hooks.comm import Lanes, Partition
from ddp_hooks.tuning.candidates import Candidate, Groups, Range, Setting, by_candidate, candidate_of, find_candidates
from ddp_hooks.tuning.clock import StepClock
from ddp_hooks.tuning.config import BucketTuner
from ddp_hooks.tuning.profile import Entry, Job, Profile, Role, Trial

logger = logging.getLogger("ddp_hooks")

_NUM_CHECKS = 2  # of each of the two settings in the end


class Knob(Protocol):
    """What is tuned: how much travels together, and on how many lanes."""

    def groups_of(self, mb: float) -> Groups:
        """What groups a size would make; called from another thread, between steps or during one."""

    def turn(self, setting: Setting) -> None:
        """Change to ``setting``; called on all ranks, where nothing is under way."""


class Phase(Enum):
    """What the steps that go by are for."""

    SETTLING = auto()
    DECIDING = auto()
    MEASURING = auto()
    FINISHED = auto()


class _Verdict(Enum):
    """What the first rank tells the others."""

    WAIT = 0
    TRY = 1
    CHECK = 2
    STOP = 3


class _Decision(NamedTuple):
    verdict: _Verdict
    setting: Setting = Setting(0.0, 0)


class Tuning:
    """A search that is under way, or has ended, on one rank.

    Args:
        tuner: the settings.
        knob: what is tuned.
        lanes: whose ranks decide together; with ``max_lanes`` there are that many.
        device: where the model is.
        default: the setting in force, which would stay without a tuner.
        job: what the result is good for.
    """

    def __init__(
        self,
        tuner: BucketTuner,
        knob: Knob,
        lanes: Lanes,
        device: torch.device,
        default: Setting,
        job: Job,
    ) -> None:
        self.tuner = tuner
        self.trials: list[Trial] = []
        """What was measured so far, the same on every rank. What an earlier run has found is only on the first."""
        self.setting = default
        """What is in force."""
        self.phase = Phase.SETTLING
        self._knob = knob
        self._lanes = lanes
        self._device = device
        self._default = default
        self._clock = StepClock(device)
        self._steps = 0  # in this phase
        self._next_poll = 0  # the step in which the first rank is asked next
        self._role: Role = "search"  # of the trial that is measured
        self._asked_s = time.perf_counter()
        self._adviser = _Adviser(tuner, knob, default, job) if lanes.rank == 0 else None

    @property
    def finished(self) -> bool:
        """Whether the setting will not change any more."""
        return self.phase is Phase.FINISHED

    @property
    def advice_s(self) -> list[float]:
        """What each decision took, in seconds of the first rank's thread; the first one imports. Empty on others."""
        return self._adviser.seconds if self._adviser is not None else []

    def stepped(self) -> None:
        """A step has ended; called on all ranks, where nothing is under way. At times collective."""
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
            self._conclude_trial()
            self._ask()

    def resume(self, mb: float, lanes: int, finished: bool) -> None:
        """A run goes on whose search had come to this size, which is in force now, and to these lanes.

        All ranks call it. As many of the lanes are used as there are. A search that has ended here is not begun again.
        """
        if self.finished and not finished:
            lanes = self.setting.lanes  # found to be best; they change no result
        self.setting = Setting(mb, min(lanes, max(self._default.lanes, self.tuner.max_lanes or 0)))
        self._lanes.use(self.setting.lanes)
        if finished:
            self._finish()
        elif not self.finished:
            self.phase, self._steps = Phase.SETTLING, 0

    def groups_of(self, mb: float) -> Groups:
        """What groups a size makes; sizes whose groups are equal make no difference."""
        return self._knob.groups_of(mb)

    def plot(self, path: str | Path) -> None:
        """Draw what was measured, what is believed, and what a further trial promises (the paper's Fig. 3).

        Raises:
            ValueError: nothing was measured yet.
            ModuleNotFoundError: matplotlib is not installed.
        """
        from ddp_hooks.tuning.picture import draw  # matplotlib is an extra

        trials = [*(self._adviser.former if self._adviser is not None else ()), *self.trials]
        if not trials:
            raise ValueError("nothing was measured yet: draw the picture after the first trial")
        draw(find_all(self.tuner, self._knob, self._default), trials, self.setting, self.tuner, path)

    def close(self) -> None:
        """End the first rank's thread."""
        if self._adviser is not None:
            self._adviser.close()

    # -- decisions --------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if self._adviser is not None:
            self._adviser.ask(self.trials)
        self.phase, self._steps, self._next_poll = Phase.DECIDING, 0, 1
        self._asked_s = time.perf_counter()

    def _hear(self) -> None:
        answer = self._adviser.answer() if self._adviser is not None else _Decision(_Verdict.WAIT)
        numbers = [float(answer.verdict.value), answer.setting.mb, float(answer.setting.lanes)]
        first, *_ = self._exchange(numbers, "a decision of the tuner")
        verdict, setting = _Verdict(round(first[0])), Setting(first[1], round(first[2]))
        if verdict is _Verdict.WAIT:
            self._next_poll = 2 * self._steps  # a thread that needs long is asked seldom
            return
        self._turn(setting)
        if verdict is _Verdict.STOP:
            self._finish()
            if self._lanes.rank == 0:
                logger.info("the tuner has ended: %s; %d trials", setting, len(self.trials))
            return
        self._role = "check" if verdict is _Verdict.CHECK else "search"
        self.phase, self._steps = Phase.MEASURING, 0
        self._clock.restart()

    def _turn(self, setting: Setting) -> None:
        if setting != self.setting:
            self._knob.turn(setting)
            self.setting = setting

    def _conclude_trial(self) -> None:
        mine = statistics.median(self._clock.seconds()[self.tuner.dropped_steps :])
        slowest_s = max(row[0] for row in self._exchange([mine], "the times of a trial"))
        num_groups = self._knob.groups_of(self.setting.mb).num_groups
        trial_s = time.perf_counter() - self._asked_s
        trial = Trial(*self.setting, num_groups, slowest_s, self._role, trial_s)
        self.trials.append(trial)
        if self._lanes.rank == 0:
            fastest = min(self.trials, key=lambda trial: trial.step_s)
            logger.info(
                "trial %d%s: %s, %d groups: %.4g s per step, %.4g steps/s (%.1f s for the trial); fastest so far: %s",
                len(self.trials),
                " (check)" if trial.role == "check" else "",
                trial.setting,
                num_groups,
                slowest_s,
                1 / slowest_s,
                trial_s,
                fastest.setting,
            )

    def _exchange(self, numbers: Sequence[float], label: str) -> list[list[float]]:
        """What every rank has to say, by rank; collective."""
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
    tuner: BucketTuner, knob: Knob, lanes: Lanes, mb: float, job: Job, device: torch.device
) -> Tuning | None:
    """A search that begins with the size in force, ``mb``; None if there is nothing to search for. Collective.

    The other arguments are those of :class:`Tuning`.
    """
    if lanes.world_size == 1:
        logger.info("one rank sends nothing, so the tuner has nothing to do")
        return None
    default = Setting(mb, len(lanes))
    # Another range, or another number of lanes for the same settings, is another search.
    searched = f"{tuner.low_mb} to {tuner.high_mb} MB, {default.lanes} to {tuner.max_lanes} lanes"
    job = replace(job, settings=f"{job.settings}, {searched}")
    if tuner.max_lanes is not None:
        lanes.grow(tuner.max_lanes)
        lanes.use(default.lanes)
    return Tuning(tuner, knob, lanes, device, default, job)


def find_all(tuner: BucketTuner, knob: Knob, default: Setting) -> list[Candidate]:
    """All settings that a search may try."""
    sizes = Range(tuner.low_mb, tuner.high_mb, tuner.scale)
    firsts = [Setting(tuner.start_mb, default.lanes), default]
    return find_candidates(sizes, knob.groups_of, firsts, tuner.max_lanes)


class _Adviser:
    """Decides on the first rank, in a thread of its own: looks up candidates, fits, reads and writes the profile."""

    def __init__(self, tuner: BucketTuner, knob: Knob, default: Setting, job: Job) -> None:
        self._tuner = tuner
        self._knob = knob
        self._default = default
        self._job = job
        self._profile = Profile(tuner.profile) if tuner.profile is not None else None
        self.seconds: list[float] = []
        """What each decision took."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ddp_hooks tuner")
        self._future: Future[_Decision] | None = None
        self._candidates: list[Candidate] = []
        self.former: tuple[Trial, ...] = ()
        """Of a run that was interrupted."""

    def ask(self, trials: Sequence[Trial]) -> None:
        """Begin to think about what comes after ``trials``."""
        self._future = self._thread.submit(self._decide, list(trials))

    def answer(self) -> _Decision:
        """What to do, if that is known."""
        assert self._future is not None
        if not self._future.done():
            return _Decision(_Verdict.WAIT)
        try:
            return self._future.result()
        except Exception:  # training is not to fail for this
            logger.exception("the tuner's search has failed, so training goes on with %s", self._default)
            return _Decision(_Verdict.STOP, self._default)

    def close(self) -> None:
        """Think no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _decide(self, trials: Sequence[Trial]) -> _Decision:
        start_s = time.perf_counter()
        decision = self._consider(trials)
        self.seconds.append(time.perf_counter() - start_s)
        return decision

    def _consider(self, trials: Sequence[Trial]) -> _Decision:
        if not self._candidates:
            self._look_around()
            entry = self._profile.find(self._job) if self._profile is not None else None
            if entry is not None:
                assert self._profile is not None
                if entry.chosen is not None and candidate_of(self._candidates, entry.chosen) is not None:
                    logger.info("%s, as found before (%s)", entry.chosen, self._profile.path)
                    return _Decision(_Verdict.STOP, entry.chosen)
                self.former = self._still_useful(entry)
                logger.info("%d trials of an earlier run (%s)", len(self.former), self._profile.path)
            if self._tuner.search == "gp":
                importlib.import_module("ddp_hooks.tuning.surrogate")  # seconds, which disturb no trial yet
        known = [*self.former, *trials]
        decision = self._next(known)
        if self._profile is not None and known:
            chosen = decision.setting if decision.verdict is _Verdict.STOP else None
            self._profile.store(Entry(self._job, tuple(known), chosen))
        return decision

    def _still_useful(self, entry: Entry) -> tuple[Trial, ...]:
        """Trials of what may be tried now; of a search that had ended elsewhere nothing is checked yet."""
        known = [trial for trial in entry.trials if candidate_of(self._candidates, trial.setting) is not None]
        ended = entry.chosen is not None or len(known) < len(entry.trials)
        return tuple(replace(trial, role="search") if ended else trial for trial in known)

    def _look_around(self) -> None:
        tuner = self._tuner
        self._candidates = find_all(tuner, self._knob, self._default)
        counts = [candidate.num_groups for candidate in self._candidates]
        lowest, highest = self._candidates[0], self._candidates[-1]
        logger.info(
            "the tuner looks for the fastest of %d settings: sizes from %.3g to %.3g MB, %d to %d groups (from %.3g to "
            "%.3g MB nothing else would change)",
            len(self._candidates),
            lowest.setting.mb,
            highest.setting.mb,
            max(counts),
            min(counts),
            tuner.low_mb,
            tuner.high_mb,
        )

    def _next(self, trials: Sequence[Trial]) -> _Decision:
        candidates = self._candidates
        times_s = by_candidate(candidates, ((trial.setting, trial.step_s) for trial in trials))
        default = candidate_of(candidates, self._default)
        start = candidate_of(candidates, Setting(self._tuner.start_mb, self._default.lanes))
        assert default is not None and start is not None
        num_checks = sum(trial.role == "check" for trial in trials)
        if not num_checks:
            following = self._next_of_search(times_s, [start, default])
            if following is not None:
                return _Decision(_Verdict.TRY, candidates[following].setting)
        return self._next_check(times_s, default, num_checks)

    def _next_of_search(self, times_s: dict[int, list[float]], firsts: Sequence[int]) -> int | None:
        from ddp_hooks.tuning.search import make_search
        from ddp_hooks.tuning.surrogate import Observation

        for first in firsts:
            if first not in times_s:
                return first
        if len(times_s) >= self._tuner.max_trials:
            return None
        observed = [Observation(index, 1 / statistics.median(values)) for index, values in times_s.items()]
        return make_search(self._candidates, self._tuner).next(observed)

    def _next_check(self, times_s: dict[int, list[float]], default: int, num_checks: int) -> _Decision:
        """Measure the best of the search and the default in turns; in the end, the better of them."""
        first_s = {index: values[0] for index, values in times_s.items()}
        best = min(first_s, key=lambda index: first_s[index])
        if best == default:
            return _Decision(_Verdict.STOP, self._default)
        if num_checks < 2 * _NUM_CHECKS:
            index = (default, best)[num_checks % 2]
            return _Decision(_Verdict.CHECK, self._candidates[index].setting)
        checked_s = {index: statistics.median(times_s[index][-_NUM_CHECKS:]) for index in (default, best)}
        winner = best if checked_s[best] < checked_s[default] else default
        logger.info(
            "%s takes %.4g s per step, %s %.4g s",
            self._candidates[best].setting,
            checked_s[best],
            self._default,
            checked_s[default],
        )
        return _Decision(_Verdict.STOP, self._candidates[winner].setting)
