"""Rounds and words of every algorithm, as the fabric counts them, against SparDL's Table I.

Prevents: messages that grow with the number of workers, and rounds that nobody needs.
"""

from __future__ import annotations

import pytest
import torch

from ddp_hooks.comm import AlphaBeta, run_on_fabric
from ddp_hooks.sparse import SparseSum, Sparsity
from ddp_hooks.sparse.codec import EntryCodec
from recipes.benchmarks.sparse_costs import WORLD_SIZES, Counted, lines
from tests.support.topk.algorithms import returning

LARGE = [
    pytest.param(size, marks=[pytest.mark.slow, pytest.mark.timeout(400)]) for size in WORLD_SIZES if size > 16
]
VARYING = ("Ok-Topk", "TopkDSA")  # messages follow the data: regions are as full as they are


@pytest.mark.quick("2", "8", "14")
@pytest.mark.parametrize("world_size", [*(size for size in WORLD_SIZES if size <= 16), *LARGE])
def test_table_1(world_size: int) -> None:
    counted = lines(world_size)
    assert {line.name.split(",")[0] for line in counted} == {"SparDL", "TopkA", "TopkDSA", "gTopk", "Ok-Topk"}
    for line in counted:
        check(line)


def check(line: Counted) -> None:
    least, most, counted = line.least, line.most, line.counted
    assert least.rounds <= counted.rounds <= most.rounds, line
    if line.name in VARYING:
        lengths = 3 * (line.world_size - 1)  # they travel too, which the table leaves out
        assert 0.5 * least.words <= counted.words <= 1.6 * most.words + lengths, line
    else:
        assert least.words - 1e-6 <= counted.words <= most.words + 1e-6, line
    if line.name == "gTopk" and line.world_size.bit_count() == 1:  # else the tree is not full
        assert counted == most, line


@pytest.mark.quick("8-2")
@pytest.mark.parametrize(("world_size", "num_teams"), [(8, 2), (8, 4), (14, 7), (16, 4)])
def test_b_sag_stays_in_its_range(world_size: int, num_teams: int) -> None:
    """Eq. 10 as corrected: from entries that never meet, which is its least, to teams that all have the same."""
    k, numel = 16 * world_size, 3000
    least = 2 * k * (world_size * num_teams + world_size - 2 * num_teams) / (world_size * num_teams)
    most = 2 * k * (num_teams**2 + 2 * world_size - 3 * num_teams) / world_size
    sparsity = Sparsity("spardl", k, EntryCodec("exact", torch.float32), num_teams, "b")
    sums = [SparseSum(sparsity, numel, rank, world_size) for rank in range(world_size)]
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    words = []
    for _ in range(60):
        exchanges = [returning(each.run(gradient.clone(), None), {}, rank) for rank, each in enumerate(sums)]
        words.append(max(traffic.clock_s for traffic in run_on_fabric(exchanges, AlphaBeta(0.0, 0.25))))
    assert all(least - 1e-6 <= count <= most + 1e-6 for count in words)
    assert words[0] < words[-1] and words[-1] > 0.95 * most, "the controller has not reacted"


@pytest.mark.parametrize("density", [0.01, 0.001])
@pytest.mark.parametrize("name", ["spardl", "topka", "gtopk"])
def test_bytes_per_entry(name: str, density: float) -> None:
    """At most 4.1 per entry that travels, of which each rank sends as many as Table I says."""
    numel, world_size = 1 << 21, 4
    k = round(density * numel)
    entries = {"spardl": 2 * k * (world_size - 1) / world_size, "topka": (world_size - 1) * k, "gtopk": 2 * k}[name]
    sparsity = Sparsity(name, k, EntryCodec("compact", torch.float32))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    exchanges = []
    for rank in range(world_size):
        work = torch.randn(numel, generator=generator)
        exchanges.append(returning(SparseSum(sparsity, numel, rank, world_size).run(work, None), {}, rank))
    sent = max(traffic.sent_bytes for traffic in run_on_fabric(exchanges))
    assert 4 * entries <= sent <= 4.1 * entries, sent / entries
