"""Vectors of bits that all ranks combine: one round per power of two, for any number of ranks.

A bitwise AND of a vector with itself changes nothing, so ranks may hear of the same vector twice: after rounds of
distance 1, 2, 4, … every rank has heard of all others, in ceil(log2 P) rounds of one message as long as the vector.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Recv, Send, num_rounds


class Messages:
    """Memory for what one rank sends and receives, used again by the next vector of the same length.

    Vectors are combined by numpy: after a pause, in which others have used the processor, an operation of torch takes
    ten times as long.
    """

    def __init__(self) -> None:
        self._nbytes = -1
        self._rounds: list[tuple[Tensor, Tensor, Any]] = []

    def of(self, nbytes: int, index: int) -> tuple[Tensor, Tensor, Any]:
        """For a round what is to be sent, what is to be received, each (nbytes,) of uint8, and both as one array."""
        if nbytes != self._nbytes:
            self._nbytes = nbytes
            self._rounds.clear()
        while len(self._rounds) <= index:
            rows = torch.empty(2, nbytes, dtype=torch.uint8)
            self._rounds.append((rows[0], rows[1], rows.numpy()))
        return self._rounds[index]


def and_of_all(vector: Tensor, rank: int, world_size: int, messages: Messages | None = None) -> Algorithm:
    """The bitwise AND of ``vector``, (nbytes,) of uint8, over all ranks, in place (Horovod, Algorithm 2, line 13).

    Args:
        vector: of this rank.
        rank, world_size: of the group.
        messages: memory for them, of this rank alone.
    """
    own, messages = vector.numpy(), messages or Messages()
    for index in range(num_rounds(world_size)):
        distance = 1 << index
        outgoing, incoming, rows = messages.of(vector.numel(), index)
        rows[0] = own  # a copy travels: what was sent must not change before the algorithm ends
        yield [Recv((rank - distance) % world_size, incoming), Send((rank + distance) % world_size, outgoing)]
        np.bitwise_and(own, rows[1], out=own)


def or_of_all(vector: Tensor, rank: int, world_size: int, messages: Messages | None = None) -> Algorithm:
    """Likewise the bitwise OR: the complement of the AND of complements (PAPER_NOTES, 17)."""
    own = vector.numpy()
    np.bitwise_not(own, out=own)
    yield from and_of_all(vector, rank, world_size, messages)
    np.bitwise_not(own, out=own)


def to_vector(status: int, bits: int, num_bits: int) -> Tensor:
    """A byte of status and ``num_bits`` bits, the lowest first."""
    return torch.frombuffer(bytearray([status, *bits.to_bytes(-(-num_bits // 8), "little")]), dtype=torch.uint8)


def from_vector(vector: Tensor) -> tuple[int, int]:
    """The reverse of :func:`to_vector`: status and bits."""
    data = vector.numpy().tobytes()
    return data[0], int.from_bytes(data[1:], "little")


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
