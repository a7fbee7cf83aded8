"""The tuner's benchmark: a curve that is what was recorded, replays that count right, and a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.benchmarks import tuner
from recipes.benchmarks.harness import Run
from recipes.benchmarks.tuner_replay import Curve, trials_needed

VALLEY = Curve((1.0, 4.0, 10.0, 30.0, 100.0), (2.0, 1.2, 1.0, 1.3, 2.0), 0.01)


def test_curves_pass_through_what_was_recorded() -> None:
    grid = [{"mb": 10.0, "steps_s": [1.0, 1.1, 0.9]}, {"mb": 1.0, "steps_s": [2.0, 2.0, 2.0]}]
    curve = Curve.of(grid)
    assert (curve.step_s(1.0), curve.step_s(10.0)) == (2.0, 1.0)
    assert curve.step_s(10**0.5) == pytest.approx(1.5), "half way by the logarithm"
    assert (curve.step_s(0.1), curve.step_s(1000.0)) == (2.0, 1.0)
    assert curve.spread == pytest.approx(0.2 / 6)


def test_replays_count_trials() -> None:
    flat = Curve((1.0, 100.0), (1.0, 1.0), 0.0)
    assert trials_needed(flat, "gp", 0) == 1, "the size to begin with is as good as any"
    assert 2 <= trials_needed(VALLEY, "gp", 0) <= 10
    assert trials_needed(VALLEY, "grid", 0) > trials_needed(VALLEY, "gp", 0)
    assert trials_needed(VALLEY, "gp", 0, start_mb=10.0) == 1, "a prediction that is right is the first trial"
    slope = Curve((1.0, 25.0, 100.0), (1.0, 1.02, 1.5), 0.0)
    assert trials_needed(slope, "gp", 0) == 1 < trials_needed(slope, "gp", 0, near=0.01), "the bar counts"
    peak = Curve((1.0, 25.0, 99.0, 100.0), (2.0, 2.0, 2.0, 1.0), 0.0)
    assert trials_needed(peak, "grid", 0, max_trials=5) == 6, "one more than allowed: not found"


@pytest.mark.slow
def test_quick_run_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuner.BENCHMARK.run(["--quick", "--loopback", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "What was found, 2 workers, loopback" in printed and "Trials to come within 3 % / 1 %" in printed
    path = tmp_path / "tuner.json"
    (found,) = Run.load(path).results
    measured_mb = [point["mb"] for point in found["grid"]]
    assert found["trials"][0]["mb"] == found["predicted_mb"], "the search begins where the cost model says"
    assert {found["chosen_mb"], found["predicted_mb"]} <= set(measured_mb)
    assert all(len(point["steps_s"]) == 1 for point in found["grid"])
    page = tmp_path / "tuner.md"
    tuner.BENCHMARK.run(["--results", str(path), str(path), "--markdown", str(page)])
    text = page.read_text()
    assert text.count("| tiny |") == 4 and "python -m recipes.benchmarks.tuner --quick" in text
    assert (tmp_path / "tuner.png").stat().st_size > 10_000
