"""Sizes that make the same groups are one candidate, and the range ends where nothing changes any more."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hooks import BucketTuner
from ddp_hooks.tuning.candidates import Groups, Range, candidate_of, find_candidates


def groups_of_eight(mb: float) -> Groups:
    """Eight parts of 4 MB, fused while they fit."""
    per_group = min(8, max(1, int(mb / 4)))
    return Groups(math.ceil(8 / per_group), per_group)


def test_each_grouping_is_there_once() -> None:
    found = find_candidates(Range(1, 100), groups_of_eight, [25, 9.5])
    assert [candidate.num_groups for candidate in found] == [8, 4, 3, 2, 2, 2, 2, 1]
    assert len({groups_of_eight(candidate.mb) for candidate in found}) == len(found)


def test_the_range_ends_where_nothing_changes() -> None:
    found = find_candidates(Range(1, 100), groups_of_eight, [25, 9.5])
    assert 7 < found[0].mb < 8, "below 8 MB every part is alone: the largest such size stands for them"
    assert 32 <= found[-1].mb < 35, "from 32 MB on all travel together: the smallest such size stands for them"
    assert found[0].low_mb == 1 and found[-1].high_mb == pytest.approx(100)


def test_first_settings_stand_for_their_groups() -> None:
    found = find_candidates(Range(1, 100), groups_of_eight, [25, 150])
    assert {25, 150} <= {candidate.mb for candidate in found}
    assert found[-1].position == 1.0, "a size outside of the range lies at its end"
    index = candidate_of(found, 25)
    assert index is not None and found[index].mb == 25


@given(st.floats(0, 1), st.floats(0.01, 10), st.floats(1.1, 1000))
def test_positions_are_the_reverse_of_sizes(position: float, low_mb: float, ratio: float) -> None:
    sizes = Range(low_mb, low_mb * ratio)
    assert sizes.position_of(sizes.size_at(position)) == pytest.approx(position, abs=1e-6)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.floats(1, 100), st.floats(1, 100))
def test_every_size_is_a_candidates(parts: list[int], start_mb: float, default_mb: float) -> None:
    def groups_of(mb: float) -> Groups:
        groups: list[list[int]] = []
        for part in parts:
            if not groups or sum(groups[-1]) + part > mb:
                groups.append([])
            groups[-1].append(part)
        return Groups(len(groups), tuple(map(tuple, groups)))

    firsts = [start_mb, default_mb]
    found = find_candidates(Range(1, 100), groups_of, firsts)
    made = [groups_of(candidate.mb) for candidate in found]
    assert len(set(made)) == len(made)
    for first in firsts:
        index = candidate_of(found, first)
        assert index is not None and made[index] == groups_of(first)
    for candidate, groups in zip(found, made, strict=True):
        assert candidate.low_mb <= candidate.mb <= candidate.high_mb
        assert groups_of(candidate.low_mb) == groups_of(candidate.high_mb) == groups


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"low_mb": 0}, "low_mb must be > 0 and finite"),
        ({"low_mb": 30}, "start_mb must be from 30"),
        ({"high_mb": 20}, "start_mb must be from 1"),
        ({"xi": -1}, "xi must be >= 0"),
        ({"max_trials": 1}, "max_trials must be a whole number >= 2"),
        ({"steps_per_trial": 0}, "steps_per_trial must be a whole number >= 1"),
        ({"first_step": 1}, "first_step must be a whole number >= 2"),
        ({"min_gain": float("nan")}, "min_gain must be >= 0"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketTuner(**settings)  # type: ignore[arg-type]
