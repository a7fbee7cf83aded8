"""What can be tried: sizes that make different groups, and numbers of lanes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddp_hooks.tuning.config import Scale

_NUM_SIZES = 64  # that are looked at


class Groups(NamedTuple):
    """What a size makes.

    Args:
        num_groups: how many.
        members: what is in which; equal if nothing would change.
    """

    num_groups: int
    members: Hashable


class Setting(NamedTuple):
    """What a trial tries."""

    mb: float  # largest group, in MiB
    lanes: int

    def __str__(self) -> str:
        return f"{self.mb:.3g} MB, {self.lanes} lane{'s' if self.lanes > 1 else ''}"


@dataclass(frozen=True)
class Candidate:
    """A setting that stands for all sizes that make the same groups.

    Args:
        setting: what is tried.
        low_mb, high_mb: sizes that make these groups, as far as was looked.
        num_groups: how many there are.
        position: of the setting in the unit square or interval that is searched.
    """

    setting: Setting
    low_mb: float
    high_mb: float
    num_groups: int
    position: tuple[float, ...]


class Range(NamedTuple):
    """Sizes on a scale.

    Args:
        low_mb, high_mb: its ends.
        scale: whether equal distances are equal ratios or equal differences.
    """

    low_mb: float
    high_mb: float
    scale: Scale

    def size_at(self, position: float) -> float:
        """The size at a position from 0 to 1."""
        if self.scale == "log":
            return self.low_mb * (self.high_mb / self.low_mb) ** position
        return self.low_mb + (self.high_mb - self.low_mb) * position

    def position_of(self, mb: float) -> float:
        """The reverse; sizes outside are moved to the nearer end."""
        inside = min(max(mb, self.low_mb), self.high_mb)
        if self.scale == "log":
            return math.log(inside / self.low_mb) / math.log(self.high_mb / self.low_mb)
        return (inside - self.low_mb) / (self.high_mb - self.low_mb)


def find_candidates(
    sizes: Range, groups_of: Callable[[float], Groups], firsts: Sequence[Setting], max_lanes: int | None
) -> list[Candidate]:
    """Settings that differ in what travels together, by size and then by lanes.

    Args:
        sizes: where to look.
        groups_of: the groups that a size makes. As sizes grow, equal groups are neighbours.
        firsts: settings that stand for their groups themselves, also outside of ``sizes``.
        max_lanes: numbers of lanes up to this; None: that of the first setting alone.
    """
    looked_at = {sizes.size_at(i / (_NUM_SIZES - 1)) for i in range(_NUM_SIZES)} | {first.mb for first in firsts}
    runs = [(groups, list(run)) for groups, run in itertools.groupby(sorted(looked_at), groups_of)]
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
    """One of a run of sizes; at an end of the range the one beside which groups begin to differ."""
    for mb in firsts:
        if mb in run:
            return mb
    if lowest:
        return run[-1]
    if highest:
        return run[0]
    return run[len(run) // 2]


def candidate_of(candidates: Sequence[Candidate], setting: Setting) -> int | None:
    """The index of the candidate whose groups and lanes a setting amounts to; None if there is none."""
    for index, candidate in enumerate(candidates):
        if candidate.setting.lanes == setting.lanes and candidate.low_mb <= setting.mb <= candidate.high_mb:
            return index
    return None


def by_candidate(
    candidates: Sequence[Candidate], measured: Iterable[tuple[Setting, float]]
) -> dict[int, list[float]]:
    """What was measured of each candidate, by its index, in order; of other settings nothing."""
    found: dict[int, list[float]] = {}
    for setting, value in measured:
        index = candidate_of(candidates, setting)
        if index is not None:
            found.setdefault(index, []).append(value)
    return found
