"""Decisions of a search: which size comes next, and which one stays."""

from __future__ import annotations

import importlib
import itertools
import logging
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from ddp_hooks.tuning.candidates import Candidate, Groups, Observation, Range, candidate_of, find_candidates
from ddp_hooks.tuning.config import BucketTuner
from ddp_hooks.tuning.profile import Entry, Job, Profile, Trial

logger = logging.getLogger("ddp_hooks")

_FILLING_TRIALS = 3  # with fewer, a Gaussian process only knows the neighbourhood of its observations
_FEWEST_TRIALS = 5  # before a small expected gain may end the search
_NUM_CHECKS = 2  # trials of each of the two sizes that are compared in the end


def propose(candidates: Sequence[Candidate], tuner: BucketTuner, observed: Sequence[Observation]) -> int | None:
    """Return the untried candidate with the largest expected improvement (zhang2023dear, section IV-B).

    Unlike the paper's, the third trial is in the middle of the widest gap between the first two. Returns the index of
    the candidate; None if none is worth a trial.
    """
    from ddp_hooks.tuning.surrogate import fit_posterior  # its import takes seconds

    positions = [candidate.position for candidate in candidates]
    tried = {observation.candidate for observation in observed}
    untried = [index for index in range(len(positions)) if index not in tried]
    if not untried:
        return None
    if len(tried) < _FILLING_TRIALS:
        return _middle_of_widest_gap(positions, tried, untried)
    posterior = fit_posterior([[position] for position in positions], observed, tuner.xi, tuner.seed)
    promised = max(posterior.gain[index] for index in untried)
    if len(tried) >= _FEWEST_TRIALS and promised < tuner.min_gain:
        return None

    def distance(index: int) -> float:
        return min(abs(positions[index] - positions[other]) for other in tried)

    # Among equal expectations, take the candidate farthest from all observations.
    return max(untried, key=lambda index: (posterior.improvement[index], distance(index)))


def _middle_of_widest_gap(positions: Sequence[float], tried: set[int], untried: Sequence[int]) -> int:
    edges = sorted({0.0, 1.0, *(positions[index] for index in tried)})
    low, high = max(itertools.pairwise(edges), key=lambda gap: gap[1] - gap[0])
    return min(untried, key=lambda index: abs(positions[index] - (low + high) / 2))


Verdict: TypeAlias = Literal["wait", "search", "check", "stop"]


class Decision(NamedTuple):
    """Decision of the first rank: measure a size for the search or as a check, or stop with it."""

    verdict: Verdict
    mb: float = 0.0  # without a meaning with "wait"


class Searcher:
    """Decides on the first rank. Its thread forms candidates, fits, and reads and writes the profile."""

    def __init__(self, tuner: BucketTuner, groups_of: Callable[[float], Groups], default_mb: float, job: Job) -> None:
        self._tuner = tuner
        self._groups_of = groups_of
        self._default_mb = default_mb
        self._job = job
        self._profile = Profile(tuner.profile) if tuner.profile is not None else None
        self._former: tuple[Trial, ...] = ()  # trials of an interrupted run
        self._candidates: list[Candidate] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ddp_hooks tuner")
        self._future: Future[Decision] | None = None

    def ask(self, trials: Sequence[Trial]) -> None:
        self._future = self._thread.submit(self._decide, list(trials))

    def answer(self) -> Decision:
        """Return the decision; "wait" while there is none. A failed search stops at the default."""
        assert self._future is not None
        if not self._future.done():
            return Decision("wait")
        try:
            return self._future.result()
        except Exception:  # training must not fail for it
            logger.exception("the tuner's search has failed, so training goes on with %.3g MB", self._default_mb)
            return Decision("stop", self._default_mb)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _decide(self, trials: Sequence[Trial]) -> Decision:
        decision = self._begin() if not self._candidates else None
        if decision is None:
            known = (*self._former, *trials)
            decision = self._next(known)
            if self._profile is not None and known:
                chosen = decision.mb if decision.verdict == "stop" else None
                self._profile.store(Entry(self._job, known, chosen))
        return decision

    def _begin(self) -> Decision | None:
        """Form the candidates and read the profile; return the decision of an earlier run that has ended."""
        tuner = self._tuner
        firsts = [tuner.start_mb, self._default_mb]
        found = self._candidates = find_candidates(Range(tuner.low_mb, tuner.high_mb), self._groups_of, firsts)
        counts = [candidate.num_groups for candidate in found]
        logger.info(
            f"the tuner looks for the fastest of {len(found)} sizes from {found[0].mb:.3g} to {found[-1].mb:.3g} MB, "
            f"{max(counts)} to {min(counts)} groups (from {tuner.low_mb:.3g} to {tuner.high_mb:.3g} MB nothing else "
            f"would change)"
        )
        profile = self._profile
        if profile is not None and (entry := profile.find(self._job)) is not None:
            if entry.chosen is not None and candidate_of(found, entry.chosen) is not None:
                logger.info("%.3g MB, as found before (%s)", entry.chosen, profile.path)
                return Decision("stop", entry.chosen)
            self._former = self._usable_trials(entry)
            logger.info("%d trials of an earlier run (%s)", len(self._former), profile.path)
        importlib.import_module("ddp_hooks.tuning.surrogate")  # takes seconds, and disturbs no trial yet
        return None

    def _usable_trials(self, entry: Entry) -> tuple[Trial, ...]:
        """Return the trials of today's candidates; checks of a search that chose elsewhere count as its search."""
        known = [trial for trial in entry.trials if candidate_of(self._candidates, trial.mb) is not None]
        ended = entry.chosen is not None or len(known) < len(entry.trials)
        return tuple(replace(trial, role="search") if ended else trial for trial in known)

    def _next(self, trials: Sequence[Trial]) -> Decision:
        times_s: dict[int, list[float]] = {}  # of each candidate's trials, in their order
        for trial in trials:
            index = candidate_of(self._candidates, trial.mb)
            if index is not None:
                times_s.setdefault(index, []).append(trial.step_s)
        default = candidate_of(self._candidates, self._default_mb)
        start = candidate_of(self._candidates, self._tuner.start_mb)
        assert default is not None and start is not None
        num_checks = sum(trial.role == "check" for trial in trials)
        following = self._next_trial(times_s, (start, default)) if num_checks == 0 else None
        if following is not None:
            return Decision("search", self._candidates[following].mb)
        return self._next_check(times_s, default, num_checks)

    def _next_trial(self, times_s: dict[int, list[float]], firsts: Sequence[int]) -> int | None:
        for first in firsts:
            if first not in times_s:
                return first
        if len(times_s) >= self._tuner.max_trials:
            return None
        observed = [Observation(index, 1 / statistics.median(values)) for index, values in times_s.items()]
        return propose(self._candidates, self._tuner, observed)

    def _next_check(self, times_s: dict[int, list[float]], default: int, num_checks: int) -> Decision:
        """Measure the best size of the search and the default in turns; choose the better one in the end."""
        best = min(times_s, key=lambda index: times_s[index][0])
        if best == default:
            return Decision("stop", self._default_mb)
        if num_checks < 2 * _NUM_CHECKS:
            return Decision("check", self._candidates[(default, best)[num_checks % 2]].mb)
        best_s, default_s = (statistics.median(times_s[index][-_NUM_CHECKS:]) for index in (best, default))
        best_mb = self._candidates[best].mb
        logger.info("%.3g MB take %.4g s per step, %.3g MB %.4g s", best_mb, best_s, self._default_mb, default_s)
        return Decision("stop", self._candidates[best if best_s < default_s else default].mb)
