"""Dense collectives on two levels: within nodes, whose links are fast, then between nodes.

Ranks ``n * node_size`` to ``(n + 1) * node_size - 1`` share node n. A reduce-scatter first sums within every node, so
that each of its workers holds the node's sum of all ranges that workers at its place own, and then between the workers
at the same place of all nodes; an all-gather goes the other way. Of n bytes each of N nodes sends (N - 1) / N n to
others. DeAR (sections III-A and VII-A) allows any all-reduce that splits in two.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddp_hooks.comm.algorithms.collectives import all_gather_among, reduce_scatter_among
from ddp_hooks.comm.algorithms.exchange import Algorithm


def two_level_reduce_scatter(
    chunks: Sequence[Tensor], rank: int, node_size: int, scratch: Tensor, divisor: int = 1
) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks, ``(g0 + g1) + (g2 + g3) + ...`` by node, and divide the sum, in place.

    Args:
        chunks: one 1-D tensor per rank; ``chunks[c]`` has the same length on every rank. Those of other ranks at this
            rank's place end as their node's sums, the rest stays. float16 and bfloat16 are rounded once per level.
        rank: the rank that runs this generator.
        node_size: workers per node, a divisor of their number.
        scratch: at least :func:`two_level_scratch_numel` elements; overwritten.
        divisor: number of ranks for a mean.
    """
    places = _Places(chunks, rank, node_size)
    yield from reduce_scatter_among(places.node_members, places.place, places.within, scratch)
    yield from reduce_scatter_among(places.place_members, places.node, places.between, scratch, divisor)


def two_level_all_gather(chunks: Sequence[Tensor], rank: int, node_size: int) -> Algorithm:
    """Copy ``chunks[r]`` of every rank r to all ranks, in place.

    Args:
        chunks: as above; ``chunks[rank]`` is read, the others are overwritten.
        rank: the rank that runs this generator.
        node_size: workers per node, a divisor of their number.
    """
    places = _Places(chunks, rank, node_size)
    yield from all_gather_among(places.place_members, places.node, places.between)
    yield from all_gather_among(places.node_members, places.place, places.within)


def two_level_scratch_numel(chunks: Sequence[Tensor], rank: int, node_size: int) -> int:
    """Return the elements that :func:`two_level_reduce_scatter` receives at a time; also with nodes of one."""
    within = (node_size - 1) * sum(chunk.numel() for chunk in chunks[rank % node_size :: node_size])
    return max(within, (len(chunks) // node_size - 1) * chunks[rank].numel())


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
        """Ranges that the workers at each place own, in all nodes."""
        self.between = [[chunks[member]] for member in self.place_members]
        """Ranges that the workers at this place own, by node."""
