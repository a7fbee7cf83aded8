"""The demo: its arithmetic, where it runs, and one short run on two local workers."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from ddp_hooks import Span
from recipes.cluster import ClusterUnavailable
from recipes.demo import __main__ as demo
from recipes.demo.variants import Reading, Variant, waits_for_all_reduce
from recipes.demo.worker import last_steps, median_step_s, steps_of


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "--steps must be >= 4"),
        (["--workers", "0"], "--workers must be from 1 to 29, got 0"),
        (["--workers", "30"], "--workers must be from 1 to 29, got 30"),
    ],
)
def test_wrong_settings_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.parse(arguments)
    assert message in capsys.readouterr().err


# Where it runs ------------------------------------------------------------------------------------------


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Rates that workers were started with, on a machine without the rights for a cluster."""
    started: list[str | None] = []

    def run_job(measure: Any, job: Any, workers: int, rate: str | None) -> dict[str, Any]:
        if rate is not None:
            raise ClusterUnavailable("the emulated cluster needs rights")
        started.append(rate)
        return {}

    monkeypatch.setattr(demo, "run_job", run_job)
    return started


def test_without_the_cluster_it_runs_on_loopback_and_says_so(
    rates: list[str | None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "loopback" in demo.run(demo.parse(["--workers=3"]))["where"]
    assert rates == [None]
    assert "loopback instead of the emulated cluster: the emulated cluster needs rights" in capsys.readouterr().err


def test_a_cluster_asked_for_by_name_is_not_replaced(rates: list[str | None]) -> None:
    with pytest.raises(SystemExit, match="error: the emulated cluster needs rights"):
        demo.main(["--network=cluster"])
    assert rates == []


def test_a_wrong_rate_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"error: rate must .* got '1furlong'"):
        demo.main(["--rate=1furlong"])


# Figures ------------------------------------------------------------------------------------------------


def variant_with(segments: list[list[float]], spans: Sequence[Span] = ()) -> Variant:
    """Return a variant whose steps ended at these times and sent 100 bytes each."""
    network = nn.Linear(1, 1)
    variant = Variant("DeAR", network, network, torch.optim.SGD(network.parameters(), lr=0.1), spans=list(spans))
    variant.segments = [[Reading(t, 100.0 * i) for i, t in enumerate(times)] for times in segments]
    return variant


def test_measured_steps_lie_within_segments_after_the_first() -> None:
    variant = variant_with([[0.0, 9.0], [20.0, 21.0, 22.0], [50.0, 54.0]])
    assert [after.time_s - before.time_s for before, after in steps_of(variant)] == [1.0, 1.0, 4.0]
    assert median_step_s(variant) == 1.0


def test_picture_shows_the_last_steps() -> None:
    timeline = last_steps(variant_with([[0.0, 9.0], [20.0, 29.0, 31.0, 33.0, 35.0]]))
    assert timeline.step_ends_s == [29.0, 31.0, 33.0, 35.0] and timeline.title == "DeAR: 2000 ms per step"
    assert last_steps(variant_with([[0.0, 1.0], [2.0, 3.0]])).step_ends_s == [2.0, 3.0]


def test_plain_ddp_waits_from_its_last_bucket_to_the_end_of_backward() -> None:
    loop = [
        Span("forward", "forward", 0.0, 1.0),
        Span("backward", "backward", 1.0, 5.0),
        Span("backward", "backward", 11.0, 15.0),
    ]
    travelled = [Span("all-reduce", f"all-reduce of bucket {i}", t, t + 2) for i, t in enumerate((1.5, 2.5, 12.5))]
    waits = waits_for_all_reduce(travelled, loop)
    assert [(wait.start_s, wait.end_s) for wait in waits] == [(2.5, 5.0), (12.5, 15.0)]


@pytest.mark.parametrize("agree", [True, False])
def test_table_says_what_was_found(agree: bool) -> None:
    figures = {"sent_bytes": 67.3e6, "accuracy": 0.935}
    results = [
        {"name": "plain DDP", "step_s": 0.800, "exposed_s": 0.550, **figures},
        {"name": "DeAR", "step_s": 0.640, "exposed_s": 0.390, **figures},
    ]
    difference = 5e-15 if agree else 3e-4
    found = {"where": "a cluster", "images": "digits", "alone_s": 0.25, "results": results, "agree": agree}
    console = Console(file=io.StringIO(), width=200)
    demo.table_of({**found, "float64_difference": difference}, 4).show(console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for figure in ("800 ms", "640 ms", "550 ms", "390 ms", "67.3 MB", "93.5%", "1.25 times as fast"):
        assert figure in text
    assert ("yes: 5e-15" in text, "NO: 3e-04" in text, "DO NOT AGREE" in text) == (agree, not agree, not agree)


@pytest.mark.slow
@pytest.mark.timeout(240)  # about 20 s on two idle cores
def test_run_on_two_local_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--workers=2", "--steps=4", "--network=loopback", f"--output={tmp_path}"]) == 0
    said = capfd.readouterr()
    for text in ("step time", "exposed communication", "loopback", "The weights agree"):
        assert text in said.out
    assert "step" in said.err  # the progress bar

    found = json.loads((tmp_path / "result.json").read_text())
    assert found["agree"] is True and found["float64_difference"] < 1e-10
    plain, dear = found["results"]
    assert (plain["name"], dear["name"]) == ("plain DDP", "DeAR")
    for result in (plain, dear):
        assert result["step_s"] > 0 and 0 <= result["accuracy"] <= 1
        # Two workers send every gradient once: half in reduce-scatters, half in gathers. Of a single step's gathers
        # some are counted in its neighbours. ResNet-18 has 11.2 million parameters.
        assert result["sent_bytes"] > 0.4 * 4 * 11.2e6
    assert dear["accuracy"] == pytest.approx(plain["accuracy"], abs=0.2)

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert {"forward", "backward", "optimizer", "all-reduce", "reduce-scatter", "all-gather"} <= kinds
    assert (tmp_path / "timelines.png").read_bytes().startswith(b"\x89PNG")
