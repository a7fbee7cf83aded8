"""Vectors of bits that ranks combine: for any number of ranks, in as many rounds and bytes as they should take."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hooks.comm import Algorithm, Round, num_rounds, run_on_fabric
from ddp_hooks.comm.executors.fabric import RankTraffic
from ddp_hooks.coordination.negotiation.messages import (
    VectorBuffers,
    and_of_all,
    indices,
    or_of_all,
    vector_nbytes,
)

Combine = Callable[[int, int, VectorBuffers], Generator[Round, None, int]]


def combined(
    combine: Combine, bits: list[int], num_bits: int, buffers: list[VectorBuffers]
) -> tuple[list[int], list[RankTraffic]]:
    """What each rank finds."""
    found = [0] * len(bits)

    def keep(rank: int) -> Algorithm:
        found[rank] = yield from combine(bits[rank], num_bits, buffers[rank])

    return found, run_on_fabric([keep(rank) for rank in range(len(bits))])


@pytest.mark.parametrize("world_size", [*range(1, 18), 31, 64, 100])
@pytest.mark.parametrize("num_bits", [0, 1, 8, 50, 333])
def test_all_ranks_have_the_same(world_size: int, num_bits: int) -> None:
    chance = random.Random(world_size * 1000 + num_bits)
    # Mostly ones: of zeros in a few places, a wrong AND would miss some.
    bits = [
        (1 << num_bits) - 1 & ~sum(1 << chance.randrange(num_bits or 1) for _ in range(2)) for _ in range(world_size)
    ]
    for combine, expected in (
        (and_of_all, reduce(lambda a, b: a & b, bits)),
        (or_of_all, reduce(lambda a, b: a | b, bits)),
    ):
        buffers = [VectorBuffers(rank, world_size) for rank in range(world_size)]
        found, traffic = combined(combine, bits, num_bits, buffers)
        assert found == [expected] * world_size
        nbytes = vector_nbytes(num_bits)
        assert nbytes <= -(-num_bits // 8) + 8
        assert all(each.sent_bytes == nbytes * num_rounds(world_size) for each in traffic)


def test_memory_is_used_again() -> None:
    world_size, chance = 5, random.Random(0)
    buffers = [VectorBuffers(rank, world_size) for rank in range(world_size)]
    before = buffers[0].rounds(vector_nbytes(50))
    for num_bits in (50, 50, 50, 333, 0, 50):
        bits = [chance.getrandbits(num_bits) | chance.getrandbits(num_bits) for _ in range(world_size)]
        found, _ = combined(and_of_all, bits, num_bits, buffers)
        assert found == [reduce(lambda a, b: a & b, bits)] * world_size
        rounds = buffers[0].rounds(vector_nbytes(num_bits))
        assert (rounds is before) == (len(before[0][1]) == vector_nbytes(num_bits)), "of one length"
        before = rounds


@given(st.integers(0, 1 << 70))
def test_indices(bits: int) -> None:
    assert indices(bits) == [index for index in range(71) if bits >> index & 1]
