"""DeAR's figures: what the paper's own equations allow, orders that do not depend on a latency, and whole pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planning import Ddp, Network, simulate
from recipes.benchmarks.workloads import profile_of_layers
from recipes.paper import dear_fig5, dear_figures, page
from recipes.paper.bounds import baseline_bound_s, dear_bound_s
from recipes.paper.dear_figures import PLACES, perfect_gain, step_s
from recipes.paper.dear_table2 import TENSOR_WISE, the_papers_dear
from recipes.paper.models import ETHERNET_BYTES_S, NAMES, WORKERS, step_of
from recipes.paper.page import Claim
from recipes.paper.strategies import ByteScheduler


@pytest.mark.parametrize(
    ("claim", "distance", "difference"),
    [
        (Claim("x", 12.0, 6, 19, "%"), 0.0, "none"),
        (Claim("x", 25.0, 6, 19, "%"), 6.0, "+6.0 points"),
        (Claim("x", 3.0, 6, 19, "%"), -3.0, "-3.0 points"),
        (Claim.number("x", 1.1, 1.0), pytest.approx(0.1), "+10.0 %"),
        (Claim.at_least("x", 0.8, 1.0), pytest.approx(-0.2), "-20.0 %"),
        (Claim.at_least("x", 80.0, 1.0), 0.0, "none"),
        (Claim.at_most("x", 0.8, 0.9), 0.0, "none"),
    ],
)
def test_claims_say_how_far_they_are_from_the_paper(claim: Claim, distance: float, difference: str) -> None:
    assert claim.distance == distance
    assert claim.cells()[-1] == difference


def test_prose_is_taken_apart_by_headings(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("before\n\n## First\n\none\n\n## Second\ntwo\n### not a section\n")
    assert page.prose(tmp_path / "page.md") == {"": "before", "First": "one", "Second": "two\n### not a section"}


def test_what_the_schedule_may_gain_is_equation_9() -> None:
    for model in NAMES:
        step = step_of(model)
        gather_s = (WORKERS - 1) / WORKERS * step.num_bytes / ETHERNET_BYTES_S
        saved_s = min(max(0.0, gather_s - step.forward_s), step.forward_s)
        dear_s = max(step.forward_s, gather_s) + max(step.backward_s, gather_s)
        assert perfect_gain(model, PLACES[0]) == pytest.approx(1 + saved_s / dear_s)


@pytest.mark.slow
def test_without_fusion_latency_decides() -> None:
    whole, fifth, *_ = PLACES
    for model in ("resnet50", "densenet201"):
        for place in (whole, fifth):
            assert step_s(Ddp(TENSOR_WISE), model, place) > step_s(the_papers_dear(TENSOR_WISE), model, place)
        priority = ByteScheduler(credit=1, negotiates=True)
        assert step_s(priority, model, whole) > step_s(Ddp(TENSOR_WISE), model, whole)
        assert step_s(priority, model, whole) > step_s(ByteScheduler(credit=1), model, whole), "agreeing takes time"
        assert step_s(the_papers_dear(TENSOR_WISE), model, whole) > step_s(the_papers_dear(TENSOR_WISE), model, fifth)


def test_without_fusion_every_tensor_is_a_message() -> None:
    step, network = step_of("densenet201"), PLACES[0].described
    for strategy in (Ddp(TENSOR_WISE), the_papers_dear(TENSOR_WISE)):
        predicted = simulate(strategy, step, network)
        spans = predicted.spans
        lanes = [span.name for span in spans if span.track.startswith("lane")]
        sent = [name for name in lanes if name.startswith(("all-reduce of", "reduce-scatter of"))]
        assert len(sent) == len(predicted.step_ends_s) * len(step.tensors) == 4 * 604


def test_equation_9_allows_a_quarter_at_most() -> None:
    for gather_s in (0.5, 1.0, 1.5, 2.0, 3.0, 30.0):
        gain = baseline_bound_s(1.0, 2.0, 2 * gather_s) / dear_bound_s(1.0, 2.0, gather_s, gather_s)
        assert gain <= 1.25 + 1e-12
    assert baseline_bound_s(1.0, 2.0, 4.0) / dear_bound_s(1.0, 2.0, 2.0, 2.0) == 1.25


def test_nearby_layers_are_one_group() -> None:
    layers = [(0.01, 0.02, [2 * i, 2 * i + 1]) for i in range(8)]
    step = profile_of_layers(layers, [f"tensor {i}" for i in range(16)], [4000] * 16)
    network = Network(4, AlphaBeta(1e-5, 1e-9), native=True)
    for num_layers in (1, 4, 8):
        found = simulate(the_papers_dear(25.0, fusion_layers=num_layers), step, network)
        scatters = {span.name for span in found.spans if span.name.startswith("reduce-scatter")}
        assert len(scatters) == 8 // num_layers


@pytest.mark.slow
def test_the_command_makes_a_page_with_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    dear_figures.main(["--quick", "--markdown", str(path)])
    text, printed = path.read_text(), capsys.readouterr().out
    for number in (6, 7, 8, 9, 10, 11):
        assert f"## Fig. {number}: " in text and f"Fig. {number}: " in printed
        assert (tmp_path / f"page_fig_{number}.png").stat().st_size > 5_000
    assert text.count("*Simulated.*") == 6 and "ours, simulated | paper | difference" in text
    assert "python -m recipes.paper.dear_figures --markdown docs/results/page.md" in text


@pytest.mark.slow
def test_figure_5_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "fig5.md"
    dear_fig5.main(["--quick", "--loopback", "--markdown", str(path)])
    text = path.read_text()
    assert text.count("*Measured.*") == 2
    for size in ("16 KiB", "4 MiB"):
        for what in ("both halves ÷ all-reduce", "reduce-scatter ÷ both halves", "all-gather ÷ both halves"):
            assert f"| {size}: {what} |" in text
    assert (tmp_path / "fig5_fig_5_a.png").exists() and (tmp_path / "fig5_fig_5_b.png").exists()
