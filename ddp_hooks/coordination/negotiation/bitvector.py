"""Bitwise AND and OR over all ranks, in ceil(log2 P) rounds of one message each, for any number of ranks.

A bitwise AND of a vector with itself changes nothing, so a vector may count twice: after rounds of distance 1, 2, 4, …
every rank has combined the vectors of all ranks.
"""

from __future__ import annotations

import torch

from ddp_hooks.comm import Algorithm, Recv, Round, Send, num_rounds


class VectorBuffers:
    """Rounds of one rank with their memory, which the next vector of the same length uses again.

    Vectors are combined as integers in memory that exists: after a pause, in which other threads have used the
    processor, an operation of torch or numpy takes ten times as long.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._nbytes = -1
        self._rounds: list[tuple[Round, memoryview, memoryview]] = []

    def rounds(self, nbytes: int) -> list[tuple[Round, memoryview, memoryview]]:
        """Return every round with the memory that it sends and receives, of ``nbytes`` each."""
        if nbytes != self._nbytes:
            self._nbytes = nbytes
            self._rounds = [self._round(nbytes, 1 << index) for index in range(num_rounds(self._world_size))]
        return self._rounds

    def _round(self, nbytes: int, distance: int) -> tuple[Round, memoryview, memoryview]:
        outgoing, incoming = memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))
        source, target = (self._rank - distance) % self._world_size, (self._rank + distance) % self._world_size
        sent, received = (torch.frombuffer(each, dtype=torch.uint8) for each in (outgoing, incoming))
        return [Recv(source, received), Send(target, sent)], outgoing, incoming


def and_of_all(vector: bytearray, rank: int, world_size: int, buffers: VectorBuffers | None = None) -> Algorithm:
    """AND ``vector``, of one length on all ranks, over all ranks, in place (Horovod, Algorithm 2, line 13)."""
    nbytes, own = len(vector), int.from_bytes(vector, "little")
    for exchanges, outgoing, incoming in (buffers or VectorBuffers(rank, world_size)).rounds(nbytes):
        outgoing[:] = own.to_bytes(nbytes, "little")
        yield exchanges
        own &= int.from_bytes(incoming, "little")
    vector[:] = own.to_bytes(nbytes, "little")


def or_of_all(vector: bytearray, rank: int, world_size: int, buffers: VectorBuffers | None = None) -> Algorithm:
    """OR ``vector`` over all ranks, in place: the complement of the AND of complements (PAPER_NOTES, 17)."""
    _complement(vector)
    yield from and_of_all(vector, rank, world_size, buffers)
    _complement(vector)


def _complement(vector: bytearray) -> None:
    vector[:] = (int.from_bytes(vector, "little") ^ (1 << 8 * len(vector)) - 1).to_bytes(len(vector), "little")


def to_vector(status: int, bits: int, num_bits: int) -> bytearray:
    """Return a vector of a byte of status and ``num_bits`` bits, the lowest first."""
    return bytearray((status | bits << 8).to_bytes(vector_nbytes(num_bits), "little"))


def from_vector(vector: bytearray) -> tuple[int, int]:
    """Return status and bits of a vector."""
    return vector[0], int.from_bytes(vector, "little") >> 8


def vector_nbytes(num_bits: int) -> int:
    """Return the size of a vector with ``num_bits`` bits."""
    return 1 + -(-num_bits // 8)


def indices(bits: int) -> list[int]:
    """Return the indices of the bits that are set, ascending."""
    return [index for index, digit in enumerate(reversed(f"{bits:b}")) if digit == "1"] if bits else []
