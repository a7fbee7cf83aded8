"""The Horovod paper, simulated: models of its sizes, orderings that hold with any assumption, and a complete page."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hooks.comm import num_rounds
from recipes.common.pages import slug
from recipes.paper import horovod, horovod_summit
from recipes.paper.horovod_summit import (
    BACKENDS,
    BASELINE,
    CACHING,
    NODE_SIZE,
    RESNET,
    STEMDL,
    Assumed,
    Extent,
    Way,
    outcome,
    speedup,
)
from recipes.paper.strategies.rounds import all_reduce, sent_bytes

COUNTS = (6, 96, 384, 768)


@pytest.mark.parametrize(
    ("model", "num_tensors", "million_bytes"),
    [
        ("efficientnet_b0", 213, 21),
        ("resnet50", 161, 102),
        ("vgg19", 38, 574),
        ("stemdl", 52, 880),
        ("stemdl_deep", 206, 880),
    ],
)
def test_models_have_the_papers_sizes(model: str, num_tensors: int, million_bytes: int) -> None:
    step = Assumed("", model).step
    assert len(step.tensors) == num_tensors
    assert step.num_bytes / 1e6 == pytest.approx(million_bytes, rel=0.01)


def test_computing_times_are_operations_by_a_rate() -> None:
    assert horovod_summit.compute_s("resnet50") == pytest.approx(64 / 367)
    assert 0.05 < horovod_summit.utilisation("efficientnet_b0") < horovod_summit.utilisation("resnet50") < 1
    assert horovod_summit.utilisation("vgg19") == pytest.approx(horovod_summit.utilisation("resnet50"))
    assert horovod_summit.compute_s("stemdl") * 59.67e12 == pytest.approx(horovod_summit.train_flops("stemdl"))
    assert replace(STEMDL, compute=2.0).step.compute_s == pytest.approx(2 * STEMDL.step.compute_s)


def test_summit_has_six_gpus_behind_a_link() -> None:
    network = replace(STEMDL, line_rate=0.5).network(96)
    assert (network.node_size, network.workers) == (6, 96)
    assert network.bytes_per_s == pytest.approx(11.5e9)


def test_nccls_trees_send_as_much_as_rings_in_few_rounds() -> None:
    schedules = {name: schedule for name, (schedule, _) in BACKENDS.items()}
    rounds = {}
    for name, schedule in schedules.items():
        pattern = all_reduce(schedule, 768, NODE_SIZE, 1.0)
        assert sent_bytes(pattern) == pytest.approx(2.0, rel=0.01)
        rounds[name] = sum(hop.times for hop in pattern if hop.between_bytes)
    assert rounds == {"NCCL": 2 * num_rounds(128), "Hierarchical": 2 * 127, "MPI": 2 * 767}


@pytest.mark.parametrize("assumed", [*Extent().varied(RESNET), *Extent().varied(STEMDL)], ids=lambda each: each.name)
def test_the_coordinator_loses_more_the_more_workers_there_are(assumed: Assumed) -> None:
    efficiencies = [outcome(assumed, BASELINE, workers).efficiency for workers in COUNTS]
    assert efficiencies[-1] < efficiencies[0]
    gains = [speedup(assumed, CACHING, BASELINE, workers) for workers in COUNTS]
    assert all(gain > 1 - 1e-3 for gain in gains) and gains[-1] == max(gains) > 1


def test_bitvectors_cost_least_and_hardly_grow() -> None:
    once = {name: [horovod.one_agreement_s(name, workers) for workers in COUNTS] for name in horovod.AGREEMENTS}
    assert once["coordinator"][-1] / once["coordinator"][1] == pytest.approx(767 / 95, rel=0.01)
    assert all(a > b > c for a, b, c in zip(*(once[name][1:] for name in horovod.AGREEMENTS), strict=True))
    steps = [outcome(RESNET, CACHING, workers).agreement_s for workers in (96, 27_600)]
    assert steps[0] < steps[1] < 3 * steps[0]


def test_backends_come_out_in_the_papers_order() -> None:
    by_count = [[outcome(RESNET, Way(name, "coordinator"), workers) for name in BACKENDS] for workers in (384, 1536)]
    for seen in by_count:
        assert all(a.step_s < b.step_s for a, b in itertools.pairwise(seen))
    assert by_count[1][2].step_s / by_count[1][0].step_s > by_count[0][2].step_s / by_count[0][0].step_s


def test_parts_of_a_step_are_parts() -> None:
    for assumed, way in itertools.product((RESNET, STEMDL), (BASELINE, CACHING, horovod.BOTH, horovod.DDP)):
        seen = outcome(assumed, way, 96)
        assert 0 < seen.efficiency <= seen.busy <= 1 + 1e-9
        assert 0 < seen.overlap <= 1 and seen.exposed_s <= seen.step_s - seen.compute_s + 1e-9
    assert sum(outcome(RESNET, BASELINE, 96).buffers) == pytest.approx(4 * RESNET.step.num_bytes)
    assert len(outcome(RESNET, horovod.BOTH, 96).buffers) == 4 * horovod.GROUPS


def test_grouping_shortens_all_reduces_more_the_longer_latency_is() -> None:
    ratios = [
        outcome(assumed, horovod.BOTH, 768).all_reduce_s / outcome(assumed, CACHING, 768).all_reduce_s
        for assumed in (replace(RESNET, latency=latency) for latency in ("short", "middle", "long"))
    ]
    assert 1 > ratios[0] > ratios[1] > ratios[2]


def test_all_of_summit_scales_nearly_linearly() -> None:
    seen = [outcome(STEMDL, horovod.BOTH, workers).efficiency for workers in (96, 27_600)]
    assert seen[0] == pytest.approx(seen[1], abs=0.005) and seen[1] > 0.93


@pytest.mark.slow
def test_the_page_has_every_section(tmp_path: Path) -> None:
    horovod.main(["--quick", "--markdown", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    page = horovod.make(argparse.Namespace(quick=True))
    assert {*horovod.PROSE} == {"Introduction", *(section.title for section in page.sections)}
    for section in page.sections:
        assert f"## {section.title}" in text and section.text in text and len(section.text) > 200
        assert section.claims or section.rows
        assert section.draw is None or (tmp_path / f"page_{slug(section.title)}.png").stat().st_size > 1000
    figures = {slug(section.title) for section in page.sections if section.draw}
    assert figures >= {f"figure_{number}" for number in (2, 3, 6, 7, 8, 9, 10, 11)}


@pytest.mark.slow
def test_what_the_text_says_of_the_tables() -> None:
    """Sentences that name an outcome on 6,000 or 768 GPUs."""
    all_reduces = {name: outcome(STEMDL, Way(name, "coordinator"), 6000).all_reduce_s for name in BACKENDS}
    assert all_reduces["NCCL"] / all_reduces["Hierarchical"] == pytest.approx(1 / 3, rel=0.1)
    assert all_reduces["NCCL"] / all_reduces["MPI"] == pytest.approx(1 / 12, rel=0.1)
    varied = {each.name: each for each in Extent().varied(STEMDL)}
    gains = {name: speedup(each, CACHING, BASELINE, 6000) for name, each in varied.items()}
    beyond = {name for name, gain in gains.items() if gain > 1.64}
    assert beyond == {"coordinator × 4", "103 layers"} and 1.4 < gains["computing × ½"] < 1.64
    assert {name for name, each in varied.items() if outcome(each, BASELINE, 6000).efficiency < 0.55} == beyond
    assert all(speedup(each, BASELINE, Way("Hierarchical", "coordinator"), 6000) < 3.2 for each in varied.values())
    assert all(speedup(each, horovod.BOTH, CACHING, 6000) < 1 for each in varied.values())
    assert 1.15 <= speedup(RESNET, Way("MPI"), Way("MPI", "coordinator"), 768) <= 1.53
