"""Fewer bits: how wrong they may be, how many bytes they are, and that what is lost comes later.

Prevents: parameters that differ between ranks; gradients that rounding eats for ever; an overflow that looks finite.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_hooks.comm import run_on_fabric
from ddp_hooks.comm.wire.codecs import Bf16, Codec, IntBlocks
from fsdp_ext import ExtConfig
from fsdp_ext.compressed import add_payloads, compressed_all_gather, compressed_reduce_scatter, sliced
from tests.support.codecs import normal, there_and_back
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.twins import CONFIG, Trainee, with_codecs
from tests.support.workers import WorkerPools

CODECS: list[Codec] = [Bf16(), IntBlocks(8, 256), IntBlocks(4, 64)]


# -- on the fabric ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_all_ranks_gather_the_same(world_size: int, codec: Codec) -> None:
    for numel in (0, 1, 300):
        owned = [normal(numel, rank) for rank in range(world_size)]
        chunks = [[torch.zeros(numel) for _ in range(world_size)] for _ in range(world_size)]
        for rank in range(world_size):
            chunks[rank][rank].copy_(owned[rank])
        traffic = run_on_fabric([compressed_all_gather(chunks[rank], rank, codec) for rank in range(world_size)])
        for rank in range(world_size):
            for owner in range(world_size):
                assert torch.equal(chunks[rank][owner], there_and_back(codec, owned[owner]))
            assert traffic[rank].sent_bytes == (world_size - 1) * codec.nbytes(numel)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_means_are_of_what_was_sent(world_size: int, codec: Codec) -> None:
    numel = 300
    given_ = [[normal(numel, 100 * rank + c) for c in range(world_size)] for rank in range(world_size)]
    chunks = [[chunk.clone() for chunk in row] for row in given_]
    algorithms = [compressed_reduce_scatter(chunks[r], r, codec, world_size) for r in range(world_size)]
    traffic = run_on_fabric(algorithms)
    for rank in range(world_size):
        parts = [given_[r][rank] if r == rank else there_and_back(codec, given_[r][rank]) for r in range(world_size)]
        torch.testing.assert_close(chunks[rank][rank], torch.stack(parts).sum(0) / world_size, rtol=1e-5, atol=1e-6)
        assert traffic[rank].sent_bytes == (world_size - 1) * codec.nbytes(numel)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_what_rounding_loses_comes_later(world_size: int) -> None:
    """Sums of all that was given, and of all that came out with what is kept, stay the same over steps."""
    numel, codec = 200, IntBlocks(8, 64)
    residuals = [[torch.zeros(numel) for _ in range(world_size)] for _ in range(world_size)]
    total_in = [torch.zeros(numel, dtype=torch.float64) for _ in range(world_size)]
    total_out = [torch.zeros(numel, dtype=torch.float64) for _ in range(world_size)]
    for step in range(20):
        chunks = [[normal(numel, 1000 * step + 100 * r + c) for c in range(world_size)] for r in range(world_size)]
        for owner in range(world_size):
            total_in[owner] += torch.stack([chunks[r][owner] for r in range(world_size)]).double().sum(0)
        run_on_fabric(
            [compressed_reduce_scatter(chunks[r], r, codec, 1, residuals[r]) for r in range(world_size)]
        )
        for owner in range(world_size):
            total_out[owner] += chunks[owner][owner].double()
    for owner in range(world_size):
        kept = torch.stack([residuals[r][owner] for r in range(world_size)]).double().sum(0)
        torch.testing.assert_close(total_out[owner] + kept, total_in[owner], rtol=0, atol=1e-4)
        assert 0 < kept.abs().max() < 0.1 * world_size, "no more than the last step's rounding"


def test_a_residual_of_ones_own_range_is_added_once() -> None:
    """A checkpoint of another number of ranks brings it."""
    own, residual = torch.ones(4), torch.tensor([1.0, 2.0, 3.0, 4.0])
    payloads = [torch.empty(Bf16().nbytes(4), dtype=torch.uint8) for _ in range(2)]
    Bf16().encode(torch.full((4,), 2.0), payloads[0])
    add_payloads(own, 1, payloads, Bf16(), 2, residual)
    assert own.tolist() == [2.0, 2.5, 3.0, 3.5] and not residual.any()


def test_an_overflow_is_not_kept() -> None:
    residuals = [[torch.zeros(4), torch.zeros(4)] for _ in range(2)]
    chunks = [[torch.ones(4), torch.tensor([1.0, float("inf"), 1.0, 1.0])], [torch.ones(4), torch.ones(4)]]
    run_on_fabric([compressed_reduce_scatter(chunks[r], r, IntBlocks(8, 4), 2, residuals[r]) for r in range(2)])
    assert not chunks[1][1].isfinite().any() and chunks[0][0].isfinite().all()
    assert all(bool(each.isfinite().all()) for row in residuals for each in row)


def test_slices_cover_every_range() -> None:
    values = torch.arange(10.0)
    seen: list[list[float]] = []

    def start(where: slice) -> Any:
        seen.append(values[where].tolist())
        return iter(())

    for begin in sliced(10, 4, start):
        begin()
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert sliced(0, 4, start) == []


# -- between processes ------------------------------------------------------------------------------------------------


def train(rank: int, world_size: int, config: ExtConfig, loop: Any, idle: bool) -> tuple[list[float], int]:
    """A parameter after 12 steps, and the bytes that were sent."""
    torch.manual_seed(5)
    model = twins.shard(twins.WholeNumbers(world_size, idle=idle))
    extension = twins.extend(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.5)
    twin = Trainee(model, optimizer, lambda step: 1000 * step + 10 * rank)
    for step in range(12):
        loop(twin, step)
    sent = extension.stats().sent_bytes
    twins.restore(model)
    parameters: list[Any] = list(model.parameters())
    return parameters[1].full_tensor().flatten().tolist(), sent


@pytest.mark.quick("bf16-1.9-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("name", "least"), [("bf16", 1.9), ("int8", 3.0)])
def test_training_with_fewer_bytes(workers: WorkerPools, world_size: int, name: str, least: float) -> None:
    exact = workers(world_size).run(train, CONFIG, twins.plain, False)
    rounded = workers(world_size).run(train, with_codecs(name, name), twins.plain, False)
    assert exact[0][1] / rounded[0][1] > least
    weights = torch.tensor([run[0] for run in rounded])
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], torch.tensor(exact[0][0]), rtol=0.02, atol=0.02)
    assert (rounded[0][0] != exact[0][0]) == (name == "int8"), "small whole numbers are bfloat16's, too"


@pytest.mark.quick("True-accumulate")
@pytest.mark.parametrize("loop", [twins.two_backwards, twins.accumulate, twins.two_forwards])
@pytest.mark.parametrize("idle", [False, True])
def test_loops_with_int8(workers: WorkerPools, loop: Any, idle: bool) -> None:
    exact = workers(2).run(train, CONFIG, loop, idle)[0]
    rounded = workers(2).run(train, with_codecs("int8", "int8"), loop, idle)[0]
    torch.testing.assert_close(torch.tensor(rounded[0]), torch.tensor(exact[0]), rtol=0.03, atol=0.05)


@pytest.mark.slow
def test_error_feedback_is_a_choice(workers: WorkerPools) -> None:
    with_it, without = (
        workers(2).run(train, with_codecs("exact", "int8", error_feedback=choice), twins.plain, False)[0][0]
        for choice in (True, False)
    )
    exact = torch.tensor(workers(2).run(train, CONFIG, twins.plain, False)[0][0])
    gap, gap_without = ((torch.tensor(each) - exact).abs().mean() for each in (with_it, without))
    assert 0 < gap < gap_without
