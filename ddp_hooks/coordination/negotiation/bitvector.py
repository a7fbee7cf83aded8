"""Bitwise AND and OR over all ranks, in ceil(log2 P) rounds of one message each, for any number of ranks.

A bitwise AND of a vector with itself changes nothing, so a vector may count twice: after rounds of distance 1, 2, 4, …
every rank has combined the vectors of all ranks.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from ddp_hooks.comm import Recv, Round, Send, num_rounds


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


def and_of_all(bits: int, num_bits: int, buffers: VectorBuffers) -> Generator[Round, None, int]:
    """Return the ``num_bits`` bits that are set on all ranks (Horovod, Algorithm 2, line 13)."""
    nbytes = vector_nbytes(num_bits)
    for exchanges, outgoing, incoming in buffers.rounds(nbytes):
        outgoing[:] = bits.to_bytes(nbytes, "little")
        yield exchanges
        bits &= int.from_bytes(incoming, "little")
    return bits


def or_of_all(bits: int, num_bits: int, buffers: VectorBuffers) -> Generator[Round, None, int]:
    """Return the bits that are set on any rank: the complement of the AND of complements (PAPER_NOTES, 17)."""
    all_bits = (1 << num_bits) - 1
    return all_bits ^ (yield from and_of_all(all_bits ^ bits, num_bits, buffers))


def vector_nbytes(num_bits: int) -> int:
    """Return the size of a vector of ``num_bits`` bits; no message is empty."""
    return max(1, -(-num_bits // 8))


def indices(bits: int) -> list[int]:
    """Return the indices of the bits that are set, ascending."""
    return [index for index, digit in enumerate(reversed(f"{bits:b}")) if digit == "1"]
