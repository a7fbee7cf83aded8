"""Fewer bits: how wrong they may be, how many bytes they are, and that what is lost comes later.

Prevents: parameters that differ between ranks; gradients that rounding eats for ever; an overflow that looks finite.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_hooks.comm import run_on_fabric
from ddp_hooks.comm.wire import codecs
from ddp_hooks.comm.wire.codecs import Bf16, Codec, Int8Blocks, codec_of
from fsdp_ext import ExtConfig
from fsdp_ext.compressed import add_payloads, compressed_all_gather, compressed_reduce_scatter, sliced
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.twins import CONFIG, Trainee, with_codecs
from tests.support.workers import WorkerPools

CODECS: list[Codec] = [Bf16(), Int8Blocks(4), Int8Blocks(256)]
REAL = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


def there_and_back(codec: Codec, values: Tensor) -> Tensor:
    payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, payload)
    decoded = torch.empty_like(values)
    codec.decode(payload, decoded)
    return decoded


def normal(numel: int, seed: int) -> Tensor:
    return torch.empty(numel).normal_(generator=torch.Generator().manual_seed(seed))


@given(st.lists(REAL, max_size=20))
@settings(max_examples=200)
def test_bf16_is_wrong_by_half_a_place(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    error = (there_and_back(Bf16(), values).double() - values.double()).abs()
    assert (error <= values.double().abs() * 2**-8).all()


@given(st.lists(REAL.filter(lambda x: x == 0 or abs(x) > 1e-30), max_size=20), st.sampled_from([4, 8]))
@settings(max_examples=200)
def test_int8_is_wrong_by_a_part_of_its_blocks_largest(numbers: list[float], block: int) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    error = (there_and_back(Int8Blocks(block), values).double() - values.double()).abs()
    for begin in range(0, len(numbers), block):
        largest = values[begin : begin + block].double().abs().max()
        assert (error[begin : begin + block] <= largest / 254 * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_types_stay_what_they_are(dtype: torch.dtype) -> None:
    values = normal(1000, 0).to(dtype)
    for name in ("bf16", "int8"):
        codec = codec_of(name, 256, dtype)
        assert (codec is None) == (name == "bf16" and dtype.itemsize == 2)
        if codec is not None:
            torch.testing.assert_close(there_and_back(codec, values), values, rtol=0.01, atol=0.02)
    assert codec_of("exact", 256, dtype) is None and codec_of("int8", 256, torch.uint8) is None


@pytest.mark.parametrize("numel", [64, 4 * 64, 4 * 64 + 1, 1000])
def test_pieces_that_are_worked_on_one_after_the_other(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = Int8Blocks(64), normal(numel, 0)
    at_once = there_and_back(codec, values)
    monkeypatch.setattr(codecs, "_PIECE_NUMEL", 128)
    payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
    assert len(list(codec._pieces(values, payload))) == -(-numel // 128)
    assert torch.equal(there_and_back(codec, values), at_once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_adding_what_a_payload_says(codec: Codec, dtype: torch.dtype) -> None:
    values, base = normal(1001, 0).to(dtype), normal(1001, 1).to(dtype)
    payload = torch.empty(codec.nbytes(1001), dtype=torch.uint8)
    codec.encode(values, payload)
    total = base.clone()
    codec.add(payload, total)
    assert torch.equal(total, base + there_and_back(codec, values))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_what_a_payload_loses(codec: Codec) -> None:
    values, before = normal(1001, 0), normal(1001, 1) / 100
    residual, payload = before.clone(), torch.empty(codec.nbytes(1001), dtype=torch.uint8)
    codec.encode_with_residual(values, residual, payload)
    said = torch.zeros(1001)
    codec.decode(payload, said)
    assert torch.equal(said, there_and_back(codec, before + values))
    assert torch.equal(residual, before + values - said) and residual.any()
    values[77] = torch.inf
    codec.encode_with_residual(values, residual, payload)
    codec.decode(payload, said)
    assert not said.isfinite().all() and residual.isfinite().all()


@given(st.floats(0.0, 2.0**-118, width=32))
def test_the_smallest_numbers_never_turn_into_others(largest: float) -> None:
    """Their scales have few places or none, and no reciprocal."""
    values = torch.tensor([largest, -largest, largest / 2, 0.0])
    decoded = there_and_back(Int8Blocks(4), values)
    assert torch.equal(decoded, torch.zeros(4)) or (decoded - values).abs().max() <= largest / 250
    assert largest < 1.5e-36 or not torch.equal(decoded, torch.zeros(4))


def test_bytes() -> None:
    assert [Bf16().nbytes(n) for n in (0, 1, 257)] == [0, 2, 514]
    assert [Int8Blocks(256).nbytes(n) for n in (0, 1, 256, 257)] == [0, 260, 260, 520]


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_shows(bad: float) -> None:
    values = torch.ones(12)
    values[5] = bad
    decoded = there_and_back(Int8Blocks(4), values)
    assert decoded[:4].isfinite().all() and not decoded[4:8].isfinite().any() and decoded[8:].isfinite().all()
    assert there_and_back(Bf16(), values).isfinite().sum() == 11


# -- on the fabric ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
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
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
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
    numel, codec = 200, Int8Blocks(64)
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
    run_on_fabric([compressed_reduce_scatter(chunks[r], r, Int8Blocks(4), 2, residuals[r]) for r in range(2)])
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
