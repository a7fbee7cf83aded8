"""Sparse gradients of whole tables: the mean of plain DDP, alone and beside another hook for the dense gradients.

Prevents: rows that are lost or counted twice between partition and exchange, replicas that part, and a dense hook that
waits for a bucket which it never gets.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, EmbeddingState, TopKState, embedding_hook
from ddp_hooks.comm import Algorithm, run_on_fabric
from ddp_hooks.embedding.exchange.gradients import RowSum
from ddp_hooks.embedding.replicated import mean_rows
from tests.support.embedding.replicated import train
from tests.support.embedding.twins import sum_and_divide
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


@given(
    st.lists(st.dictionaries(st.integers(0, 30), st.integers(-9, 9), max_size=12), min_size=1, max_size=9),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_means_of_rows(gradients: list[dict[int, int]], dtype: torch.dtype) -> None:
    """For any number of ranks, also with nothing on some of them: what a dictionary would say, on every rank."""
    world_size = len(gradients)
    results: dict[int, RowSum] = {}

    def algorithm(rank: int) -> Algorithm:
        rows = sorted(gradients[rank])
        values = torch.tensor([[gradients[rank][row], -1] for row in rows], dtype=dtype).view(-1, 2) * world_size
        own = RowSum(torch.tensor(rows, dtype=torch.int64), values)
        results[rank] = yield from mean_rows(own, rank, world_size)

    run_on_fabric([algorithm(rank) for rank in range(world_size)])
    total: dict[int, list[int]] = {}
    for gradient in gradients:
        for row, value in gradient.items():
            before = total.get(row, [0, 0])
            total[row] = [before[0] + value, before[1] - 1]
    for result in results.values():
        assert result.rows.tolist() == sorted(total)
        assert result.values.tolist() == [total[row] for row in sorted(total)]


def test_means_of_half_precision_do_not_overflow() -> None:
    """DDP divides before it sums."""
    results: dict[int, RowSum] = {}

    def algorithm(rank: int) -> Algorithm:
        own = RowSum(torch.tensor([3]), torch.tensor([[40000.0]], dtype=torch.float16))
        results[rank] = yield from mean_rows(own, rank, 2)

    run_on_fabric([algorithm(rank) for rank in range(2)])
    assert [result.values.item() for result in results.values()] == [40000.0] * 2


@pytest.mark.quick("2-*", "3-dear")
@pytest.mark.parametrize("dense", ["all-reduce", "dear", "topk"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_plain_ddp(workers: WorkerPools, world_size: int, dense: str) -> None:
    for gaps, sent in workers(world_size).run(train, dense):
        # DDP's own all-reduce divides before it sums, which is not exact for three ranks.
        assert max(gaps) <= (1e-5 if dense == "all-reduce" and world_size == 3 else 0.0)
        assert (sent > 0) == (world_size > 1)


class Common(nn.Module):
    """A table of which every rank uses the same rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 64, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum()


def count_bytes(rank: int, world_size: int) -> tuple[int, int]:
    ddp = DistributedDataParallel(Common())
    state = EmbeddingState(ddp, timeout_s=20)
    ddp.register_comm_hook(state, embedding_hook)
    ddp(torch.arange(200).repeat(3)).backward()
    gradient = ddp.module.table.weight.grad
    assert isinstance(gradient, torch.Tensor)
    sent = state.traffic.sent_bytes
    state.close()
    return sent, gradient.coalesce().values().nbytes


def test_rows_that_all_ranks_have_travel_once(workers: WorkerPools) -> None:
    """All-gather would send three times the rows of each rank; partition and exchange half of that."""
    for sent, nbytes in workers(4).run(count_bytes):
        assert 1.5 * nbytes < sent < 1.6 * nbytes


def refusals(rank: int, world_size: int) -> list[str]:
    dense = DistributedDataParallel(nn.Linear(3, 3))
    hooked = DistributedDataParallel(Common())
    hooked.register_comm_hook(None, sum_and_divide)
    sparse = DistributedDataParallel(Common(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    closed = EmbeddingState(sparse, timeout_s=20)
    closed.close()
    messages = [
        message_of(lambda: EmbeddingState(dense)),
        message_of(lambda: EmbeddingState(dense.module)),
        message_of(lambda: EmbeddingState(hooked)),
        message_of(lambda: DearState(sparse, optimizer)),
        message_of(lambda: TopKState(sparse)),
        message_of(lambda: EmbeddingState(sparse, timeout_s=0)),
        message_of(lambda: EmbeddingState(sparse, stall_warning_s="x")),  # type: ignore[arg-type]
    ]
    local = DistributedDataParallel(Common())
    steps = torch.optim.SparseAdam(local.parameters())
    state = EmbeddingState(local, timeout_s=20)
    local.register_comm_hook(state, embedding_hook)
    for late in (False, True):  # a micro-batch under no_sync() first, or last
        steps.zero_grad()
        for alone in (not late, late):
            local.require_backward_grad_sync = not alone
            local(torch.arange(rank, 200)).backward()
        messages.append(message_of(steps.step))
    state.close()
    dist.barrier()
    return messages


def test_refusals(workers: WorkerPools) -> None:
    expected = ["has no sparse table", "wrap the model first", "already has a communication hook"]
    expected += ["create an EmbeddingState before"] * 2
    expected += ["timeout_s must be > 0 and finite, got 0", "stall_warning_s must be > 0, got 'x'"]
    expected += ["nothing was raised", "table.weight was not reduced over the ranks"]
    for messages in workers(2).run(refusals):
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages
