"""What sparse all-reduce algorithms have in common."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeAlias

from ddp_hooks.comm import Round
from ddp_hooks.topk.sparse import SparseVector

Exchange: TypeAlias = Generator[Round, None, SparseVector]
"""Rounds of one all-reduce; returns the sum, the same on every rank."""


class Selector(Protocol):
    """Finds the largest entries of blocks of a working vector; their indices are those that they have in the block."""

    def receive(self, block: int, vector: SparseVector) -> None:
        """Add entries to a block that was not selected from; the working vector does not change."""

    def select(self, block: int) -> SparseVector:
        """The largest entries of a block and what it has received; once per block."""
