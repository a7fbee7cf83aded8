"""Codecs: how wrong they may be, how many bytes they are, and what error feedback keeps.

Prevents: numbers wrong by more than documented; gradients that rounding eats for ever; an overflow that looks finite.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hooks.comm.wire import codecs
from ddp_hooks.comm.wire.codecs import Bf16, Codec, CodecName, IntBlocks, codec_of, relative_error
from tests.support.codecs import normal, there_and_back

CODECS: list[Codec] = [Bf16(), IntBlocks(8, 4), IntBlocks(8, 256), IntBlocks(4, 8), IntBlocks(4, 64, feedback=0.25)]
INTEGERS = [codec for codec in CODECS if isinstance(codec, IntBlocks)]
REAL = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@given(st.lists(REAL, max_size=20))
@settings(max_examples=200)
def test_bf16_is_wrong_by_half_a_place(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    error = (there_and_back(Bf16(), values).double() - values.double()).abs()
    assert (error <= values.double().abs() * 2**-8).all()


@pytest.mark.parametrize(("bits", "block"), [(8, 4), (8, 8), (4, 8), (4, 16)])
@given(numbers=st.lists(REAL.filter(lambda x: x == 0 or abs(x) > 1e-30), max_size=40))
@settings(max_examples=100)
def test_integers_are_wrong_by_a_part_of_their_blocks_largest(bits: int, block: int, numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    codec = IntBlocks(8 if bits == 8 else 4, block)
    error = (there_and_back(codec, values).double() - values.double()).abs()
    for begin in range(0, len(numbers), block):
        largest = values[begin : begin + block].double().abs().max()
        assert (error[begin : begin + block] <= largest / {8: 254, 4: 14.99}[bits] * (1 + 1e-4)).all()


@pytest.mark.parametrize("codec", INTEGERS, ids=str)
def test_bytes_of_a_payload(codec: IntBlocks) -> None:
    """A twin in numpy writes the same payload, code by code."""
    values = normal(1001, 3)
    payload = torch.empty(codec.nbytes(1001), dtype=torch.uint8)
    codec.encode(values, payload)
    padded = np.zeros(-(-1001 // codec.block) * codec.block, dtype=np.float32)
    padded[:1001] = values.numpy()
    scales, codes = [], []
    for row in padded.reshape(-1, codec.block):
        scale = np.float32(np.abs(row).max()) / np.float32({8: 127, 4: 7.499}[codec.bits])
        numbers = [int(np.rint(x * (np.float32(1) / scale))) for x in row]
        scales.append(scale)
        half = codec.block // 2
        both = [a + 16 * b for a, b in zip(numbers[:half], numbers[half:], strict=True)]
        codes += numbers if codec.bits == 8 else both
    expected = np.array(scales, dtype=np.float32).tobytes() + np.array(codes, dtype=np.int8).tobytes()
    assert payload.numpy().tobytes() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "bound"), [("bf16", 0.02), ("int8", 0.02), ("int4", 0.3)])
def test_types_stay_what_they_are(name: CodecName, bound: float, dtype: torch.dtype) -> None:
    values = normal(1000, 0).to(dtype)
    codec = codec_of(name, None, dtype)
    assert (codec is None) == (name == "bf16" and dtype.itemsize == 2)
    if codec is not None:
        torch.testing.assert_close(there_and_back(codec, values), values, rtol=0.01, atol=bound)
    assert codec_of("exact", 256, dtype) is None
    assert codec_of("int8", 256, torch.uint8) is None and codec_of("int4", 256, torch.float8_e5m2) is None


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_pieces_that_are_worked_on_one_after_the_other(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    for numel in (64, 4 * 64, 4 * 64 + 1, 1000):
        values, before = normal(numel, 0), normal(numel, 1)
        at_once, residual = there_and_back(codec, values), before.clone()
        payload, in_pieces = (torch.empty(codec.nbytes(numel), dtype=torch.uint8) for _ in range(2))
        codec.encode_with_residual(values, residual, payload)
        with monkeypatch.context() as patch:
            patch.setattr(codecs, "_PIECE_NUMEL", 128)
            assert torch.equal(there_and_back(codec, values), at_once)
            codec.encode_with_residual(values, before, in_pieces)
        assert torch.equal(in_pieces, payload) and torch.equal(before, residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_adding_a_payload(codec: Codec, dtype: torch.dtype) -> None:
    values, base = normal(1001, 0).to(dtype), normal(1001, 1).to(dtype)
    payload = torch.empty(codec.nbytes(1001), dtype=torch.uint8)
    codec.encode(values, payload)
    total = base.clone()
    codec.add(payload, total)
    assert torch.equal(total, base + there_and_back(codec, values))


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_error_feedback(codec: Codec) -> None:
    feedback = codec.feedback if isinstance(codec, IntBlocks) else 1.0
    values, before = normal(1001, 0), normal(1001, 1) / 100
    residual, payload = before.clone(), torch.empty(codec.nbytes(1001), dtype=torch.uint8)
    codec.encode_with_residual(values, residual, payload)
    sent = torch.zeros(1001)
    codec.decode(payload, sent)
    assert torch.equal(sent, there_and_back(codec, values + feedback * before))
    assert torch.equal(residual, before + values - sent) and residual.any()
    values[77] = torch.inf
    codec.encode_with_residual(values, residual, payload)
    codec.decode(payload, sent)
    assert not sent.isfinite().all() and residual.isfinite().all()


@pytest.mark.parametrize("feedback", [1.0, 0.5, 0.1])
def test_sums_of_payloads_and_the_residual(feedback: float) -> None:
    """They are the sum of all values, and the residual stays below a bound that does not grow with steps."""
    codec, numel = IntBlocks(4, 32, feedback), 320
    residual, given_, sent = torch.zeros(numel), torch.zeros(numel).double(), torch.zeros(numel).double()
    payload, decoded = torch.empty(codec.nbytes(numel), dtype=torch.uint8), torch.zeros(numel)
    for step in range(200):
        values = normal(numel, step)
        codec.encode_with_residual(values, residual, payload)
        codec.decode(payload, decoded)
        given_ += values
        sent += decoded
    torch.testing.assert_close(sent + residual, given_, rtol=0, atol=1e-3)
    # An error is at most half of a scale, of a block whose largest magnitude is below 5, and fades by 1 - feedback.
    assert 0 < residual.abs().max() < 5 / 14 / feedback


def test_a_moving_average_of_errors_is_smaller_than_the_last_error() -> None:
    """LoCo's reason: the error that is fed back, ``feedback * residual``, has a smaller variance."""
    norms = []
    for feedback in (1.0, 0.1):
        codec, residual = IntBlocks(4, 32, feedback), torch.zeros(3200)
        payload = torch.empty(codec.nbytes(3200), dtype=torch.uint8)
        for step in range(50):
            codec.encode_with_residual(normal(3200, step), residual, payload)
        norms.append(float(feedback * residual.norm()))
    assert norms[1] < 0.4 * norms[0]  # sqrt(0.1 / 2) is 0.22


@pytest.mark.parametrize("bits", [8, 4])
@given(largest=st.floats(0.0, 2.0**-118, width=32))
def test_the_smallest_numbers_never_turn_into_others(bits: int, largest: float) -> None:
    """Their scales have few places or none, and no reciprocal."""
    values, levels = torch.tensor([largest, -largest, largest / 2, 0.0] * 2), {8: 254, 4: 14.99}[bits]
    decoded = there_and_back(IntBlocks(8 if bits == 8 else 4, 8), values)
    zeros = torch.zeros(8)
    assert torch.equal(decoded, zeros) or (decoded - values).abs().max() <= largest / levels * (1 + 1e-3)
    assert largest < 1.5e-36 or not torch.equal(decoded, zeros)


def test_bytes() -> None:
    assert [Bf16().nbytes(n) for n in (0, 1, 257)] == [0, 2, 514]
    assert [IntBlocks(8, 256).nbytes(n) for n in (0, 1, 256, 257)] == [0, 260, 260, 520]
    assert [IntBlocks(4, 256).nbytes(n) for n in (0, 1, 256, 257)] == [0, 132, 132, 264]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_infinity_and_nan_are_visible(bad: float, bits: int) -> None:
    for place in range(8, 16):
        values = torch.ones(24)
        values[place] = bad
        decoded = there_and_back(IntBlocks(8 if bits == 8 else 4, 8), values)
        assert decoded[:8].isfinite().all() and not decoded[8:16].isfinite().any() and decoded[16:].isfinite().all()
        assert there_and_back(Bf16(), values).isfinite().sum() == 23


def test_relative_error() -> None:
    values = normal(1 << 14, 5)
    eight, four = (relative_error(IntBlocks(8 if bits == 8 else 4, 64), values) for bits in (8, 4))
    expected = float((there_and_back(IntBlocks(4, 64), values) - values).norm() / values.norm())
    assert four == pytest.approx(expected) and 10 * eight < four < 0.12
    assert relative_error(IntBlocks(4, 64), torch.zeros(64)) == 0.0


def test_a_block_that_does_not_fill_bytes_is_refused() -> None:
    for bits, block in ((8, 6), (4, 12), (8, 0)):
        with pytest.raises(ValueError, match="block must be a multiple of"):
            IntBlocks(8 if bits == 8 else 4, block)
