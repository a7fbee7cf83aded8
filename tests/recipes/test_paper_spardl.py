"""SparDL's evaluation, repeated: times are those of the algorithms' own messages, and the page has every figure.

Prevents: a clock that times something else than what was sent, models that are not the paper's, texts that no number
supports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_hooks.comm import AlphaBeta
from recipes.benchmarks.sparse_costs import Cost
from recipes.paper import spardl, spardl_costs
from recipes.paper.page import run
from recipes.paper.spardl_costs import CASES, MAIN, NETWORKS, OKTOPK, SPARDL, TOPKA, TOPKDSA, WORKERS, Lab, formula_s
from recipes.paper.spardl_training import Method, Network, Task, Training, digits, messages_of_noise, train, vgg, words

LAB = Lab(quick=True)


def tiny() -> Task:
    """The model of a smoke test, which takes milliseconds."""
    return digits(32)


@pytest.mark.parametrize("network", NETWORKS, ids=str)
@pytest.mark.parametrize(
    ("method", "cost"),
    [
        (SPARDL, Cost(8, 4 * 13 / 14)),
        (TOPKA, Cost(4, 26)),
        (Method(teams=2), Cost(7, 2 * (24 / 14 + 2 / 14))),
    ],
    ids=str,
)
def test_seconds_are_those_of_table_1(method: Method, cost: Cost, network: Network) -> None:
    seconds = LAB.seconds(method, WORKERS, 20.1e6, network)
    assert seconds == pytest.approx(formula_s(cost, 20.1e6, network), rel=1e-6)


def test_what_follows_no_data_is_the_same_of_gradients() -> None:
    """A trained model's messages, multiplied, are those of noise; but for counts that 14 blocks cannot share evenly."""
    run_ = train(tiny(), SPARDL, WORKERS, 1)
    assert not SPARDL.follows_data
    assert run_.mean_s(20.1e6, MAIN[0]) == pytest.approx(LAB.seconds(SPARDL, WORKERS, 20.1e6, MAIN[0]), rel=0.05)


def test_messages_can_be_sent_again_and_again() -> None:
    messages = messages_of_noise(TOPKDSA, 5, 50)
    first, second = messages.seconds(AlphaBeta(1, 1)), messages.seconds(AlphaBeta(1, 1))
    assert first == second > 0
    assert messages.seconds(AlphaBeta(2, 2)) == pytest.approx(2 * first)
    assert messages.without_waiting_s(AlphaBeta(1, 1)) <= first


def test_entries_in_common_shorten_topkdsa() -> None:
    words_ = [messages_of_noise(TOPKDSA, 8, 200, 0.01, shared).seconds(AlphaBeta(0, 1)) for shared in (0.0, 0.9, 1.0)]
    assert words_[0] > words_[1] > words_[2]


def test_keeping_everything_is_dense_training() -> None:
    dense, sparse = (Training(tiny(), method, 4, 2) for method in (Method(None), Method(density=1.0)))
    for number in range(2):
        assert dense.step(number)[0] == pytest.approx(sparse.step(number)[0], rel=1e-4)
    for mine, other in zip(dense.parameters, sparse.parameters, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize("make", [lambda: replace(tiny(), lr=0.1), lambda: words(8)])
def test_small_models_learn(make: Callable[[], Task]) -> None:
    losses = train(make(), Method(density=0.1), 2, 40).losses
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_unadjusted_controller_sends_all_that_is_kept() -> None:
    fixed, adjusted = (train(tiny(), Method(teams=4, sag="b", adjusts=adjusts), 8, 6) for adjusts in (False, True))
    assert len(fixed.gathered) == len(adjusted.gathered) == 6
    assert all(few < many for few, many in zip(adjusted.gathered, fixed.gathered, strict=True))


@pytest.mark.parametrize(("depth", "million_parameters"), [(11, 9.2), (16, 14.7), (19, 20.1)])
def test_models_match_table_2(depth: int, million_parameters: float) -> None:
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in vgg(depth, 100).parameters())
    assert numel / 1e6 == pytest.approx(million_parameters, abs=0.1)


def test_computing_is_in_proportion_to_images_and_depth() -> None:
    assert spardl_costs.compute_s(16, 64) == pytest.approx(2 * spardl_costs.compute_s(16, 32))
    assert spardl_costs.compute_s(11, 32) < spardl_costs.compute_s(16, 32) < spardl_costs.compute_s(19, 32)


def test_names_in_section_4_c_are_exchanged() -> None:
    """As printed, computing would be negative; exchanged, it is positive, and nearly the same of both methods."""
    as_printed: list[float] = []
    exchanged: list[float] = []
    for case in CASES:
        dsa, a, _ = case.communication
        first, second, _ = case.training
        as_printed += [spardl_costs.implied_addition(dsa, second), spardl_costs.implied_addition(a, first)]
        pair = spardl_costs.implied_addition(dsa, first), spardl_costs.implied_addition(a, second)
        assert abs(pair[0] - pair[1]) < 0.06
        exchanged += pair
    assert min(as_printed) < 0 < min(exchanged)


def test_a_straight_line_through_figure_16() -> None:
    """T = A + B k with T(0.01) = 0.21 T(0.1)."""
    base, slope = (0.21 - 0.1) / 0.9, (1 - 0.21) / 0.09
    assert spardl.linear_next(0.21) == pytest.approx((base + 0.001 * slope) / (base + 0.01 * slope))


def test_less_is_faster_and_latency_stays() -> None:
    times = [spardl.with_density(LAB, 16, density, MAIN[1], 32) for density in spardl.DENSITIES]
    assert times == sorted(times, reverse=True)
    assert times[-1] > spardl_costs.compute_s(16, 32) + 8 * MAIN[1].alpha_s


@pytest.mark.slow
def test_ok_topk_and_topkdsa_cost_more_than_spardl() -> None:
    for network in NETWORKS:
        own = LAB.seconds(SPARDL, WORKERS, 20.1e6, network)
        assert all(LAB.seconds(each, WORKERS, 20.1e6, network) > own for each in (TOPKDSA, OKTOPK))


@pytest.mark.slow
def test_the_page_has_every_figure_with_its_text(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    run("recipes.paper.spardl", "", spardl.make, ["--quick", "--markdown", str(path)])
    text = path.read_text()
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    first, last = ([f"Figure {number}" for number in numbers] for numbers in ((7, 8, 9, 10, 12), (15, 16, 17, 18)))
    expected = ["Table I", *first, "Figures 13 and 14", *last, "Repeating it"]
    assert [title.partition(":")[0] for title in titles] == expected
    assert len(list(tmp_path.glob("*.png"))) == text.count("![") == 9
    assert "{" not in text and "nan" not in text.split()
