"""The benchmark of sharded tables: its workloads, and runs from end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recipes.benchmarks import embrace
from recipes.benchmarks import embrace_workloads as workloads
from recipes.benchmarks.embrace import SWEPT, VARIANTS
from recipes.benchmarks.embrace_workloads import MIB, make_ids
from recipes.benchmarks.harness import Run

# Table 1: model, embedding; Table 3: original, coalesced, prior; all in MiB.
PAPER = {
    "lm": (3186.5, 3099.5, 8.7, 6.9, 2.6),
    "gnmt": (739.1, 252.5, 26.0, 12.2, 5.8),
    "transformer": (1067.5, 263.4, 35.2, 16.6, 8.9),
    "bert": (417.7, 89.4, 36.0, 5.5, 3.2),
}


@pytest.mark.parametrize("model", workloads.PAPER_MODELS)
def test_sizes_are_those_of_the_paper(model: str) -> None:
    workload = workloads.load(model)
    size, embedding, *gradients = PAPER[model]
    assert workload.table_bytes / MIB == pytest.approx(embedding, rel=1e-3)
    assert (workload.table_bytes + workload.dense_bytes) / MIB == pytest.approx(size, rel=1e-3)
    sizes = [
        sum(getattr(table, count) * table.dim * 4 for table in workload.tables) / MIB
        for count in ("num_ids", "num_rows_used", "num_prior")
    ]
    assert sizes == pytest.approx(gradients, rel=0.01)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("model", workloads.PAPER_MODELS)
def test_ids_are_looked_up_as_often_as_in_the_paper(model: str, world_size: int) -> None:
    for table in workloads.load(model).tables:
        present, coming = ([make_ids(table, world_size, r, step).numpy() for r in range(world_size)] for step in (0, 1))
        anywhere = np.unique(np.concatenate(coming))
        assert all(len(ids) == table.num_ids and ids.max() < table.num_rows for ids in present)
        assert all(abs(len(np.unique(ids)) - table.num_rows_used) <= 1 for ids in present)
        prior = [np.isin(np.unique(ids), anywhere).sum() for ids in present]
        assert np.mean(prior) == pytest.approx(table.num_prior, rel=0.05)


def test_scaling_keeps_what_is_looked_up() -> None:
    whole, part = workloads.load("bert"), workloads.load("bert", scale=0.25)
    assert part.tables[0].dim == whole.tables[0].dim // 4
    assert part.tables[0].num_ids == whole.tables[0].num_ids
    assert part.compute_s == pytest.approx(whole.compute_s / 4)
    with pytest.raises(ValueError, match="model must be one of"):
        workloads.load("nothing")


@pytest.mark.slow
def test_every_variant_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    embrace.BENCHMARK.run(["--quick", "--loopback", "--output", str(tmp_path), "--markdown", str(page)])
    (measured,) = Run.load(tmp_path / "embrace.json").results
    assert list(measured["windows"]) == list(VARIANTS)
    assert all(window["sent_bytes"] > 0 for windows in measured["windows"].values() for window in windows)
    details = measured["details"]["2d"]
    assert details["num_prior_rows"] > 0 and details["num_delayed_rows"] > 0
    assert measured["details"]["horizontal"]["num_delayed_rows"] == 0
    text = page.read_text()
    assert all(f"| {name}" in text for name in VARIANTS) and "less stall than without" in text
    assert page.with_suffix(".png").exists()
    assert "2d" in capsys.readouterr().out


@pytest.mark.slow
def test_the_sweep(tmp_path: Path) -> None:
    embrace.BENCHMARK.run(["--quick", "--sweep", "--loopback", "--output", str(tmp_path)])
    (measured,) = Run.load(tmp_path / "embrace.json").results
    assert list(measured["sweep"]) == list(SWEPT)
    assert all(list(seconds) == ["0.1", "1.0"] for seconds in measured["sweep"].values())
    embrace.BENCHMARK.run(["--results", str(tmp_path / "embrace.json"), "--markdown", str(tmp_path / "page.md")])
    assert "| density | all-reduce |" in (tmp_path / "page.md").read_text()


def test_ratios_are_to_the_fastest_baseline() -> None:
    def windows(seconds: float) -> list[dict[str, float]]:
        return [{"step_s": seconds, "sent_bytes": 1e6, "cpu_s": 1.0}]

    names = {"ddp-dense": 4.0, "ddp-sparse": 2.0, "sharded": 2.0, "2d": 1.0}
    one = {"windows": {name: windows(s) for name, s in names.items()}, "tokens": 100, "compute_s": 0.5, "details": {}}
    assert embrace.best_baseline(one) == "ddp-sparse"
    rows = {row[0]: row for row in embrace.rows_of(one)}
    assert rows["2d"][embrace.COLUMNS.index("× best")] == "2.00"
    assert rows["ddp-dense*"][embrace.COLUMNS.index("tokens/s")] == "25"
    tables = [{"num_rows_used": 1000, "dim": 250}]
    one |= {"model": "bert", "rate": "1gbit", "workers": 2, "title": "bert, 2 workers, 1gbit, scale 1"}
    assert embrace.scaling_of([one]) == {}
    more = {**one, "workers": 4, "title": "bert, 4 workers, 1gbit, scale 1", "tokens": 200}
    assert embrace.scaling_of([one, more])["bert, 1gbit, scale 1"]["2d"] == {2: 100.0, 4: 200.0}
    workload = {"tables": tables, "block_numels": [125_000, 125_000]}
    one |= {"table_mb": 1.0, "dense_mb": 1.0, "goodput_bytes_per_s": 1e8, "workers": 4, "workload": workload}
    assert embrace.remarks(one)[-1] == "2D scheduling: 67% less stall than without."


def test_no_exact_step_is_shorter_than_its_bound() -> None:
    workload = {"tables": [{"num_rows_used": 1000, "dim": 250}], "block_numels": [125_000, 125_000]}
    one = {"workers": 4, "rate": "800mbit", "dense_mb": 1.0, "workload": workload, "compute_s": 0.5}
    assert embrace.least(one) == pytest.approx((3.0, 0.5 + 0.0075))  # the first block's half of 1.5 MB
    assert embrace.least(one | {"compute_s": 0.001}) == pytest.approx((3.0, 0.03))  # nothing hides the rest
    assert embrace.least(one | {"rate": None}) == (3.0, None)
