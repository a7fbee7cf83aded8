"""The search finds fast sizes in few trials, whatever units throughput has."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

import pytest

from ddp_hooks import BucketTuner
from ddp_hooks.tuning.candidates import Candidate, Groups, Range, candidate_of, find_candidates
from ddp_hooks.tuning.search import propose
from ddp_hooks.tuning.surrogate import Observation, fit_posterior

Curve = Callable[[float], float]  # size in MB -> steps per second

# Curves as one finds them: slow where sizes are small (latency), slow where they are large (nothing overlaps).
CURVES: dict[str, Curve] = {
    "small is best": lambda mb: 5.0 / (1 + 0.25 * (math.log(mb / 4) / math.log(5)) ** 2),
    "large is best": lambda mb: 5.0 / (1 + 0.25 * (math.log(mb / 60) / math.log(5)) ** 2),
    "a narrow peak": lambda mb: 4.0 + math.exp(-((math.log(mb / 9) / 0.6) ** 2)),
    "the larger the better": lambda mb: 4.0 + 0.2 * math.log(mb),
}


def all_candidates(tuner: BucketTuner) -> list[Candidate]:
    return find_candidates(Range(tuner.low_mb, tuner.high_mb), lambda mb: Groups(1, mb), [tuner.start_mb])


def in_random_order(candidates: Sequence[Candidate], tuner: BucketTuner, observed: Sequence[Observation]) -> int:
    return random.Random(tuner.seed).sample(range(len(candidates)), len(candidates))[len(observed)]


def in_order(candidates: Sequence[Candidate], tuner: BucketTuner, observed: Sequence[Observation]) -> int:
    return round(len(observed) * (len(candidates) - 1) / (tuner.max_trials - 1))


def trials_until_near(
    curve: Curve, tuner: BucketTuner, next_of: Callable[..., int | None] = propose, noise: float = 0.01
) -> int:
    """Trials until the best of them is within 3 % of the best there is; more than allowed if it never is."""
    candidates = all_candidates(tuner)
    best = max(curve(candidate.mb) for candidate in candidates)
    dice = random.Random(tuner.seed)
    observed: list[Observation] = []
    following = candidate_of(candidates, tuner.start_mb)
    while following is not None and len(observed) < tuner.max_trials:
        truth = curve(candidates[following].mb)
        observed.append(Observation(following, truth * (1 + noise * dice.gauss(0, 1))))
        if truth >= 0.97 * best:
            return len(observed)
        following = next_of(candidates, tuner, observed)
    return tuner.max_trials + 1


@pytest.mark.parametrize("name", CURVES)
def test_near_the_best_in_ten_trials(name: str) -> None:
    needed = [trials_until_near(CURVES[name], BucketTuner(seed=seed)) for seed in range(5)]
    assert statistics.median(needed) <= 10, needed
    assert max(needed) <= 10, needed


@pytest.mark.slow
def test_fewer_trials_than_by_chance_or_in_order() -> None:
    def total(next_of: Callable[..., int | None]) -> float:
        needed = [
            trials_until_near(curve, BucketTuner(seed=seed), next_of) for curve in CURVES.values() for seed in range(5)
        ]
        return statistics.mean(needed)

    assert total(propose) < total(in_random_order) and total(propose) < total(in_order)


def proposals(tuner: BucketTuner, measured: Callable[[float], float]) -> list[int]:
    candidates = all_candidates(tuner)
    observed = [Observation(40, measured(candidates[40].mb))]
    while len(observed) < 6 and (following := propose(candidates, tuner, observed)) is not None:
        observed.append(Observation(following, measured(candidates[following].mb)))
    return [observation.candidate for observation in observed]


@pytest.mark.parametrize("factor", [1000.0, 0.001])
def test_units_do_not_matter(factor: float) -> None:
    """Prevents: ``xi`` subtracted in steps per second, so that it explores a slow job all over and a fast one never."""
    tuner, curve = BucketTuner(min_gain=0.0), CURVES["a narrow peak"]
    assert proposals(tuner, lambda mb: factor * curve(mb)) == proposals(tuner, curve)


def test_more_xi_explores_more() -> None:
    positions = [(i / 20,) for i in range(21)]
    observed = [Observation(8, 4.0), Observation(10, 5.0), Observation(12, 4.1)]
    near, far = fit_posterior(positions, observed, 0.0, 0), fit_posterior(positions, observed, 2.0, 0)

    def share_of_the_ends(improvement: Sequence[float]) -> float:
        return sum(improvement[i] for i in (0, 1, 19, 20)) / sum(improvement)

    assert share_of_the_ends(far.improvement) > share_of_the_ends(near.improvement)


def test_posterior_follows_measurements() -> None:
    positions = [(i / 20,) for i in range(21)]
    posterior = fit_posterior(positions, [Observation(i, 3.0 + i / 10) for i in (0, 5, 10, 15)], 0.1, 0)
    assert max(range(21), key=lambda i: posterior.improvement[i]) > 15, "it grows beyond the best"
    assert posterior.improvement[2] < 0.01 > posterior.gain[2], "and not between two that are slow"
    assert 0.005 < posterior.gain[20] < 0.3 and all(gain >= 0 for gain in posterior.gain)


def test_it_ends_when_nothing_promises_more() -> None:
    tuner = BucketTuner(max_trials=60)
    candidates = all_candidates(tuner)
    observed = [Observation(40, 5.0)]
    while (following := propose(candidates, tuner, observed)) is not None:
        observed.append(Observation(following, 5.0 / (1 + 0.05 * abs(math.log(candidates[following].mb / 9)))))
    assert 4 <= len(observed) < 20


def test_nothing_is_tried_twice() -> None:
    tuner = BucketTuner(min_gain=0.0, max_trials=64)
    candidates = all_candidates(tuner)[:12]
    observed = [Observation(3, 1.0)]
    while (following := propose(candidates, tuner, observed)) is not None:
        observed.append(Observation(following, 1.0 + 0.1 * following))
    assert sorted(observation.candidate for observation in observed) == list(range(12))
