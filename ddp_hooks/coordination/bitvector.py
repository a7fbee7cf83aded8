"""Vectors of bits that all ranks combine: one round per power of two, for any number of ranks.

A bitwise AND of a vector with itself changes nothing, so ranks may hear of the same vector twice: after rounds of
distance 1, 2, 4, … every rank has heard of all others, in ceil(log2 P) rounds of one message as long as the vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Recv, Send, num_rounds


def and_of_all(vector: Tensor, rank: int, world_size: int) -> Algorithm:
    """The bitwise AND of ``vector``, (nbytes,) of uint8, over all ranks, in place (Horovod, Algorithm 2, line 13)."""
    for index in range(num_rounds(world_size)):
        distance = 1 << index
        incoming = torch.empty_like(vector)
        # A copy travels: what was sent must not change before the algorithm ends.
        yield [Recv((rank - distance) % world_size, incoming), Send((rank + distance) % world_size, vector.clone())]
        vector.bitwise_and_(incoming)


def or_of_all(vector: Tensor, rank: int, world_size: int) -> Algorithm:
    """Likewise the bitwise OR: the complement of the AND of complements (PAPER_NOTES, 17)."""
    vector.bitwise_not_()
    yield from and_of_all(vector, rank, world_size)
    vector.bitwise_not_()


def to_vector(status: int, bits: int, num_bits: int) -> Tensor:
    """A byte of status and ``num_bits`` bits, the lowest first."""
    return torch.frombuffer(bytearray([status, *bits.to_bytes(-(-num_bits // 8), "little")]), dtype=torch.uint8)


def from_vector(vector: Tensor) -> tuple[int, int]:
    """The reverse of :func:`to_vector`: status and bits."""
    status, *rest = vector.tolist()
    return status, int.from_bytes(bytes(rest), "little")


def vector_nbytes(num_bits: int) -> int:
    """Length of such a vector."""
    return 1 + -(-num_bits // 8)


def indices(bits: int) -> list[int]:
    """Of the bits that are set, ascending."""
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found
