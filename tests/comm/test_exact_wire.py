"""Exact 16 bits: the bits of a reduce-scatter of float32, in as few bytes as lose nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ddp_hooks.comm import run_on_fabric
from ddp_hooks.comm.algorithms.exact import exact_reduce_scatter, exact_scratch_bytes
from ddp_hooks.comm.executors.fabric import RankTraffic
from ddp_hooks.comm.wire.exact import BLOCK, Arrived, ExactWire, PairMemory, encode, message_bytes

NUMEL = 3 * BLOCK + 77  # of a range


def fits_bfloat16(generator: torch.Generator, numel: int) -> Tensor:
    return torch.randn(numel, generator=generator).bfloat16().float()


def fits_float16(generator: torch.Generator, numel: int) -> Tensor:
    return (torch.randn(numel, generator=generator) * 2**10).half().float()


def fits_nothing(generator: torch.Generator, numel: int) -> Tensor:
    return torch.randn(numel, generator=generator)


def fits_mostly(generator: torch.Generator, numel: int) -> Tensor:
    values = fits_bfloat16(generator, numel)
    values[BLOCK // 2 :: 64 * BLOCK] = 1 / 3  # in one block of 64
    return values


def extreme(generator: torch.Generator, numel: int) -> Tensor:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 2.0**-133, 2.0**-24, 65504.0, 65520.0, 3.4e38, 1.0])
    return special[torch.randint(len(special), (numel,), generator=generator)]


class Ranks:
    """P ranks that reduce-scatter one slice, turn after turn, and remember."""

    def __init__(self, world_size: int, numel: int) -> None:
        self.wires = [ExactWire() for _ in range(world_size)]
        self.world_size, self.numel = world_size, numel

    def turn(self, values: list[Tensor], divisor: int = 1) -> tuple[list[Tensor], list[RankTraffic]]:
        """Reduce ``values``, (P * numel,) per rank; return every rank's range and traffic."""
        starts = [rank * self.numel for rank in range(self.world_size)]
        chunks = [[own[start : start + self.numel] for start in starts] for own in [each.clone() for each in values]]
        algorithms = []
        for rank, own in enumerate(chunks):
            scratch = torch.empty(exact_scratch_bytes(own, rank), dtype=torch.uint8)
            algorithms.append(exact_reduce_scatter(own, rank, self.wires[rank], 0, scratch, divisor))
        traffic = run_on_fabric(algorithms)
        return [own[rank] for rank, own in enumerate(chunks)], traffic


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def expected(values: list[Tensor], rank: int, numel: int, divisor: int) -> Tensor:
    ranges = [each[rank * numel : (rank + 1) * numel] for each in values]
    total = ranges[0].clone()
    for each in ranges[1:]:
        total = total + each
    return total / divisor


KINDS = [fits_bfloat16, fits_float16, fits_nothing, fits_mostly]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_same_bits_as_a_sum_in_float32(world_size: int) -> None:
    """Any order of gradients that fit and do not, so that memories of every kind meet every message."""
    generator = torch.Generator().manual_seed(world_size)
    ranks = Ranks(world_size, NUMEL)
    for turn in range(24):
        kinds = [KINDS[int(torch.randint(len(KINDS), (), generator=generator))] for _ in range(world_size)]
        values = [kind(generator, world_size * NUMEL) for kind in kinds]
        reduced, _ = ranks.turn(values, world_size)
        for rank, own in enumerate(reduced):
            assert same_bits(own, expected(values, rank, NUMEL, world_size)), f"turn {turn}, rank {rank}"


@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_any_length(numel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ranks = Ranks(3, numel)
    for kind in KINDS:
        values = [kind(generator, 3 * numel) for _ in range(3)]
        reduced, _ = ranks.turn(values)
        assert all(same_bits(own, expected(values, rank, numel, 1)) for rank, own in enumerate(reduced))


def test_every_number_arrives_as_it_was() -> None:
    """Zeros of both signs, infinity, numbers at and below both formats' least, and above float16's largest."""
    generator = torch.Generator().manual_seed(0)
    sender, receiver = PairMemory(), PairMemory()
    for kind in (fits_float16, extreme, extreme, fits_bfloat16, extreme, fits_float16):
        values, decoded = kind(generator, NUMEL), torch.empty(NUMEL)
        if sender.is_whole(NUMEL):
            assert receiver.is_whole(NUMEL)
            continue
        assert not receiver.is_whole(NUMEL)
        message = torch.empty(message_bytes(NUMEL, sender), dtype=torch.uint8)
        second = encode(values, sender, message)
        arrived = Arrived.of(message, NUMEL, receiver)
        assert arrived.low_of_late.shape == second.shape
        arrived.low_of_late.copy_(second)
        arrived.decode(decoded)
        assert same_bits(values, decoded)


def bytes_per_number(kind: Callable[[torch.Generator, int], Tensor], turns: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    numel = 64 * BLOCK
    ranks = Ranks(2, numel)
    return [ranks.turn([kind(generator, 2 * numel) for _ in range(2)])[1][0].sent_bytes / numel for _ in range(turns)]


def test_bytes() -> None:
    assert bytes_per_number(fits_bfloat16, 3) == pytest.approx([2, 2, 2], abs=0.01)
    assert bytes_per_number(fits_float16, 3) == pytest.approx([2, 2, 2], abs=0.01)
    # One block in 64 does not fit: its low bits come late, then with the others.
    assert bytes_per_number(fits_mostly, 3) == pytest.approx([2 + 2 / 64] * 3, abs=0.01)
    assert bytes_per_number(fits_nothing, 8) == pytest.approx([4] * 8, abs=0.01)


def test_rounds() -> None:
    """Low bits that nobody expected cost a round; numbers that do not fit are looked at in turns 0, 2, 5, 10, ..."""
    generator = torch.Generator().manual_seed(0)
    ranks = Ranks(2, NUMEL)
    rounds = [ranks.turn([fits_mostly(generator, 2 * NUMEL) for _ in range(2)])[1][0].rounds for _ in range(3)]
    assert rounds == [2, 1, 1]
    ranks = Ranks(2, NUMEL)
    rounds = [ranks.turn([fits_nothing(generator, 2 * NUMEL) for _ in range(2)])[1][0].rounds for _ in range(20)]
    assert [turn for turn, number in enumerate(rounds) if number == 2] == [0, 2, 5, 10, 19]
