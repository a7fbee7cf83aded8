"""Embedding table whose columns are split over the ranks (EmbRace, section 4.1.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Table:
    """Table and the columns that this rank owns.

    Args:
        index: position among the tables.
        name: path of the ``nn.Embedding`` in the model; the first path if several modules share the weight.
        aliases: the other paths.
        num_rows, dim: shape of the whole table.
        bounds: rank r owns columns ``[bounds[r], bounds[r + 1])``.
        weight: this rank's columns, (num_rows, own columns), contiguous.
        padding_idx: row without gradient, or None.
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
    def shape(self) -> tuple[int, int]:
        """Shape of the whole table."""
        return self.num_rows, self.dim

    def num_columns(self, rank: int) -> int:
        """Return how many columns a rank owns."""
        return self.bounds[rank + 1] - self.bounds[rank]

    def nbytes(self, num_rows: int, rank: int) -> int:
        """Return the bytes of ``num_rows`` rows of a rank's columns."""
        return num_rows * self.num_columns(rank) * self.weight.element_size()

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """Return a view of a rank's columns of (..., dim)."""
        return full[..., self.bounds[rank] : self.bounds[rank + 1]]


def column_bounds(dim: int, world_size: int) -> tuple[int, ...]:
    """Split ``dim`` columns as ``torch.chunk`` and DTensor's ``Shard`` do; return each rank's start, and the end."""
    share = -(-dim // world_size)
    return tuple(min(rank * share, dim) for rank in range(world_size + 1))
