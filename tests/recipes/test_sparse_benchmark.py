"""The sparse all-reduce benchmark: its arithmetic, and a run from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddp_hooks.comm import Algorithm, Recv, Send, run_on_fabric
from recipes.benchmarks import sparse_allreduce
from recipes.benchmarks.harness import Run
from recipes.benchmarks.sparse_allreduce import COLUMNS, DENSE, SPARSE, lines_of
from recipes.benchmarks.sparse_worker import Recording
from recipes.common.pages import Origin


def test_a_recording_sends_the_same_messages_again() -> None:
    def ring(rank: int) -> Algorithm:
        for numel in (3, 5):
            yield [Recv((rank + 1) % 3, torch.empty(numel)), Send((rank + 2) % 3, torch.ones(numel))]

    recordings = [Recording() for _ in range(3)]
    first = run_on_fabric([recording.of(ring(rank)) for rank, recording in enumerate(recordings)])
    again = run_on_fabric([recording.again() for recording in recordings])
    assert [traffic.sent_bytes for traffic in again] == [traffic.sent_bytes for traffic in first] == [32] * 3
    assert [recording.sent_bytes for recording in recordings] == [32] * 3


def test_ratios_are_to_the_all_reduce_of_the_same_length() -> None:
    def row(name: str, numel: int, total_s: float) -> dict[str, object]:
        times = {"total_s": total_s, "compute_s": 0.5, "exchange_s": 0.25, "sent_bytes": 1e6}
        return {"name": name, "numel": numel, "density": 0.01, **times}

    rows = [row("all-reduce", 100, 4.0), row("all-reduce", 100, 6.0), row("spardl", 100, 1.0), row("spardl", 200, 1.0)]
    lines = {(line.name, line.numel): line for line in lines_of({"rows": rows})}
    assert lines["spardl", 100].speedup == 5.0 and lines["spardl", 200].speedup is None
    assert (lines["all-reduce", 100].fastest_s, lines["all-reduce", 100].slowest_s) == (4.0, 6.0)


def test_tables_fit_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rest = {"compute_s": 1.012, "exchange_s": 10.345, "sent_bytes": 1.2e9}
    times = [{"total_s": seconds, **rest} for seconds in (9.123, 9.456)]
    names = ["all-reduce", *SPARSE]
    rows = [{"name": name, "numel": 100_000_000, "density": 0.001, **row} for name in names for row in times]
    origin = Origin("", "", {})
    sparse_allreduce.page([Run(origin, [{"workers": 8, "rate": "100mbit", "rows": rows}])]).show()
    shown = capsys.readouterr().out
    assert all(word in shown for heading in COLUMNS for word in heading.split()) and "…" not in shown


@pytest.mark.parametrize(
    ("variant", "workers", "complaint"),
    [
        ("spardl-b3", "4", "3 teams, which cannot be of equal size with 4 workers"),
        ("spardl-r3", "6", "takes a power of two of teams; spardl-b3 takes any"),
        ("topk", "4", "got 'topk'"),
    ],
)
def test_variants_that_there_are_not(
    variant: str, workers: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        sparse_allreduce.BENCHMARK.run(["--workers", workers, "--variants", variant, "--loopback"])
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_quick_run_on_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "sparse.md"
    variants = [*DENSE, *SPARSE, "spardl-b2"]
    called = ["--quick", "--loopback", "--output", str(tmp_path), "--markdown", str(page), "--variants", *variants]
    sparse_allreduce.BENCHMARK.run(called)
    (network,) = Run.load(tmp_path / "sparse_allreduce.json").results
    assert [row["name"] for row in network["rows"]] == variants
    assert all(row["total_s"] > 0 for row in network["rows"])
    merged = tmp_path / "merged.md"
    results = [str(tmp_path / "sparse_allreduce.json")] * 2
    sparse_allreduce.BENCHMARK.run(["--results", *results, "--markdown", str(merged)])
    assert merged.read_text().count("## 2 workers") == 2 and merged.with_suffix(".png").exists()
    assert "powersgd" in capsys.readouterr().out and "spardl" in page.read_text()
