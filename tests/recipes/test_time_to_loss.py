"""The time-to-loss benchmark: names that are refused, runs that do not get there, and a run from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.benchmarks import time_to_loss
from recipes.benchmarks.harness import Run
from recipes.benchmarks.loss_worker import first_step_at


@pytest.mark.parametrize(
    ("variants", "complaint"),
    [
        (["topk"], "must be plain DDP"),
        (["ddp-25mb", "spardl-0.01"], "variant must be ddp-<size>mb"),
        (["ddp-25mb", "fsdp2"], "no hook of DDP"),
        (["ddp-25mb", "topk:size=3"], "no field size"),
    ],
)
def test_variants_that_cannot_be_compared(
    variants: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        time_to_loss.BENCHMARK.run(["--models", "tiny", "--steps", "3", "--loopback", "--variants", *variants])
    assert complaint in capsys.readouterr().err


def test_a_run_that_does_not_get_there_has_no_ratio() -> None:
    def run(seconds: float, loss: float) -> dict[str, object]:
        averaged = [1.0, 9.0, loss, 3.0]
        reached = first_step_at(2.0, averaged, window=2)
        times_s = [1.0, 2.0, seconds, 50.0]
        return {"step_s": 1.0, "times_s": times_s, "losses": averaged, "averaged": averaged, "reached": reached}

    runs = {"ddp-25mb": run(8.0, 2.0), "spardl-0.01": run(4.0, 1.9), "gtopk-0.01": run(12.0, 2.1)}
    place = {"model": "tiny", "workers": 2, "rate": None}
    rows = time_to_loss.table_of({"best": "ddp-25mb", "target": 2.0, "runs": runs, **place}).rows
    assert [row[-2:] for row in rows] == [["8.0", "1.00"], ["4.0", "2.00"], ["not reached", ""]]
    assert [row[1] for row in rows] == ["3", "3", ""]


@pytest.mark.slow
def test_quick_run_on_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "loss.md"
    time_to_loss.BENCHMARK.run(["--quick", "--loopback", "--output", str(tmp_path), "--markdown", str(page)])
    (found,) = Run.load(tmp_path / "time_to_loss.json").results
    assert set(found["runs"]) == {"ddp-25mb", "topk:density=0.05"} and found["best"] == "ddp-25mb"
    merged = tmp_path / "merged.md"
    time_to_loss.BENCHMARK.run(["--results", *[str(tmp_path / "time_to_loss.json")] * 2, "--markdown", str(merged)])
    assert merged.read_text().count("## tiny, 2 workers, loopback") == 2
    assert "variant" in capsys.readouterr().out and "topk:density=0.05" in page.read_text()
