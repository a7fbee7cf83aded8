"""Messages of a cycle: bit vectors of all ranks, combined, and JSON from all ranks to rank 0 and back.

A bitwise AND of a vector with itself changes nothing, so a vector may count twice: after rounds of distance 1, 2, 4, …,
ceil(log2 P) of them for any number of ranks, every rank has combined the vectors of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

import torch

from ddp_hooks.comm import Algorithm, Recv, Round, Send, num_rounds

Receiving: TypeAlias = Generator[Round, None, list[Any]]


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


def gather(message: object, rank: int, world_size: int, fan_out: int | None = None) -> Receiving:
    """Return the messages of all ranks, in their order, on rank 0, and nothing elsewhere; along a tree."""
    # A rank receives from at most ``fan_out`` children, and sends their messages and its own as one to its parent.
    width = fan_out if fan_out is not None else max(1, world_size - 1)
    subtree: list[list[Any]] = [[rank, message]]
    if children := children_of(rank, world_size, width):
        for part in (yield from _receive(children)):
            subtree += part
    if rank:
        yield from _send((rank - 1) // width, subtree)
        return []
    return [each for _, each in sorted(subtree, key=lambda pair: pair[0])]


def children_of(rank: int, world_size: int, width: int) -> range:
    """Return the children of a rank in a tree of ``width`` children per rank, laid out as a heap."""
    first = rank * width + 1
    return range(min(first, world_size), min(first + width, world_size))


def broadcast(message: Any, rank: int, world_size: int) -> Generator[Round, None, Any]:
    """Return rank 0's message on all ranks, along a binomial tree; ``message`` of other ranks is ignored."""
    lowest = rank & -rank if rank else 1 << (world_size - 1).bit_length()
    if rank:
        (message,) = yield from _receive([rank - lowest])
    distance = lowest >> 1
    while distance:
        if rank + distance < world_size:
            yield from _send(rank + distance, message)
        distance >>= 1
    return message


def _send(peer: int, message: object) -> Algorithm:
    data = json.dumps(message, separators=(",", ":")).encode()
    yield [Send(peer, torch.tensor([len(data)]))]
    yield [Send(peer, torch.frombuffer(bytearray(data), dtype=torch.uint8))]


def _receive(peers: Sequence[int]) -> Receiving:
    lengths = [torch.empty(1, dtype=torch.int64) for _ in peers]
    yield [Recv(peer, length) for peer, length in zip(peers, lengths, strict=True)]
    messages = [torch.empty(int(length), dtype=torch.uint8) for length in lengths]
    yield [Recv(peer, message) for peer, message in zip(peers, messages, strict=True)]
    return [json.loads(message.numpy().tobytes()) for message in messages]
