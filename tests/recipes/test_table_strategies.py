"""Simulated tables: as many bytes as the exchange has, and each part of the scheduling hides what it is to hide."""

from __future__ import annotations

import itertools

import pytest
import torch

from ddp_hooks.comm import Algorithm, AlphaBeta, Send, pairwise_exchange
from ddp_hooks.planning import Network, StepProfile, simulate
from ddp_hooks.planning.network import Round, all_to_all
from recipes.benchmarks.workloads import profile_of_layers
from recipes.paper.strategies import EmbRace, SparseDdp, TableTraffic
from recipes.paper.strategies.rounds import gathered
from recipes.paper.strategies.tables import Scheduling

NETWORK = Network(4, AlphaBeta(0.0, 0.01))
TRAFFIC = TableTraffic(("table",), ids=2.0, lookup=80.0, rows=80.0, raw_rows=100.0, prior=0.25)


def step_of(forward_s: float = 1.0) -> StepProfile:
    """A table of which little is used, and three dense layers."""
    layers = [(0.0, 0.0, [0]), *((forward_s, 2 * forward_s, [i]) for i in (1, 2, 3))]
    return profile_of_layers(layers, ["table", "a", "b", "c"], [100_000, 40, 40, 40])


@pytest.mark.parametrize("scheduling", ["none", "horizontal", "2d"])
def test_bytes_of_a_step(scheduling: Scheduling) -> None:
    found = simulate(EmbRace(TRAFFIC, scheduling), step_of(), NETWORK)
    assert found.sent_bytes == pytest.approx(3 * 2.0 + 0.75 * (80 + 80) + 2 * 0.75 * 120)


def test_bytes_of_sparse_ddp() -> None:
    found = simulate(SparseDdp(TRAFFIC), step_of(), NETWORK)
    assert found.sent_bytes == pytest.approx(3 * 100.0 + 2 * 0.75 * 120)
    alone = TableTraffic(("table",), 0.0, 0.0, 0.0, 200.0)
    assert simulate(SparseDdp(alone), step_of(0.0), NETWORK).step_s == pytest.approx((600 + 180) * 0.01)


def test_every_part_of_the_scheduling_hides_something() -> None:
    """Without computing there is nothing to hide behind; with it, each part helps."""
    traffic = TableTraffic(("table",), ids=2e4, lookup=4e6, rows=4e6, raw_rows=5e6, prior=0.25)
    layers = [(0.0, 0.0, [0]), *((0.025, 0.05, [i]) for i in range(1, 21))]
    step = profile_of_layers(layers, ["table", *"abcdefghijklmnopqrst"], [10**9, *[1_000_000] * 20])
    network = Network(4, AlphaBeta(0.0, 4e-8))
    schedulings: tuple[Scheduling, ...] = ("none", "horizontal", "2d")
    times = {each: simulate(EmbRace(traffic, each, bucket_mb=1.0), step, network).step_s for each in schedulings}
    assert times["2d"] < times["horizontal"] < times["none"]
    assert times["2d"] >= 1.5, "no less than computing"
    bare = simulate(EmbRace(TRAFFIC, "2d"), step_of(0.0), NETWORK)
    assert bare.step_s == pytest.approx(bare.sent_bytes * 0.01)


def test_everything_prior_is_horizontal() -> None:
    whole = TableTraffic(("table",), 2.0, 80.0, 80.0, 100.0, prior=1.0)
    both = [simulate(EmbRace(whole, scheduling), step_of(), NETWORK).step_s for scheduling in ("horizontal", "2d")]
    assert both[0] == both[1]


def test_wrong_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="the step has no tensor tabel"):
        simulate(EmbRace(TableTraffic(("tabel",), 1, 1, 1, 1)), step_of(), NETWORK)
    with pytest.raises(ValueError, match="at least one tensor"):
        TableTraffic((), 1, 1, 1, 1)
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        TableTraffic(("table",), 1, 1, 1, 1, prior=2)


# -- two levels --------------------------------------------------------------------------------------------------------


def by_level(algorithms: list[Algorithm], node_size: int) -> tuple[int, int]:
    """Bytes that the first node sends to others, and the most that one of its workers sends within it, as counted."""
    between, inside = 0, [0] * node_size
    for rank, algorithm in enumerate(algorithms[:node_size]):
        for exchange in itertools.chain.from_iterable(algorithm):
            if isinstance(exchange, Send):
                stays = exchange.peer < node_size
                inside[rank] += exchange.tensor.nbytes * stays
                between += exchange.tensor.nbytes * (not stays)
    return between, max(inside)


@pytest.mark.parametrize(("workers", "node_size"), [(4, 1), (4, 4), (8, 4), (16, 4), (6, 3)])
def test_exchanges_on_two_levels_send_what_is_counted(workers: int, node_size: int) -> None:
    shares = [torch.ones(10, dtype=torch.uint8)] * workers
    exchanges = [pairwise_exchange(shares, [torch.empty_like(share) for share in shares], r) for r in range(workers)]
    between, inside = by_level(exchanges, node_size)
    assert all_to_all(workers, node_size, 10 * workers) == (Round(1, between, inside, workers - 1),)
    assert between == 10 * node_size * (workers - node_size)
    in_a_ring = Round(workers - 1, 10 * (node_size < workers), 10 * (node_size > 1))
    assert gathered(workers, node_size, 10) == (in_a_ring,)


def test_a_nodes_workers_share_its_link() -> None:
    """Four workers, two per node: each has two shares for the other node, and one for its neighbour."""
    network = Network(4, AlphaBeta(0.0, 0.01), 2, AlphaBeta(0.0, 0.001))
    alone = TableTraffic(("table",), 0.0, 0.0, 80.0, 80.0)
    step = profile_of_layers([(0.0, 0.0, [0])], ["table"], [100_000])
    assert simulate(EmbRace(alone, "none"), step, network).step_s == pytest.approx(2 * 2 * 20 * 0.01)
    assert simulate(SparseDdp(alone), step, network).step_s == pytest.approx(3 * 80 * 0.01)
    slow_inside = Network(4, AlphaBeta(0.0, 0.01), 2, AlphaBeta(0.0, 0.1))
    assert simulate(EmbRace(alone, "none"), step, slow_inside).step_s == pytest.approx(20 * 0.1)
