"""The quickstart: its data, its arithmetic, and one short run on two local workers."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from ddp_hooks import Span
from recipes import quickstart
from recipes.cluster import ClusterUnavailable
from recipes.quickstart import Reading, Report, Result, Variant
from tests.support.recipes.images import make_folder

REPOSITORY = Path(__file__).parents[2]


# -- images -----------------------------------------------------------------------------------------------------------


def test_too_few_images_for_the_workers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", per_class=2)
    settings = quickstart.parse(["--workers=4", "--images", str(folder)])
    with pytest.raises(ValueError, match=r"at least 192 images for training \(48 for each of 4 workers\), got 5 in "):
        quickstart.images_for(settings)


# -- command line -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "3"], "--steps must be >= 4"),
        (["--workers", "0"], "--workers must be >= 1, got 0"),
        (["--images", "nowhere"], "one folder of images per class, got nowhere"),
    ],
)
def test_wrong_settings_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quickstart.parse(arguments)
    assert message in capsys.readouterr().err


# -- where it runs ----------------------------------------------------------------------------------------------------


class NoCluster:
    """Stands in for the cluster on a machine that lacks the rights."""

    def __init__(self, workers: int, rate: str) -> None:
        pass

    def __enter__(self) -> NoCluster:
        raise ClusterUnavailable("the emulated cluster needs rights")

    def __exit__(self, *_: object) -> None:
        pass


def test_without_the_cluster_it_runs_on_loopback_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[Sequence[str], int]] = []
    monkeypatch.setattr(quickstart, "Cluster", NoCluster)
    monkeypatch.setattr(quickstart, "run_on_loopback", lambda command, workers: started.append((command, workers)))
    quickstart.launch(quickstart.parse(["--workers=3"]))
    ((command, num_workers),) = started
    assert num_workers == 3
    assert "loopback" in command[-1]
    assert "loopback instead of the emulated cluster: the emulated cluster needs rights" in capsys.readouterr().err


def test_a_cluster_asked_for_by_name_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "Cluster", NoCluster)
    with pytest.raises(SystemExit, match="error: the emulated cluster needs rights"):
        quickstart.launch(quickstart.parse(["--network=cluster"]))


def test_a_wrong_rate_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"error: rate must .* got '1furlong'"):
        quickstart.launch(quickstart.parse(["--rate=1furlong"]))


# -- figures ----------------------------------------------------------------------------------------------------------


def variant_with(segments: list[list[float]], spans: Sequence[Span] = ()) -> Variant:
    """A variant whose steps ended at these times and took 3 CPU seconds and 100 bytes each."""
    network = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    variant = Variant("DeAR", network, network, optimizer, loop_spans=list(spans))
    variant.segments = [[Reading(t, 3.0 * i, 100.0 * i) for i, t in enumerate(times)] for times in segments]
    return variant


def test_measured_steps_lie_within_segments_after_the_first() -> None:
    variant = variant_with([[0.0, 9.0], [20.0, 21.0, 22.0], [50.0, 54.0]])
    assert [after.time_s - before.time_s for before, after in quickstart.steps_of(variant)] == [1.0, 1.0, 4.0]
    assert quickstart.median_step_s(variant) == 1.0


def test_typical_steps_are_near_the_median() -> None:
    variant = variant_with([[0.0, 9.0], [20.0, 29.0, 31.0, 33.0, 34.0], [50.0, 52.0]])
    timeline = quickstart.typical_steps(variant, num_steps=2)
    assert timeline.step_ends_s == [29.0, 31.0, 33.0]
    assert timeline.title == "DeAR: 2000 ms per step"


def test_typical_steps_of_a_run_with_short_segments() -> None:
    variant = variant_with([[0.0, 1.0], [2.0, 3.0], [4.0]])
    assert quickstart.typical_steps(variant, num_steps=3).step_ends_s == [2.0, 3.0]


def test_plain_ddp_waits_from_its_last_bucket_to_the_end_of_backward() -> None:
    loop = [
        Span("forward", "forward", 0.0, 1.0),
        Span("backward", "backward", 1.0, 5.0),
        Span("backward", "backward", 11.0, 15.0),
    ]
    travelled = [Span("all-reduce", f"all-reduce of bucket {i}", t, t + 2) for i, t in enumerate((1.5, 2.5, 12.5))]
    waits = quickstart.waits_for_all_reduce(travelled, loop)
    assert [(wait.start_s, wait.end_s) for wait in waits] == [(2.5, 5.0), (12.5, 15.0)]


REPORT = Report(
    where="an emulated cluster with links of 1gbit",
    loopback=False,
    images="scikit-learn's digits",
    workers=4,
    cores=2,
    steps=60,
    num_parameters=11_181_642,
    alone_s=0.25,
    results=[
        Result("plain DDP", 0.800, 0.550, 67.3e6, 0.21, 0.2345, 0.932),
        Result("DeAR", 0.640, 0.390, 67.4e6, 0.23, 0.2346, 0.935),
    ],
    float64_difference=5e-15,
    tolerance=1e-10,
    float32_difference=2e-2,
)


def printed(report: Report) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(quickstart.table_of(report))
    for paragraph in quickstart.explain(report):
        console.print(paragraph)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_report_says_what_was_found() -> None:
    text = printed(REPORT)
    for figure in ("800 ms", "640 ms", "550 ms", "390 ms", "67.3 MB", "210 ms", "0.2345", "93.5%", "yes: 5e-15"):
        assert figure in text
    assert "1.25 times as fast" in text
    assert "The weights agree" in text
    assert "Loopback" not in text


def test_report_says_when_weights_differ() -> None:
    text = printed(replace(REPORT, float64_difference=3e-4, loopback=True))
    assert "NO: 3e-04" in text
    assert "DO NOT AGREE" in text
    assert "Loopback" in text


# -- the whole thing --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)  # about 20 s on two idle cores
def test_run_on_two_local_workers(tmp_path: Path) -> None:
    script = Path(quickstart.__file__)
    run = subprocess.run(
        [sys.executable, str(script), "--workers=2", "--steps=4", "--network=loopback", f"--output={tmp_path}"],
        cwd=tmp_path,  # the recipe finds its neighbours from anywhere
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert run.returncode == 0, run.stderr
    for text in ("plain DDP", "DeAR", "step time", "exposed communication", "loopback", "The weights agree"):
        assert text in run.stdout
    assert "step" in run.stderr  # the progress bar

    found = json.loads((tmp_path / "result.json").read_text())
    assert found["agree"] is True
    assert found["float64_difference"] < 1e-10
    # Few steps, and rounding in another order: the float32 copies are close, not equal.
    assert found["float32_difference"] < 0.1
    plain, dear = found["results"]
    assert (plain["name"], dear["name"]) == ("plain DDP", "DeAR")
    for result in (plain, dear):
        assert result["step_s"] > 0
        assert result["cpu_s"] > 0
        assert 0 <= result["accuracy"] <= 1
        # Two workers send every gradient once: half in reduce-scatters, half in gathers. Of a single step's gathers
        # some are counted in its neighbours.
        assert result["sent_bytes"] > 0.4 * 4 * found["num_parameters"]
    assert dear["loss"] == pytest.approx(plain["loss"], abs=0.5)

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kinds = {event.get("cat") for event in events}
    assert {"forward", "backward", "optimizer", "all-reduce", "reduce-scatter", "all-gather"} <= kinds
    assert (tmp_path / "timelines.png").read_bytes().startswith(b"\x89PNG")
