"""Rounds and words of every algorithm, as the fabric counts them, against SparDL's Table I.

Prevents: messages that grow with the number of workers, and rounds that nobody needs.

Both are those of the critical path: the clock of the slowest rank where a round, or a word, costs one second. Words are
two per entry, as in the paper. Where the table has a logarithm and P is no power of two, it is rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ddp_hooks.comm import AlphaBeta, run_on_fabric
from ddp_hooks.topk.bags import num_rounds
from ddp_hooks.topk.controller import TopHController
from ddp_hooks.topk.gtopk import gtopk
from ddp_hooks.topk.ledger import Ledger
from ddp_hooks.topk.oktopk import OkTopkEstimates, oktopk
from ddp_hooks.topk.selection import BlockSelector
from ddp_hooks.topk.spardl import Plan, spardl
from ddp_hooks.topk.topka import topka
from ddp_hooks.topk.topkdsa import topkdsa
from ddp_hooks.topk.wire import Wire
from tests.topk.test_spardl import returning

SLOW = pytest.mark.slow
WORLD_SIZES = [2, 4, 8, 14, 16, pytest.param(32, marks=SLOW), pytest.param(64, marks=SLOW)]
WIRE = Wire("exact", torch.float32)
ROUNDS, WORDS = AlphaBeta(1.0, 0.0), AlphaBeta(0.0, 0.25)  # a word has four bytes


def critical_path(make: Callable[[int, torch.Tensor], Any], world_size: int, numel: int, cost: AlphaBeta) -> float:
    generator = torch.Generator().manual_seed(0)
    algorithms = []
    for rank in range(world_size):
        work = torch.randn(numel, generator=generator)
        algorithms.append(returning(make(rank, work), {}, rank))
    return max(traffic.clock_s for traffic in run_on_fabric(algorithms, cost))


def rounds_and_words(
    make: Callable[[int, torch.Tensor], Any], world_size: int, numel: int
) -> tuple[float, float]:
    return critical_path(make, world_size, numel, ROUNDS), critical_path(make, world_size, numel, WORDS)


def spardl_of(world_size: int, num_teams: int, k: int, sag: Any) -> Callable[[int, torch.Tensor], Any]:
    def make(rank: int, work: torch.Tensor) -> Any:
        plan = Plan(work.numel(), k, world_size, num_teams, rank)
        controller = TopHController(plan.counts[plan.position], num_teams) if sag == "b" else None
        selector = BlockSelector(work, plan.bounds, plan.counts)
        return spardl(Ledger(work), selector, plan, WIRE, sag, controller=controller)

    return make


def whole(work: torch.Tensor, k: int) -> BlockSelector:
    return BlockSelector(work, (0, work.numel()), (k,))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_spardl(world_size: int) -> None:
    k, numel = 4 * world_size, 40 * world_size
    rounds, words = rounds_and_words(spardl_of(world_size, 1, k, "r"), world_size, numel)
    assert rounds == 2 * num_rounds(world_size)
    assert words == pytest.approx(4 * k * (world_size - 1) / world_size)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_recursive_spar_all_gather(world_size: int) -> None:
    k, numel = 4 * world_size, 40 * world_size
    for d in (2**i for i in range(1, 7) if world_size % 2**i == 0):
        rounds, words = rounds_and_words(spardl_of(world_size, d, k, "r"), world_size, numel)
        assert rounds == 2 * num_rounds(world_size // d) + math.log2(d)
        expected = 2 * k * ((2 * world_size - 2 * d) / world_size + d / world_size * math.log2(d))
        assert words == pytest.approx(expected)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_bruck_spar_all_gather(world_size: int) -> None:
    """Against Eq. 10 with the term that its lower bound omits (T1)."""
    k, numel = 4 * world_size, 40 * world_size
    for d in (d for d in range(2, world_size + 1) if world_size % d == 0):
        rounds, words = rounds_and_words(spardl_of(world_size, d, k, "b"), world_size, numel)
        assert rounds == 2 * num_rounds(world_size // d) + num_rounds(d)
        lowest = 2 * k * (world_size * d + world_size - 2 * d) / (world_size * d)
        highest = 2 * k * (d * d + 2 * world_size - 3 * d) / world_size
        assert lowest - 1e-6 <= words <= highest + 1e-6


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_topka(world_size: int) -> None:
    k, numel = 10, 400
    make = lambda rank, work: topka(Ledger(work), whole(work, k), k, rank, world_size, WIRE)  # noqa: E731
    rounds, words = rounds_and_words(make, world_size, numel)
    assert rounds == num_rounds(world_size)
    assert words == pytest.approx(2 * (world_size - 1) * k)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gtopk(world_size: int) -> None:
    k, numel = 10, 400
    make = lambda rank, work: gtopk(Ledger(work), whole(work, k), k, rank, world_size, WIRE)  # noqa: E731
    rounds, words = rounds_and_words(make, world_size, numel)
    bound = 2 * num_rounds(world_size)
    if world_size.bit_count() == 1:
        assert rounds == bound and words == pytest.approx(2 * k * bound)
    else:  # a tree that is not full may have no path of full length
        assert bound - 2 <= rounds <= bound and words <= 2 * k * bound


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_topkdsa(world_size: int) -> None:
    """Lengths travel too, which the table leaves out: one word to each rank, and two of each rank to all."""
    k, numel = 8 * world_size, 80 * world_size
    make = lambda rank, work: topkdsa(Ledger(work), whole(work, k), rank, world_size, WIRE)  # noqa: E731
    rounds, words = rounds_and_words(make, world_size, numel)
    share = (world_size - 1) / world_size
    assert rounds <= world_size + 2 * num_rounds(world_size)
    lengths = 3 * (world_size - 1)
    # Random positions are uneven: the critical path is that of the fullest regions.
    assert 4 * share * k * 0.9 <= words <= (share * (2 * k + numel)) * 1.6 + lengths


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_oktopk(world_size: int) -> None:
    """A step between two estimates. Lengths travel too."""
    k, numel = 16 * world_size, 160 * world_size
    estimates = [OkTopkEstimates() for _ in range(world_size)]
    make = lambda rank, work: oktopk(Ledger(work), k, rank, world_size, WIRE, estimates[rank])  # noqa: E731
    critical_path(make, world_size, numel, ROUNDS)  # estimates thresholds and regions
    rounds, words = rounds_and_words(make, world_size, numel)
    share = (world_size - 1) / world_size
    assert rounds <= 2 * (world_size + num_rounds(world_size))
    lengths = 3 * (world_size - 1)
    assert 2 * share * k * 0.5 <= words <= 6 * share * k * 1.2 + lengths
