"""The benchmark of coordination: a page with everything, targets as counts, and formulas that are those of the code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_hooks.comm import num_rounds
from recipes.benchmarks import coordination
from recipes.benchmarks.coordination_fabric import NEGOTIATED, Costs, agree_on_fabric, formula_s, planner_s
from recipes.benchmarks.coordination_report import report_of
from recipes.benchmarks.harness import Run
from recipes.common.pages import Origin


@pytest.mark.slow
def test_a_quick_run_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    coordination.BENCHMARK.run(["--quick", "--output", str(tmp_path / "out"), "--markdown", str(page)])
    assert "tensors per step" in capsys.readouterr().out
    text = page.read_text()
    assert "nothing in steady state: met" in text
    for name in ("control", "ranks", "groups", "sizes"):
        assert f"(page_{name}.png)" in text and (tmp_path / f"page_{name}.png").stat().st_size > 0
    assert "python -m recipes.benchmarks.coordination --quick" in text
    report = report_of(Run.load(tmp_path / "out" / "coordination.json").results)
    num_tensors = report["control"]["job"]["num_tensors"]
    ((measured),) = report["control"]["measured"]
    for windows in measured["windows"].values():
        assert list(windows) == list(coordination.VARIANTS)
        assert all(f"| 2 | {name} |" in text for name in coordination.VARIANTS)
        for each in windows["verified"]:
            assert each["all"]["messages"] == each["all"]["bytes"] == 0
        for each in windows["bitvector"]:
            for whose in ("first", "most"):
                assert each[whose]["messages"] == each[whose]["cycles"] * num_rounds(2) > 0
                assert each[whose]["bytes"] <= each[whose]["messages"] * (-(-num_tensors // 8) + 8)
        for name in ("coordinator", "hierarchical"):
            for each in windows[name]:
                assert each["all"]["bytes"] > 10 * windows["bitvector"][0]["all"]["bytes"], "all of it every time"
    grouped = report["grouping"]["windows"]
    assert [grouped[number][0]["collectives"] for number in ("1",)] == [1]
    assert grouped["2"][0]["collectives"] <= 2
    assert all(sum(w["sizes"].values()) == pytest.approx(w["collectives"]) for each in grouped.values() for w in each)
    beyond = [point for point in report["fabric"]["points"] if point["ranks"] == 64]
    assert [point["fabric"] is None for point in beyond] == [True, True, False], "requests travel among few only"


def test_what_was_measured_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three workers, made up: what misses its target is said to."""
    costs = {"messages": 4.0, "bytes": 400.0, "cycles": 1.0, "control_s": 0.002, "control_cpu_s": 5e-4, "step_s": 0.1}
    window = dict.fromkeys(("first", "most", "all"), costs)
    job = {"num_tensors": 160, "step_s": 0.1, "patterns": ["burst"], "variants": ["bitvector", "verified"]}
    grouped = {"0": [{"step_s": 2.0, "collectives": 3.0, "cycles": 3.0, "sizes": {"25": 1.0, "3": 2.0}}]}
    windows = {"burst": {"bitvector": [window], "verified": [window]}}
    results: list[dict[str, Any]] = [
        {"kind": "control", "workers": 8, "rate": None, "job": job, "windows": windows},
        {"kind": "fabric", "costs": {"alpha_s": 5e-6, "handling_s": 5e-6}, "points": []},
        {"kind": "grouping", "model": "tiny", "group_workers": 2, "num_tensors": 3, "windows": grouped},
    ]
    saved, page = tmp_path / "saved.json", tmp_path / "page.md"
    Run(Origin("python -m …", "now", {}), results).save(saved)
    coordination.BENCHMARK.run(["--results", str(saved), "--markdown", str(page)])
    text = page.read_text()
    assert "Verified schedule, nothing in steady state: not met, 400 messages or bytes." in text
    assert "Bitvector, at most 28 bytes: not met, 100 bytes." in text
    assert "messages per rank and cycle: not met." in text
    assert "at 8 workers, all tensors asked for at once, from beginning to end: not met, 2.00%." in text
    assert "at 8 workers, all tensors asked for at once, of the processor: met, 0.50%." in text


@pytest.mark.parametrize("variant", NEGOTIATED)
def test_the_formula_is_what_the_fabric_takes(variant: str) -> None:
    costs = Costs(alpha_s=3e-6, handling_s=7e-6)
    for ranks in (*range(1, 20), 63, 64, 65):
        found = agree_on_fabric(variant, ranks, 3, costs)
        assert found.seconds == pytest.approx(formula_s(variant, ranks, costs)), ranks


def test_bytes_of_a_bitvector() -> None:
    for ranks in (2, 5, 64):
        found = agree_on_fabric("bitvector", ranks, 160, Costs())
        assert found.sent_bytes == found.received_bytes <= num_rounds(ranks) * (160 // 8 + 8)


def test_formulas_of_code_and_planner_have_one_shape() -> None:
    """Where there are many ranks: with a coordinator they are nearly the same, along a tree in proportion."""
    costs, counts = Costs(), (1024, 4096, 27600)
    ratios = {
        name: [formula_s(name, each, costs) / planner_s(name, each, costs) for each in counts] for name in NEGOTIATED
    }
    assert ratios["coordinator"] == pytest.approx([1] * 3, rel=0.05)
    assert max(ratios["hierarchical"]) / min(ratios["hierarchical"]) < 1.1
    assert ratios["bitvector"] == pytest.approx([1] * 3), "since handling takes as long as a message here"

