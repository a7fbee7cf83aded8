"""The time-to-loss benchmark: names that are refused, runs that do not get there, and a run from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.benchmarks import time_to_loss
from recipes.benchmarks.harness import Run
from recipes.benchmarks.time_to_loss import averaged, seconds_to_loss, steps_to


@pytest.mark.parametrize(
    ("variants", "steps", "complaint"),
    [
        (["topk"], "60", "must be plain DDP"),
        (["ddp-25mb", "spardl-0.01"], "60", "variant must be ddp-<size>mb"),
        (["ddp-25mb", "fsdp2-ext"], "60", "no hook of DDP"),
        (["ddp-25mb", "topk:size=3"], "60", "no field size"),
        (["ddp-25mb", "topk"], "70", "multiple of 20, at least 60, got 70"),
        (["ddp-25mb", "topk"], "40", "multiple of 20, at least 60, got 40"),
    ],
)
def test_what_cannot_be_compared(
    variants: list[str], steps: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        time_to_loss.BENCHMARK.run(["--models", "tiny", "--train-steps", steps, "--loopback", "--variants", *variants])
    assert complaint in capsys.readouterr().err


def test_steps_to_a_loss() -> None:
    losses = [9.0, 3.0, 3.0, 0.0, 1.0]
    assert averaged(losses) == pytest.approx([5, 2, 4 / 3]) and averaged(losses[:2]) == []
    assert steps_to(2.0, losses) == 80 and steps_to(1.0, losses) is None


def test_seconds_to_a_loss() -> None:
    """The fastest plain DDP counts; PowerSGD's first steps go at its pace."""
    slow, fast, powersgd, int4 = "ddp-5mb", "ddp-25mb", "ddp-powersgd", "dear:wire=int4"
    losses = {slow: [4, 3, 2], fast: [4, 3, 2], powersgd: [4, 4, 3, 2], int4: [4, 4, 4, 4]}
    step_s = {slow: [3.0, 5.0], fast: [2.0, 2.0], powersgd: [0.5, 0.5], int4: [0.1, 0.1]}
    curves = {name: {"losses": [float(loss) for loss in found]} for name, found in losses.items()}
    result = {"model": "tiny", "workers": 2, "rate": None, "steps": 60, "num_parameters": 10, "curves": curves}
    result["step_s"] = step_s
    assert seconds_to_loss(result) == {slow: (60, 240), fast: (60, 120), powersgd: (80, 6 * 2 + 74 * 0.5)}
    rows = time_to_loss.table_of(result).rows
    assert [(row[1], row[-1]) for row in rows] == [
        ("60", "0.50"), ("60", "1.00"), ("80", f"{120 / 49:.2f}"), ("not reached", "")
    ]  # fmt: skip


@pytest.mark.slow
def test_quick_run_on_loopback(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "loss.md"
    command = ["--quick", "--loopback", "--output", str(tmp_path), "--markdown", str(page)]
    time_to_loss.BENCHMARK.run(command)
    (found,) = Run.load(tmp_path / "time_to_loss.json").results
    assert set(found["step_s"]) == {"ddp-25mb", "dear:wire=int8", "topk:density=0.05"}
    # DeAR's int8 learns as plain DDP does.
    dense, int8 = (found["curves"][name]["losses"] for name in ("ddp-25mb", "dear:wire=int8"))
    assert int8[2] == pytest.approx(dense[2], rel=0.01) and dense[2] < dense[0]
    assert "step 20:" in capfd.readouterr().err
    time_to_loss.BENCHMARK.run(command)
    assert "step 20:" not in capfd.readouterr().err, "trained again, in spite of the records"
    merged = tmp_path / "merged.md"
    time_to_loss.BENCHMARK.run(["--results", *[str(tmp_path / "time_to_loss.json")] * 2, "--markdown", str(merged)])
    assert merged.read_text().count("## tiny, 2 workers, loopback") == 2
    assert "variant" in capfd.readouterr().out and "topk:density=0.05" in page.read_text()
