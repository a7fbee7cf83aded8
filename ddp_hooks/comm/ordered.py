"""Sums in the order of another collective: by another route, the same bits.

Floating-point sums depend on the order of their terms. A ring adds what it sums for a rank beginning behind it; a
reduce-scatter in ceil(log2 P) rounds adds in a tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from ddp_hooks.comm.bags import reduce_scatter_steps
from ddp_hooks.comm.choice import Collective
from ddp_hooks.comm.collectives import Partition, pairwise_exchange
from ddp_hooks.comm.exchange import Algorithm

Merges: TypeAlias = tuple[tuple[int, int], ...]


class Segment(NamedTuple):
    """Elements ``[start, end)`` of a chunk, to be summed as a collective sums for ``owner``."""

    start: int
    end: int
    owner: int
    collective: Collective = "ring"


def ordered_reduce_scatter(
    partition: Partition, rank: int, segments: Sequence[Segment], node_size: int = 1
) -> Algorithm:
    """The mean of this rank's range over all ranks, in place, each segment summed in an order of its own.

    One round: every rank sends each range straight to its owner, which adds. As many bytes as a ring, P - 1 times the
    scratch memory.

    Args:
        partition: of which ``rank`` owns its range; the rest is left as it is.
        rank: the rank that runs this generator.
        segments: of this rank's range, covering it.
        node_size: ranks per node, for collectives on two levels.
    """
    chunks = partition.ranges
    world_size = len(chunks)
    parts = [chunks[rank] if peer == rank else torch.empty_like(chunks[rank]) for peer in range(world_size)]
    yield from pairwise_exchange(chunks, parts, rank)
    for start, end, owner, collective in segments:
        sums = [part[start:end] for part in parts]
        for into, source in merges(collective, owner, world_size, node_size):
            sums[into] = sums[into] + sums[source]
        chunks[rank][start:end].copy_(sums[owner]).div_(world_size)


def merges(collective: Collective, owner: int, world_size: int, node_size: int = 1) -> Merges:
    """``(into, source)``, one addition after the other: what rank ``into`` has so far, and what comes from ``source``.

    >>> merges("ring", 0, 4)
    ((2, 1), (3, 2), (0, 3))
    >>> merges("log", 0, 4)
    ((0, 2), (1, 3), (0, 1))
    """
    if collective == "ring":
        return _ring(range(world_size), owner)
    if collective == "log":
        return _along_bags(world_size)[owner]
    node, place = divmod(owner, node_size)
    firsts = range(0, world_size, node_size)
    within = tuple(merge for first in firsts for merge in _ring(range(first, first + node_size), place))
    return (*within, *_ring(range(place, world_size, node_size), node))


@lru_cache
def _along_bags(world_size: int) -> tuple[Merges, ...]:
    """Of every owner, those of :func:`~ddp_hooks.comm.log_reduce_scatter`."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for steps in zip(*(reduce_scatter_steps(rank, world_size) for rank in range(world_size)), strict=True):
        for rank, step in enumerate(steps):
            for owner in step.incoming:
                found[owner].append((rank, step.source))
    return tuple(map(tuple, found))


def _ring(members: Sequence[int], position: int) -> Merges:
    """A ring over some ranks, that ends at ``members[position]``."""
    around = [members[(position + step) % len(members)] for step in range(1, len(members) + 1)]
    return tuple((into, source) for source, into in itertools.pairwise(around))
