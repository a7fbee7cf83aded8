"""Dense collectives as generators: ring reduce-scatter, ring all-gather, pairwise exchange.

Both rings are the halves of the ring all-reduce of DeAR, section III-A (Eq. 3 and 4): P - 1 rounds each, in which
every rank sends one chunk to its right neighbour and receives one from its left. They work in place on chunks of
any size, also empty ones, for any number of ranks including one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ddp_hooks.comm.exchange import Algorithm, Recv, Send, round_of


def ring_reduce_scatter(chunks: Sequence[Tensor], rank: int, scratch: Tensor, divisor: int = 1) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks, and divide the sum, in place (DeAR, Eq. 3).

    Args:
        chunks: one 1-D tensor per rank; ``chunks[c]`` has the same length on every rank. ``chunks[rank]`` ends as
            the sum; the other chunks end as partial sums and mean nothing.
        rank: the rank that runs this generator.
        scratch: at least as long as the longest chunk; overwritten.
        divisor: number of ranks for a mean; here the sum is still in the cache.
    """
    world_size = len(chunks)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(1, world_size):
        outgoing = chunks[(rank - step) % world_size]
        partial = chunks[(rank - step - 1) % world_size]
        incoming = scratch[: partial.numel()]
        yield round_of(Recv(left, incoming), Send(right, outgoing))
        if partial.numel():
            partial.add_(incoming)
    if divisor > 1 and chunks[rank].numel():
        chunks[rank].div_(divisor)


def ring_all_gather(chunks: Sequence[Tensor], rank: int) -> Algorithm:
    """Copy ``chunks[r]`` of every rank r to all ranks, in place (DeAR, Eq. 4).

    Args:
        chunks: one 1-D tensor per rank; ``chunks[c]`` has the same length on every rank. ``chunks[rank]`` is read,
            the others are overwritten.
        rank: the rank that runs this generator.
    """
    world_size = len(chunks)
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        incoming = chunks[(rank - step - 1) % world_size]
        yield round_of(Recv(left, incoming), Send(right, outgoing))


def pairwise_exchange(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], rank: int) -> Algorithm:
    """Send ``outgoing[q]`` to every rank q and receive ``incoming[q]`` from it, in one round.

    Args:
        outgoing, incoming: one 1-D tensor per rank, possibly empty; entries at ``rank`` are ignored. The length of
            ``outgoing[q]`` here equals the length of ``incoming[rank]`` on q.
    """
    others = [peer for peer in range(len(outgoing)) if peer != rank]
    receives = [Recv(peer, incoming[peer]) for peer in others]
    yield round_of(*receives, *(Send(peer, outgoing[peer]) for peer in others))


class Partition(NamedTuple):
    """A flat tensor cut into one range per rank: rank r owns ``flat[bounds[r] : bounds[r + 1]]``."""

    flat: Tensor  # (numel,), contiguous
    bounds: tuple[int, ...]  # world_size + 1 ascending offsets, in elements, from 0 to numel

    @property
    def ranges(self) -> list[Tensor]:
        """Of every rank its own."""
        return [self.flat[start:end] for start, end in itertools.pairwise(self.bounds)]

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


def aligned_bounds(numel: int, world_size: int, element_size: int, alignment_bytes: int = 128) -> tuple[int, ...]:
    """Cut ``numel`` elements into ``world_size`` equal aligned ranges; what is left over belongs to the last rank.

    Equal ranges let a native collective run in place; the alignment keeps every range friendly to vector units.
    """
    step = max(1, alignment_bytes // element_size)
    share = numel // world_size // step * step
    return (*(rank * share for rank in range(world_size)), numel)
