"""Dense collectives on two levels: within nodes, whose links are fast, then between nodes.

Nodes and local ranks are those of :class:`~ddp_hooks.comm.Nodes`.

1. Within each node: local rank l gets the node's sum of the ranges owned by local rank l of every node.
2. Between nodes: equal local ranks sum their ranges.

An all-gather does 2, then 1. Of n bytes each of N nodes sends n (N - 1) / N to others. DeAR (sections III-A and VII-A)
allows any all-reduce that splits in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.collectives import all_gather_among, reduce_scatter_among
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.comm.nodes import Nodes

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


def sum_within_node(ranges: Sequence[Sequence[Tensor]], nodes: Nodes) -> Algorithm:
    """Sum this local rank's tensors over the ranks of its node, in their order, in place; the first level alone.

    ``ranges`` are by local rank. The other ranks' tensors travel, and do not change.
    """
    own = ranges[nodes.local_rank]
    scratch = own[0].new_empty((nodes.size - 1) * sum(each.numel() for each in own)) if own else torch.empty(0)
    yield from reduce_scatter_among(nodes.members, nodes.local_rank, ranges, scratch)


def levels_of(chunks: Sequence[Tensor], rank: int, node_size: int) -> tuple[_Level, _Level]:
    """Return the level within the rank's node, and that between nodes."""
    nodes = Nodes(len(chunks), rank, node_size)
    between = [[chunks[peer]] for peer in nodes.peers]
    return (nodes.members, nodes.local_rank, nodes.by_local_rank(chunks)), (nodes.peers, nodes.node, between)
