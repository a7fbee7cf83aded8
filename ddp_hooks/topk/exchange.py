"""What sparse all-reduce algorithms have in common."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeAlias

from torch import Tensor

from ddp_hooks.comm import Round
from ddp_hooks.topk.sparse import SparseVector

Exchange: TypeAlias = Generator[Round, None, SparseVector]
"""Rounds of one all-reduce; returns the sum, the same on every rank."""


class Selector(Protocol):
    """Finds the largest entries of blocks of a working vector."""

    def received(self, block: int, indices: Tensor) -> None:
        """These entries of the block, (m,) ascending, have changed."""

    def select(self, block: int) -> SparseVector:
        """The block's largest entries, with their indices in the working vector."""
