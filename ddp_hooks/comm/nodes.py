"""Nodes of neighbouring ranks, for collectives on two levels: links within a node are fast, links between them slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Nodes:
    """Place of one rank. Ranks ``n * size`` to ``(n + 1) * size - 1`` share node n; with ``size`` 1 there is one level.

    Raises:
        ValueError: ``size`` does not divide ``world_size``.
    """

    world_size: int
    rank: int
    size: int = 1  # ranks per node

    def __post_init__(self) -> None:
        if self.size < 1 or self.world_size % self.size:
            raise ValueError(f"node_size must divide {self.world_size} ranks, got {self.size}")

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.size

    @property
    def node(self) -> int:
        return self.rank // self.size

    @property
    def local_rank(self) -> int:
        return self.rank % self.size

    @property
    def members(self) -> range:
        """Ranks of this rank's node."""
        return range(self.node * self.size, (self.node + 1) * self.size)

    @property
    def peers(self) -> range:
        """Ranks with this local rank, by node."""
        return range(self.local_rank, self.world_size, self.size)

    def by_local_rank(self, chunks: Sequence[T]) -> list[Sequence[T]]:
        """Split one item per rank by the local ranks of these ranks, (size,) of (num_nodes,)."""
        return [chunks[each :: self.size] for each in range(self.size)]


def ranks_per_node(hosts: Sequence[str]) -> int | None:
    """Return how many neighbouring ranks share each host; None if hosts have different numbers, or ranks are mixed."""
    size = hosts.count(hosts[0])
    nodes = [hosts[first : first + size] for first in range(0, len(hosts), size)]
    equal = all(len(node) == size and len(set(node)) == 1 for node in nodes)
    return size if equal and len({node[0] for node in nodes}) == len(nodes) else None
