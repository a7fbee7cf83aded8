"""Sizes that a search may try: those that form different groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

_NUM_SIZES = 64  # grid on which groups are compared


class Groups(NamedTuple):
    num_groups: int
    members: Hashable  # equal for two sizes that form the same groups


class Candidate(NamedTuple):
    """Size that stands for all sizes from ``low_mb`` to ``high_mb``, which form the same groups."""

    mb: float  # largest group, in MiB
    low_mb: float
    high_mb: float
    num_groups: int
    position: float  # in the searched unit interval


class Observation(NamedTuple):
    candidate: int  # index
    throughput: float  # steps per second


class Range(NamedTuple):
    """Sizes from ``low_mb`` to ``high_mb``; equal distances of positions are equal ratios of sizes."""

    low_mb: float
    high_mb: float

    def size_at(self, position: float) -> float:
        return self.low_mb * (self.high_mb / self.low_mb) ** position

    def position_of(self, mb: float) -> float:
        """Invert :meth:`size_at`; sizes outside of the range are moved to the nearer end."""
        inside = min(max(mb, self.low_mb), self.high_mb)
        return math.log(inside / self.low_mb) / math.log(self.high_mb / self.low_mb)


def find_candidates(sizes: Range, groups_of: Callable[[float], Groups], firsts: Sequence[float]) -> list[Candidate]:
    """Return the sizes with different groups, ascending; ``firsts`` stand for their groups themselves.

    As sizes grow, equal groups have to be neighbours. ``firsts`` may lie outside of the range.
    """
    grid = {sizes.size_at(i / (_NUM_SIZES - 1)) for i in range(_NUM_SIZES)} | set(firsts)
    runs = [(groups, list(run)) for groups, run in itertools.groupby(sorted(grid), groups_of)]
    candidates = []
    for index, (groups, run) in enumerate(runs):
        mb = _representative(run, firsts, index == 0, index == len(runs) - 1)
        candidates.append(Candidate(mb, run[0], run[-1], groups.num_groups, sizes.position_of(mb)))
    return candidates


def _representative(run: Sequence[float], firsts: Sequence[float], lowest: bool, highest: bool) -> float:
    """Choose one of a run of sizes; at an end of the range the size next to the other groups."""
    for mb in firsts:
        if mb in run:
            return mb
    if lowest:
        return run[-1]
    return run[0] if highest else run[len(run) // 2]


def candidate_of(candidates: Sequence[Candidate], mb: float) -> int | None:
    return next((i for i, candidate in enumerate(candidates) if candidate.low_mb <= mb <= candidate.high_mb), None)
