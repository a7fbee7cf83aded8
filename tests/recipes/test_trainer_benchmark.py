"""The Trainers' benchmark: ratios of the right rows, and a run from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.benchmarks import trainer
from recipes.benchmarks.harness import Run


def test_ratios_are_to_the_fastest_plain_one() -> None:
    seconds = {"plain": 3.0, "plain, 5 MB buckets": 2.0, "dear": 1.6}
    windows = {name: [{"step_s": value, "loss": 9.0}] * 2 for name, value in seconds.items()}
    result = {"workers": 2, "rate": None, "tokens": 64, "num_parameters": 1e6, "windows": windows}
    rows = {row[0]: row for row in trainer.table_of(result).rows}
    assert rows["dear"][1:] == ["1.600", "1.600–1.600", "1.250", "9.0000"]
    assert rows["plain, 5 MB buckets"][3] == "1.000"


@pytest.mark.slow
def test_quick_run_on_loopback(tmp_path: Path) -> None:
    page = tmp_path / "trainer.md"
    trainer.BENCHMARK.run(["--quick", "--loopback", "--output", str(tmp_path), "--markdown", str(page)])
    (result,) = Run.load(tmp_path / "trainer.json").results
    assert set(result["windows"]) == set(trainer.VARIANTS)
    losses = {name: windows[-1]["loss"] for name, windows in result["windows"].items()}
    assert losses["dear"] == pytest.approx(losses["plain"], rel=1e-5)
    assert "| dear |" in page.read_text()
