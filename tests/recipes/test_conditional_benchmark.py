"""The benchmark of conditional networks makes a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.benchmarks import conditional
from recipes.benchmarks.harness import Run


@pytest.mark.slow
def test_the_benchmark_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    conditional.BENCHMARK.run(["--quick", "--loopback", "--output", str(tmp_path), "--markdown", str(page)])
    assert "Every rank uses two branches" in capsys.readouterr().out
    results = Run.load(tmp_path / "conditional.json").results
    assert [result["choice"] for result in results] == ["step", "rank"]
    for result in results:
        assert len({windows[-1]["digest"] for windows in result["windows"].values()}) == 1, "all of them train the same"
        sent_mb = result["windows"]["coordinated"][-1]["sent_mb"]
        assert 0 < sent_mb * 1e6 < result["parameter_bytes"], "what two ranks all-reduce, and less"
    text = page.read_text()
    assert text.count("| coordinated |") == 2 and "python -m recipes.benchmarks.conditional --quick" in text
