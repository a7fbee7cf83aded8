"""Types and arithmetic that all sparse all-reduce algorithms share.

Every algorithm is a generator function of ``(feedback, selector, plan, codec)``: error feedback, which is closed with
the result; the selector of the working vector, which adds the gradient; this worker's position; the wire format.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from ddp_hooks.comm import Round
from ddp_hooks.sparse.sparse_vector import SparseVector

Exchange: TypeAlias = Generator[Round, None, SparseVector]
"""Rounds of one all-reduce; returns the sum, the same on every rank."""


def even_bounds(numel: int, parts: int) -> tuple[int, ...]:
    """Cut ``numel`` elements into ranges of almost equal length: ``parts + 1`` ascending offsets."""
    return tuple(numel * part // parts for part in range(parts + 1))


def block_counts(k: int, bounds: Sequence[int]) -> tuple[int, ...]:
    """Share ``k`` entries among blocks: ``min(length, max(1, about k / blocks))`` of each."""
    blocks = len(bounds) - 1
    shares = even_bounds(k, blocks)
    return tuple(min(bounds[b + 1] - bounds[b], max(1, shares[b + 1] - shares[b])) for b in range(blocks))


@dataclass(frozen=True)
class Plan:
    """Position of one worker, and the blocks of a vector."""

    numel: int  # elements of the vector
    k: int  # entries to keep of it
    world_size: int
    num_teams: int  # divides world_size
    rank: int

    @property
    def team_size(self) -> int:
        return self.world_size // self.num_teams

    @property
    def team(self) -> int:
        return self.rank // self.team_size

    @property
    def position(self) -> int:
        """Position in the team, and number of the block that this worker reduces."""
        return self.rank % self.team_size

    @property
    def members(self) -> range:
        """Ranks of this worker's team."""
        return range(self.team * self.team_size, (self.team + 1) * self.team_size)

    @property
    def peers(self) -> range:
        """Ranks at this worker's position, in all teams."""
        return range(self.position, self.world_size, self.team_size)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        return even_bounds(self.numel, self.team_size)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Entries to keep of every block: ``d k / P`` of each."""
        return block_counts(self.k, self.bounds)
