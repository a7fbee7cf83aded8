"""The benchmark of compiled models: names that are refused, ratios of the right rows, and a run from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.benchmarks import compiled
from recipes.benchmarks.compiled_job import CompiledJob, CompiledVariant, parse


def test_names() -> None:
    assert parse("dear-5mb:blocks") == CompiledVariant("dear", 5.0, "blocks")
    with pytest.raises(ValueError, match="ddp-<size>mb:whole"):
        parse("dear-5mb")


def test_job_survives_its_file(tmp_path: Path) -> None:
    job = CompiledJob(("ddp-1mb:whole",), 2, 64, 64, "aot_eager", rounds=3)
    job.save(tmp_path / "job.json")
    assert CompiledJob.load(tmp_path / "job.json") == job


def test_ratios_are_to_the_fastest_ddp_that_is_compiled() -> None:
    seconds = {"ddp-5mb:eager": 1.0, "ddp-5mb:whole": 3.0, "ddp-25mb:blocks": 2.0, "dear-5mb:whole": 1.6}
    measured = {
        "windows": {name: [{"step_s": value}, {"step_s": value + 0.1}] for name, value in seconds.items()},
        "graphs": dict.fromkeys(seconds, 7),
    }
    rows = {row[0]: row for row in compiled.table_rows(measured)}
    assert rows["dear-5mb:whole"][1:] == ["1.650", "1.600–1.700", "1.242", "7"]
    assert rows["ddp-25mb:blocks"][3] == "1.000"


@pytest.mark.slow
def test_quick_run_on_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "compiled.md"
    compiled.main(["--quick", "--loopback", "--output", str(tmp_path), "--markdown", str(page)])
    result = json.loads((tmp_path / "compiled.json").read_text())
    assert set(result["windows"]) == {"ddp-25mb:whole", "dear-25mb:whole", "dear-25mb:blocks"}
    assert all(count > 0 for count in result["graphs"].values())
    assert "× compiled DDP" in capsys.readouterr().out and "| dear-25mb:blocks |" in page.read_text()
