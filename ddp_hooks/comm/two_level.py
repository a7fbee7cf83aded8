"""Dense collectives on two levels: within nodes, whose links are fast, then between nodes.

Ranks ``n * node_size`` to ``(n + 1) * node_size - 1`` share node n. A reduce-scatter is a ring within every node, by
which each of its workers comes to hold the node's sum of what the workers at its place own, and a ring between the
workers at the same place of all nodes; an all-gather goes the other way. Of n bytes a node of N sends (N - 1) / N n to
others in N - 1 rounds; in one ring around all P workers (P - 1) / P n in P - 1 rounds. DeAR (sections III-A and VII-A)
allows any all-reduce that splits in two.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_hooks.comm.exchange import Algorithm, Recv, Send, round_of


def two_level_reduce_scatter(
    chunks: Sequence[Tensor], rank: int, node_size: int, scratch: Tensor, divisor: int = 1
) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks, and divide the sum, in place.

    Args:
        chunks: one 1-D tensor per rank; ``chunks[c]`` has the same length on every rank. The others than
            ``chunks[rank]`` end as partial sums and mean nothing.
        rank: the rank that runs this generator.
        node_size: workers per node, a divisor of their number.
        scratch: as long as what the workers at one place of all nodes own; overwritten.
        divisor: number of ranks for a mean.
    """
    places = _Places(chunks, rank, node_size)
    yield from _ring_reduce_scatter(places.within, places.place, places.node_members, scratch)
    yield from _ring_reduce_scatter(places.between, places.node, places.place_members, scratch)
    if divisor > 1 and chunks[rank].numel():
        chunks[rank].div_(divisor)


def two_level_all_gather(chunks: Sequence[Tensor], rank: int, node_size: int) -> Algorithm:
    """Copy ``chunks[r]`` of every rank r to all ranks, in place.

    Args:
        chunks: as above; ``chunks[rank]`` is read, the others are overwritten.
        rank: the rank that runs this generator.
        node_size: workers per node, a divisor of their number.
    """
    places = _Places(chunks, rank, node_size)
    yield from _ring_all_gather(places.between, places.node, places.place_members)
    yield from _ring_all_gather(places.within, places.place, places.node_members)


class _Places:
    """Where a rank stands, and what belongs to whom."""

    def __init__(self, chunks: Sequence[Tensor], rank: int, node_size: int) -> None:
        world_size = len(chunks)
        if node_size < 1 or world_size % node_size:
            raise ValueError(f"node_size must divide {world_size} ranks, got {node_size}")
        self.node, self.place = divmod(rank, node_size)
        self.node_members = range(self.node * node_size, (self.node + 1) * node_size)
        self.place_members = range(self.place, world_size, node_size)
        self.within = [chunks[place::node_size] for place in range(node_size)]
        """What the workers at each place own, in all nodes."""
        self.between = [[chunks[member]] for member in self.place_members]
        """What the workers at this place own, by node."""


def _ring_reduce_scatter(
    parts: Sequence[Sequence[Tensor]], position: int, members: Sequence[int], scratch: Tensor
) -> Algorithm:
    """A ring over some ranks, of parts in several pieces each: ``parts[position]`` ends as their sum."""
    size = len(members)
    right, left = members[(position + 1) % size], members[(position - 1) % size]
    for step in range(1, size):
        outgoing = parts[(position - step) % size]
        partials = parts[(position - step - 1) % size]
        sizes = [partial.numel() for partial in partials]
        arriving = scratch[: sum(sizes)].split(sizes)
        yield round_of(*(Recv(left, part) for part in arriving), *(Send(right, part) for part in outgoing))
        for partial, part in zip(partials, arriving, strict=True):
            if partial.numel():
                partial.add_(part)


def _ring_all_gather(parts: Sequence[Sequence[Tensor]], position: int, members: Sequence[int]) -> Algorithm:
    """A ring over some ranks: ``parts[position]`` of each is copied to the others."""
    size = len(members)
    right, left = members[(position + 1) % size], members[(position - 1) % size]
    for step in range(size - 1):
        outgoing = parts[(position - step) % size]
        incoming = parts[(position - step - 1) % size]
        yield round_of(*(Recv(left, part) for part in incoming), *(Send(right, part) for part in outgoing))
