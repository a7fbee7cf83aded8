"""Which candidate to try next: expected improvement, or for comparison at random or one after the other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ddp_hooks.tuning.candidates import Candidate
from ddp_hooks.tuning.config import BucketTuner

if TYPE_CHECKING:
    from ddp_hooks.tuning.surrogate import Observation

_FILLING_TRIALS = 3  # with fewer, a Gaussian process only knows what is near to what was tried
_FEWEST_TRIALS = 5  # before what it expects is reason enough to end


class Search(Protocol):
    """Proposes candidates, each at most once."""

    def next(self, observed: Sequence[Observation]) -> int | None:
        """The next candidate, after at least one was measured; None if none is worth a trial."""


class GaussianProcessSearch:
    """The candidate with the largest expected improvement (zhang2023dear, section IV-B).

    Unlike the paper's, the third trial is in the middle of the widest gap between those before it.
    """

    def __init__(self, candidates: Sequence[Candidate], tuner: BucketTuner) -> None:
        self._positions = [candidate.position for candidate in candidates]
        self._tuner = tuner

    def next(self, observed: Sequence[Observation]) -> int | None:
        """See :class:`Search`."""
        from ddp_hooks.tuning.surrogate import believe  # seconds

        tried = {observation.candidate for observation in observed}
        untried = [index for index in range(len(self._positions)) if index not in tried]
        if not untried:
            return None
        if len(tried) < _FILLING_TRIALS:
            return self._middle_of_widest_gap(tried, untried)
        belief = believe(self._positions, observed, self._tuner.xi, self._tuner.seed)
        promised = max(belief.gain[index] for index in untried)
        if len(tried) >= _FEWEST_TRIALS and promised < self._tuner.min_gain:
            return None
        # Where the process expects the same everywhere, what is farthest from all that was tried.
        return max(untried, key=lambda i: (belief.improvement[i], self._distance(i, tried)))

    def _middle_of_widest_gap(self, tried: set[int], untried: Sequence[int]) -> int:
        """Of sizes; with as many lanes as before."""
        first = self._positions[min(tried)]
        edges = sorted({0.0, 1.0, *(self._positions[index][0] for index in tried)})
        low, high = max(itertools.pairwise(edges), key=lambda gap: gap[1] - gap[0])
        middle = ((low + high) / 2, *first[1:])
        return min(untried, key=lambda i: _squared_distance(self._positions[i], middle))

    def _distance(self, index: int, tried: set[int]) -> float:
        return min(_squared_distance(self._positions[index], self._positions[other]) for other in tried)


def _squared_distance(first: Sequence[float], second: Sequence[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(first, second, strict=True))


class RandomSearch:
    """Any candidate that was not tried."""

    def __init__(self, candidates: Sequence[Candidate], tuner: BucketTuner) -> None:
        self._order = random.Random(tuner.seed).sample(range(len(candidates)), len(candidates))

    def next(self, observed: Sequence[Observation]) -> int | None:
        """See :class:`Search`."""
        tried = {observation.candidate for observation in observed}
        return next((index for index in self._order if index not in tried), None)


class GridSearch:
    """As many candidates as trials are left, evenly spread over the range, from the smallest on."""

    def __init__(self, candidates: Sequence[Candidate], tuner: BucketTuner) -> None:
        count = min(tuner.max_trials, len(candidates))
        last = max(1, count - 1)
        self._order = list(dict.fromkeys(round(i * (len(candidates) - 1) / last) for i in range(count)))

    def next(self, observed: Sequence[Observation]) -> int | None:
        """See :class:`Search`."""
        tried = {observation.candidate for observation in observed}
        return next((index for index in self._order if index not in tried), None)


_SEARCHES: dict[str, Callable[[Sequence[Candidate], BucketTuner], Search]] = {
    "gp": GaussianProcessSearch,
    "random": RandomSearch,
    "grid": GridSearch,
}


def make_search(candidates: Sequence[Candidate], tuner: BucketTuner) -> Search:
    """The search that the settings ask for."""
    return _SEARCHES[tuner.search](candidates, tuner)
