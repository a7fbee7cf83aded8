"""Settings that a search may try: sizes that form different groups, and numbers of lanes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_NUM_SIZES = 64  # grid on which groups are compared


class Groups(NamedTuple):
    """Groups that a size forms."""

    num_groups: int
    members: Hashable  # equal for two sizes that form the same groups


class Setting(NamedTuple):
    """Values that a trial applies."""

    mb: float  # largest group, in MiB
    lanes: int

    def __str__(self) -> str:
        return f"{self.mb:.3g} MB, {self.lanes} lane{'s' if self.lanes > 1 else ''}"


@dataclass(frozen=True)
class Candidate:
    """Setting that stands for all sizes from ``low_mb`` to ``high_mb``, which form the same groups."""

    setting: Setting
    low_mb: float
    high_mb: float
    num_groups: int
    position: tuple[float, ...]  # in the searched unit interval (size) or unit square (size, lanes)


class Observation(NamedTuple):
    """Measured throughput of a candidate."""

    candidate: int  # index
    throughput: float  # steps per second


class Range(NamedTuple):
    """Sizes from ``low_mb`` to ``high_mb``; equal distances of positions are equal ratios of sizes."""

    low_mb: float
    high_mb: float

    def size_at(self, position: float) -> float:
        """Return the size at a position from 0 to 1."""
        return self.low_mb * (self.high_mb / self.low_mb) ** position

    def position_of(self, mb: float) -> float:
        """Invert :meth:`size_at`; sizes outside of the range are moved to the nearer end."""
        inside = min(max(mb, self.low_mb), self.high_mb)
        return math.log(inside / self.low_mb) / math.log(self.high_mb / self.low_mb)


def find_candidates(
    sizes: Range, groups_of: Callable[[float], Groups], firsts: Sequence[Setting], max_lanes: int | None
) -> list[Candidate]:
    """Return settings with different groups or lanes, by size and then by lanes.

    Args:
        sizes: range of sizes.
        groups_of: groups that a size forms. As sizes grow, equal groups are neighbours.
        firsts: settings that stand for their groups themselves, also outside of ``sizes``.
        max_lanes: try 1 to ``max_lanes`` lanes and those of ``firsts``; None: those of ``firsts`` alone.
    """
    grid = {sizes.size_at(i / (_NUM_SIZES - 1)) for i in range(_NUM_SIZES)} | {first.mb for first in firsts}
    runs = [(groups, list(run)) for groups, run in itertools.groupby(sorted(grid), groups_of)]
    numbers = sorted({first.lanes for first in firsts} | set(range(1, (max_lanes or 0) + 1)))
    candidates = []
    for index, (groups, run) in enumerate(runs):
        mb = _representative(run, [first.mb for first in firsts], index == 0, index == len(runs) - 1)
        for lanes in numbers:
            position = [sizes.position_of(mb)]
            if len(numbers) > 1:
                position.append((lanes - numbers[0]) / (numbers[-1] - numbers[0]))
            candidates.append(Candidate(Setting(mb, lanes), run[0], run[-1], groups.num_groups, tuple(position)))
    return candidates


def _representative(run: Sequence[float], firsts: Sequence[float], lowest: bool, highest: bool) -> float:
    """Choose one of a run of sizes; at an end of the range the size next to the other groups."""
    for mb in firsts:
        if mb in run:
            return mb
    if lowest:
        return run[-1]
    return run[0] if highest else run[len(run) // 2]


def candidate_of(candidates: Sequence[Candidate], setting: Setting) -> int | None:
    """Return the index of the candidate with the groups and lanes of ``setting``; None if there is none."""
    for index, candidate in enumerate(candidates):
        if candidate.setting.lanes == setting.lanes and candidate.low_mb <= setting.mb <= candidate.high_mb:
            return index
    return None
