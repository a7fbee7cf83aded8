"""Vectors of bits that ranks combine: for any number of ranks, in as many rounds and bytes as they should take."""

from __future__ import annotations

import random
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hooks.comm import num_rounds, run_on_fabric
from ddp_hooks.coordination.negotiation.bitvector import (
    VectorBuffers,
    and_of_all,
    from_vector,
    indices,
    or_of_all,
    to_vector,
    vector_nbytes,
)


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
        vectors = [to_vector(0x5A, each, num_bits) for each in bits]
        traffic = run_on_fabric([combine(vectors[rank], rank, world_size) for rank in range(world_size)])
        assert [from_vector(vector) for vector in vectors] == [(0x5A, expected)] * world_size
        nbytes = vector_nbytes(num_bits)
        assert nbytes <= -(-num_bits // 8) + 8
        assert all(each.sent_bytes == nbytes * num_rounds(world_size) for each in traffic)


def test_memory_is_used_again() -> None:
    world_size, chance = 5, random.Random(0)
    buffers = [VectorBuffers(rank, world_size) for rank in range(world_size)]
    before = buffers[0].rounds(vector_nbytes(50))
    for num_bits in (50, 50, 50, 333, 0, 50):
        bits = [chance.getrandbits(num_bits) | chance.getrandbits(num_bits) for _ in range(world_size)]
        vectors = [to_vector(7, each, num_bits) for each in bits]
        run_on_fabric([and_of_all(vectors[rank], rank, world_size, buffers[rank]) for rank in range(world_size)])
        assert [from_vector(vector) for vector in vectors] == [(7, reduce(lambda a, b: a & b, bits))] * world_size
        rounds = buffers[0].rounds(len(vectors[0]))
        assert (rounds is before) == (len(before[0][1]) == len(vectors[0])), "of one length"
        before = rounds


@given(st.integers(0, 1 << 70), st.integers(0, 255))
def test_there_and_back(bits: int, status: int) -> None:
    vector = to_vector(status, bits, 71)
    assert len(vector) == vector_nbytes(71) == 10
    assert from_vector(vector) == (status, bits)
    assert indices(bits) == [index for index in range(71) if bits >> index & 1]
