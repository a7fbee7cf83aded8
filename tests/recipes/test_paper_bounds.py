"""The DeAR paper's bounds: its equations agree with one another, and with its tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.benchmarks import workloads
from recipes.benchmarks.steps import bounds_of
from recipes.paper import bounds

GBIT = 1e9 / 8  # bytes per second


@given(forward_s=st.floats(0.01, 10), gather_s=st.floats(0.01, 100))
def test_gain_over_all_reduce_is_equation_9(forward_s: float, gather_s: float) -> None:
    baseline = bounds.baseline_bound_s(forward_s, 2 * forward_s, 2 * gather_s)
    dear = bounds.dear_bound_s(forward_s, 2 * forward_s, gather_s, gather_s)
    if gather_s <= forward_s:
        gain = 0.0
    elif gather_s <= 2 * forward_s:
        gain = gather_s - forward_s
    else:
        gain = forward_s
    assert baseline - dear == pytest.approx(gain, abs=1e-9)


@pytest.mark.quick("resnet50-*", "bert-*")
@pytest.mark.parametrize(
    ("model", "speedup", "million_parameters"),
    [("resnet50", 61.6, 25.6), ("densenet201", 64, 20.0), ("bert", 25.5, 110.1)],
)
def test_compute_times_follow_from_table_2(model: str, speedup: float, million_parameters: float) -> None:
    half_s = million_parameters * 4e6 / (10 * GBIT)
    compute_s = bounds.compute_from_max_speedup(speedup, 64, half_s)
    assert workloads.load(model).compute_s == pytest.approx(compute_s, abs=0.0005)


@given(compute_s=st.floats(0.01, 10), half_s=st.floats(0.01, 10), workers=st.integers(2, 64))
def test_equation_6_inverts(compute_s: float, half_s: float, workers: int) -> None:
    speedup = bounds.max_speedup(compute_s, workers, half_s)
    found_s = bounds.compute_from_max_speedup(min(speedup, workers), workers, half_s)
    if speedup < workers * (1 - 1e-9):
        assert found_s == pytest.approx(compute_s, rel=1e-6)
    else:  # everything hidden: only a lower bound is known
        assert found_s <= compute_s * (1 + 1e-6)


def test_impossible_speedup_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(0, 4\], got 5"):
        bounds.compute_from_max_speedup(5, 4, 1.0)


def test_resnet50_at_1_gbit_is_bound_by_its_link() -> None:
    found, slower = (bounds_of(workloads.load("resnet50"), 4, 4, rate) for rate in (GBIT, 0.95 * GBIT))
    assert found["dependency"] == pytest.approx(1.23, abs=0.005)
    assert found["eq7"] == pytest.approx(1.23, abs=0.005)
    assert slower["dependency"] > found["dependency"]
