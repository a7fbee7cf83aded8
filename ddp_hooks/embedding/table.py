"""One table, of which every rank holds some columns of all rows (EmbRace, section 4.1.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Table:
    """A table, and the part of it that is here.

    Args:
        index: its place among the tables.
        name: of the weight in the model that was not sharded, without ``.weight``; the first one if several modules
            share it.
        aliases: the other names.
        num_rows, dim: of the whole table.
        bounds: rank r holds the columns from ``bounds[r]`` to ``bounds[r + 1]``.
        weight: (num_rows, own columns), contiguous.
        padding_idx: a row without gradient; None: there is none.
    """

    index: int
    name: str
    aliases: tuple[str, ...]
    num_rows: int
    dim: int
    bounds: tuple[int, ...]
    weight: torch.nn.Parameter
    padding_idx: int | None

    @property
    def row_bytes(self) -> int:
        """Of a whole row."""
        return self.dim * self.weight.element_size()

    def columns_of(self, rank: int) -> int:
        """How many a rank holds."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """A rank's columns of (..., dim); a view."""
        return full[..., self.bounds[rank] : self.bounds[rank + 1]]


def column_bounds(dim: int, world_size: int) -> tuple[int, ...]:
    """Where each rank's columns begin, and the end: as ``torch.chunk`` and DTensor's ``Shard`` cut a dimension."""
    share = -(-dim // world_size)
    return tuple(min(rank * share, dim) for rank in range(world_size + 1))
