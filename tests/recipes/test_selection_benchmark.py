"""The benchmark of selections, from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.benchmarks import selection


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    selection.main(["--numel", "1e5", "--density", "0.02", "--rounds", "1", "--markdown", str(page)])
    shown = capsys.readouterr().out
    assert all(name in shown and name in page.read_text() for name in ("ours", "abs().sum()", "torch.topk"))


def test_ratios_are_of_medians() -> None:
    rows = selection.rows_of({"abs().sum()": [0.002, 0.004, 0.009], "ours": [0.002, 0.002, 0.010]})
    assert rows == [("abs().sum()", "4.0", "2.0–9.0", "1.00"), ("ours", "2.0", "2.0–10.0", "0.50")]
