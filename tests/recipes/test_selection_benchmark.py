"""The benchmark of selections, from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recipes.benchmarks import selection


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    selection.main(["--numel", "1e5", "--density", "0.02", "--rounds", "1", "--markdown", str(page)])
    shown = capsys.readouterr().out
    names = ("ours", "abs().sum()", "torch.topk", *selection.with_ties(100, 2))
    assert all(name in shown and name in page.read_text() for name in names)


def test_vectors_are_what_they_are_called() -> None:
    vectors = selection.with_ties(10_000, 100)
    equal = {name: int(torch.unique(vector, return_counts=True)[1].max()) for name, vector in vectors.items()}
    assert equal.pop("random") < 10 and 8_800 < equal.pop("90 % equal") < 9_200
    assert equal == {"all zeros": 10_000, "all equal": 10_000, "fewer non-zeros than k, together": 9_950}
    assert vectors["fewer non-zeros than k, together"].nonzero().squeeze(1).diff().eq(1).all()


def test_ratios_are_of_medians() -> None:
    rows = selection.rows_of({"abs().sum()": [0.002, 0.004, 0.009], "ours": [0.002, 0.002, 0.010]})
    assert rows == [("abs().sum()", "4.0", "2.0–9.0", "1.00"), ("ours", "2.0", "2.0–10.0", "0.50")]
