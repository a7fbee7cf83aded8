"""Searches replayed on a recorded curve: how many trials each needs to come near the best size."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from ddp_hooks import BucketTuner
from ddp_hooks.tuning.candidates import Candidate, Groups, Range, candidate_of, find_candidates
from ddp_hooks.tuning.search import propose
from ddp_hooks.tuning.surrogate import Observation

NEAR = 0.03  # of the best

SearchName: TypeAlias = Literal["gp", "random", "grid"]


@dataclass(frozen=True)
class Curve:
    """Seconds per step by size, between recorded sizes interpolated by their logarithm.

    Args:
        sizes_mb: ascending.
        steps_s: of each size, seconds per step.
        spread: by which repeated windows of one size differ, as a part: what a trial may be wrong by.
    """

    sizes_mb: tuple[float, ...]
    steps_s: tuple[float, ...]
    spread: float

    @staticmethod
    def of(grid: Sequence[Mapping[str, Any]]) -> Curve:
        """From what the benchmark has recorded."""
        ordered = sorted(grid, key=lambda point: point["mb"])
        medians = [statistics.median(point["steps_s"]) for point in ordered]
        pairs = zip(ordered, medians, strict=True)
        parts = [abs(value / median - 1) for point, median in pairs for value in point["steps_s"]]
        return Curve(tuple(point["mb"] for point in ordered), tuple(medians), statistics.mean(parts))

    def step_s(self, mb: float) -> float:
        """Seconds per step with a size."""
        if mb <= self.sizes_mb[0]:
            return self.steps_s[0]
        for (low, low_s), (high, high_s) in zip(self._points(), self._points()[1:], strict=False):
            if mb <= high:
                return low_s + (high_s - low_s) * math.log(mb / low) / math.log(high / low)
        return self.steps_s[-1]

    def _points(self) -> list[tuple[float, float]]:
        return list(zip(self.sizes_mb, self.steps_s, strict=True))


def trials_needed(
    curve: Curve,
    search: SearchName,
    seed: int,
    max_trials: int = 40,
    start_mb: float | None = None,
    near: float = NEAR,
) -> int:
    """Trials until one of a size within 3 % (``near``) of the best was made; one more than allowed if none was.

    Every search begins with ``start_mb``, or with 25 MB, as the tuner does. What it is told is wrong by the recorded
    spread. ``"gp"`` is the tuner's own search; ``"random"`` and ``"grid"`` try the sizes in an order of their own.
    """
    tuner = BucketTuner(seed=seed, max_trials=max_trials, min_gain=0.0)
    if start_mb is not None:
        tuner = replace(tuner, start_mb=start_mb)
    candidates = candidates_of(tuner)
    order = order_of(search, len(candidates), seed, max_trials)
    best_s = min(curve.step_s(candidate.mb) for candidate in candidates)
    dice = random.Random(seed)
    observed = list[Observation]()
    following = candidate_of(candidates, tuner.start_mb)
    while following is not None and len(observed) < max_trials:
        step_s = curve.step_s(candidates[following].mb)
        if step_s <= (1 + near) * best_s:
            return len(observed) + 1
        observed.append(Observation(following, 1 / (step_s * (1 + curve.spread * dice.gauss(0, 1)))))
        if search == "gp":
            following = propose(candidates, tuner, observed)
        else:
            tried = {observation.candidate for observation in observed}
            following = next((index for index in order if index not in tried), None)
    return max_trials + 1


def order_of(search: SearchName, number: int, seed: int, max_trials: int) -> list[int]:
    """Order of trials without a model: by chance, or evenly spread from the smallest size on."""
    if search == "random":
        return random.Random(seed).sample(range(number), number)
    count = min(max_trials, number)
    return [round(i * (number - 1) / max(1, count - 1)) for i in range(count)]


def candidates_of(tuner: BucketTuner) -> list[Candidate]:
    """All sizes of the tuner's range, as if each made other groups."""
    return find_candidates(Range(tuner.low_mb, tuner.high_mb), lambda mb: Groups(1, mb), [tuner.start_mb])
