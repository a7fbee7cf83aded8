"""The benchmark of compiled models: names that are refused, ratios of the right rows, and a run from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.benchmarks import compiled
from recipes.benchmarks.compiled import CompiledVariant, parse
from recipes.benchmarks.harness import Run


def test_names() -> None:
    assert parse("dear-5mb:blocks") == CompiledVariant("dear", 5.0, "blocks")
    with pytest.raises(ValueError, match="ddp-<size>mb:whole"):
        parse("dear-5mb")


def test_ratios_are_to_the_fastest_ddp_that_is_compiled() -> None:
    seconds = {"ddp-5mb:eager": 1.0, "ddp-5mb:whole": 3.0, "ddp-25mb:blocks": 2.0, "dear-5mb:whole": 1.6}
    windows = {name: [{"step_s": value + more, "graphs": 7} for more in (0.0, 0.1)] for name, value in seconds.items()}
    sizes = {"workers": 2, "rate": None, "tokens": 64, "num_parameters": 1e6, "backend": "inductor"}
    rows = {row[0]: row for row in compiled.table_of({"windows": windows, **sizes}).rows}
    assert rows["dear-5mb:whole"][1:] == ["1.650", "1.600–1.700", "1.242", "7"]
    assert rows["ddp-25mb:blocks"][3] == "1.000"


@pytest.mark.slow
def test_quick_run_on_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "compiled.md"
    compiled.BENCHMARK.run(["--quick", "--loopback", "--output", str(tmp_path), "--markdown", str(page)])
    (result,) = Run.load(tmp_path / "compiled.json").results
    assert set(result["windows"]) == {"ddp-25mb:whole", "dear-25mb:whole", "dear-25mb:blocks"}
    assert all(window["graphs"] > 0 for windows in result["windows"].values() for window in windows)
    assert "graphs" in capsys.readouterr().out and "| dear-25mb:blocks |" in page.read_text()
