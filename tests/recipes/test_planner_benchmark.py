"""The planner's benchmark: what is counted as close and as ordered, and a page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipes.benchmarks import planner
from recipes.benchmarks.harness import Run
from recipes.benchmarks.planner import Compared, is_ordered


def test_times_that_are_too_close_have_no_order() -> None:
    def compared(*times: tuple[float, float], name: str = "topk") -> list[Compared]:
        return [Compared(name, "", measured, measured, measured, predicted) for measured, predicted in times]

    assert is_ordered(compared((1.0, 1.1), (2.0, 1.2)))
    assert not is_ordered(compared((1.0, 1.2), (2.0, 1.1)))
    assert is_ordered(compared((1.0, 1.2), (1.02, 1.1)))
    assert is_ordered(compared((1.0, 1.2), (2.0, 1.1), name="dear")), "modes of one strategy"
    first, second = compared((1.0, 1.2), (2.0, 1.1))
    assert is_ordered([replace(first, slowest_s=2.1), second]), "what one window says, another one denies"
    assert not is_ordered([replace(first, slowest_s=1.9), second])


@pytest.mark.slow
def test_quick_run_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planner.BENCHMARK.run(["--quick", "--loopback", "--output", str(tmp_path)])
    assert "Predicted and measured" in capsys.readouterr().out
    path, page = tmp_path / "planner.json", tmp_path / "planner.md"
    (run,) = Run.load(path).results
    assert set(run["windows"]) == set(planner.VARIANTS)
    assert [each.predicted_s > 0.01 for each in planner.compare(run)] == [True] * 4
    planner.BENCHMARK.run(["--results", str(path), str(path), "--markdown", str(page)])
    text = page.read_text()
    assert text.count("| tiny | 2 | loopback |") == 2 and "of 2 combinations" in text
    assert "python -m recipes.benchmarks.planner --quick" in text
    assert (tmp_path / "planner.png").stat().st_size > 10_000
