"""Dense collectives on two levels: within nodes, whose links are fast, then between nodes.

Ranks ``n * node_size`` to ``(n + 1) * node_size - 1`` share node n; ``rank % node_size`` is the local rank.

1. Within each node: local rank l gets the node's sum of the ranges owned by local rank l of every node.
2. Between nodes: equal local ranks sum their ranges.

An all-gather does 2, then 1. Of n bytes each of N nodes sends n (N - 1) / N to others. DeAR (sections III-A and VII-A)
allows any all-reduce that splits in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from ddp_hooks.comm.algorithms.collectives import all_gather_among, reduce_scatter_among
from ddp_hooks.comm.algorithms.exchange import Algorithm

_Level: TypeAlias = tuple[Sequence[int], int, Sequence[Sequence[Tensor]]]  # members, which is this, chunks by member


def two_level_reduce_scatter(
    chunks: Sequence[Tensor], rank: int, node_size: int, scratch: Tensor, divisor: int = 1
) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks, ``(g0 + g1) + (g2 + g3) + ...`` by node, and divide the sum, in place.

    Arguments as in :func:`~.collectives.direct_reduce_scatter`, but for scratch memory of
    :func:`two_level_scratch_numel` elements. Chunks of equal local ranks end as their node's sums, the rest stays.
    float16 and bfloat16 are rounded once per level.
    """
    within, between = levels_of(chunks, rank, node_size)
    yield from reduce_scatter_among(*within, scratch)
    yield from reduce_scatter_among(*between, scratch, divisor)


def two_level_all_gather(chunks: Sequence[Tensor], rank: int, node_size: int) -> Algorithm:
    """Copy ``chunks[r]`` of every rank r to all ranks, in place; arguments as above."""
    within, between = levels_of(chunks, rank, node_size)
    yield from all_gather_among(*between)
    yield from all_gather_among(*within)


def two_level_scratch_numel(chunks: Sequence[Tensor], rank: int, node_size: int) -> int:
    """Return the elements that :func:`two_level_reduce_scatter` receives at a time; also with nodes of one."""
    within = (node_size - 1) * sum(chunk.numel() for chunk in chunks[rank % node_size :: node_size])
    return max(within, (len(chunks) // node_size - 1) * chunks[rank].numel())


def levels_of(chunks: Sequence[Tensor], rank: int, node_size: int) -> tuple[_Level, _Level]:
    """Return the level within the rank's node, and that between nodes."""
    world_size = len(chunks)
    if node_size < 1 or world_size % node_size:
        raise ValueError(f"node_size must divide {world_size} ranks, got {node_size}")
    node, local_rank = divmod(rank, node_size)
    members = range(node * node_size, (node + 1) * node_size)
    peers = range(local_rank, world_size, node_size)  # equal local ranks, by node
    within = [chunks[each::node_size] for each in range(node_size)]
    return (members, local_rank, within), (peers, node, [[chunks[peer]] for peer in peers])
