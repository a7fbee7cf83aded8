"""Which collective moves what: by its size, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Collective: TypeAlias = Literal["ring", "log", "two-level"]


@dataclass(frozen=True)
class CollectiveRule:
    """What decides it.

    Args:
        log_numel: what has at most so many elements moves in ceil(log2 P) rounds.
        node_size: ranks per node; of more than one, all else moves on two levels. 1: in one ring.
    """

    log_numel: int = 0
    node_size: int = 1

    def __post_init__(self) -> None:
        if self.log_numel < 0 or self.node_size < 1:
            raise ValueError(f"log_numel must be >= 0 and node_size >= 1, got {self}")

    def collective_of(self, numel: int) -> Collective:
        """For a partition of ``numel`` elements."""
        if numel <= self.log_numel:
            return "log"
        return "two-level" if self.node_size > 1 else "ring"
