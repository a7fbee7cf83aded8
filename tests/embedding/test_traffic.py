"""As many bytes travel as the paper's Table 2 says, with the densities that were measured.

Prevents: an exchange that quietly sends whole rows to everybody, sends indices along, or sends rows twice.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TableConfig, TableStats, shard_embeddings
from tests.support.workers import WorkerPools

NUM_ROWS, DIM, NUM_IDS, NUM_STEPS = 600, 64, 500, 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, DIM)
        self.bias = nn.Parameter(torch.zeros(DIM))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.table(ids) + self.bias).sum()


def train(rank: int, world_size: int, deduplicate: bool) -> tuple[list[TableStats], list[int], int, int]:
    """Statistics by step, different ids by step, bytes that lanes have counted, and those of the kinds together."""
    model = Model()
    config = TableConfig(deduplicate=deduplicate, timeout_s=20)
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=config, lr=0.1)
    begun = tables._channels.urgent.traffic.sent_bytes
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    tables.follow(optimizer)
    data = [
        torch.randint(0, NUM_ROWS, (NUM_IDS,), generator=torch.Generator().manual_seed(100 * step + rank))
        for step in range(NUM_STEPS)
    ]
    stats = []
    for ids in tables.prefetch(data, lambda ids: ids):
        optimizer.zero_grad()
        ddp(ids).backward()
        optimizer.step()
        stats.append(tables.stats())
    tables.flush()
    lanes = sum(lanes.traffic.sent_bytes for lanes in tables._channels.lanes) - begun
    counted = sum(count for kind, count in tables._channels.tally.sent.items() if kind != "columns")
    tables.close()
    return stats, [len(set(ids.tolist())) for ids in data], lanes, counted


def of(results: Any, step: int, *kinds: str) -> float:
    """Mean bytes of a rank in a step."""
    return sum(getattr(stats[step], f"{kind}_bytes") for stats, *_ in results for kind in kinds) / len(results)


@pytest.mark.parametrize("world_size", [2, 4])
def test_table_2_of_the_paper(workers: WorkerPools, world_size: int) -> None:
    """Without coalescing: (N - 1) * alpha * M / N bytes each way, alpha M being a vector per id."""
    results = workers(world_size).run(train, False)
    expected = (world_size - 1) / world_size * NUM_IDS * DIM * 4
    for step in range(1, NUM_STEPS - 1):
        assert of(results, step, "lookup") == pytest.approx(expected, rel=0.05)
        # What is delayed in a step is sent after it: every row of one step's gradient, over two steps.
    sent = sum(of(results, step, "prior", "delayed") for step in range(NUM_STEPS))
    assert sent == pytest.approx(expected * NUM_STEPS, rel=0.05)


@pytest.mark.parametrize("world_size", [2, 4])
def test_with_measured_densities(workers: WorkerPools, world_size: int) -> None:
    """Each different row once per rank, forwards and backwards; ids, which the paper leaves out, four bytes each."""
    results = workers(world_size).run(train, True)
    rows = [sum(counts[step] for _, counts, *_ in results) / world_size for step in range(NUM_STEPS)]
    share = (world_size - 1) / world_size * DIM * 4
    for step in range(1, NUM_STEPS - 1):  # a step looks up the rows of the next one
        assert of(results, step, "lookup") == pytest.approx(share * rows[step + 1], rel=0.05)
        # Bruck's all-gather: everybody's ids to everybody else, and a few numbers
        assert of(results, step, "id") == pytest.approx((world_size - 1) * (4 * rows[step + 1] + 48), rel=0.05)
    sent = sum(of(results, step, "prior", "delayed") for step in range(NUM_STEPS))
    assert sent == pytest.approx(share * sum(rows), rel=0.05)
    for stats, counts, *_ in results:
        assert [one.num_rows for one in stats] == counts
        assert all(one.num_ids == NUM_IDS for one in stats)
        assert all(one.num_prior_rows > 0 and one.num_delayed_rows > 0 for one in stats[:-1])


def test_lanes_count_the_same_bytes(workers: WorkerPools) -> None:
    for _, _, lanes, counted in workers(3).run(train, True):
        assert lanes == counted
