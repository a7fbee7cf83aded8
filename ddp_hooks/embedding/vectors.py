"""Looking rows up: every rank sends every other the columns that it holds of the rows which that one wants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, pairwise_exchange
from ddp_hooks.embedding.ids import BatchRows, Ids, Wanted
from ddp_hooks.embedding.packing import as_rows, packed
from ddp_hooks.embedding.table import Table


class Lookup:
    """The vectors that one rank has looked up in one table for one batch, and the gradients that come back for them.

    Args:
        table: which one.
        wanted: what was looked up.

    Attributes:
        by_rank: the rows that every rank has looked up at the same time.
        vectors: (m, dim), of the rows of ``wanted``; once they are there.
        gradient: (m, dim), summed over the calls so far; None: there was no backward.
        touched: (m,), bool; rows that some call has used.
        closed: whether what it has of gradients is on its way.
    """

    def __init__(self, table: Table, wanted: Wanted) -> None:
        self.table = table
        self.by_rank: list[Ids] = []
        self.vectors: Tensor | None = None
        self.gradient: Tensor | None = None
        self.touched: Tensor | None = None
        self.closed = False
        self._wanted = wanted
        self._positions: Tensor | None = None  # of the ids, in the order in which they were given
        self._sorted: tuple[Ids, Ids] | None = None  # rows in ascending order, and where they are

    def positions_of(self, ids: Ids) -> Tensor | int:
        """Where the vectors of these ids are, (n,), int64; or the first id that was not looked up."""
        same = ids is self._wanted.ids or np.array_equal(ids, self._wanted.ids)
        if same and self._positions is not None:
            return self._positions
        rows = self._wanted.rows
        if self._sorted is None:
            order = np.argsort(rows, kind="stable") if rows is self._wanted.ids else np.arange(len(rows))
            self._sorted = rows[order], order
        ascending, order = self._sorted
        if same and rows is self._wanted.ids:
            found = np.arange(len(ids))
        else:
            places = np.minimum(np.searchsorted(ascending, ids), max(0, len(ascending) - 1))
            absent = ids[ascending[places] != ids] if len(ascending) else ids
            if len(absent):
                return int(absent[0])
            found = order[places]
        positions = torch.from_numpy(found).to(self.table.weight.device)
        if same:
            self._positions = positions
        return positions

    def add_gradient(self, positions: Tensor, gradient: Tensor) -> None:
        """A call's backward: coalesce (EmbRace, section 4.2.2).

        Args:
            positions: (n,), as :meth:`positions_of` has them.
            gradient: (n, dim), of what the call returned.
        """
        if self.gradient is None or self.touched is None:
            self.gradient = gradient.new_zeros(len(self._wanted.rows), self.table.dim)
            self.touched = torch.zeros(len(self._wanted.rows), dtype=torch.bool, device=gradient.device)
        self.gradient.index_add_(0, positions, gradient)
        self.touched[positions] = True

    def forget_gradient(self) -> None:
        """There was no backward."""
        self.gradient = self.touched = None


def look_up(lookups: Sequence[Lookup], batch: BatchRows, rank: int, world_size: int) -> Algorithm:
    """Fetch the vectors of several tables in one exchange.

    Each rank reads the columns that it holds of all rows that are wanted anywhere, and sends every rank those of the
    rows which that rank wants: an AlltoAll of about U * dim / P numbers between each pair, for U rows (Table 2).

    Args:
        lookups: what this rank wants, in the order of the tables.
        batch: what all ranks want; known when this begins. Nothing happens where it is not.
    """
    if batch.by_rank is None or not lookups:
        return
    device = lookups[0].table.weight.device
    rows_of = [batch.by_rank[lookup.table.index] for lookup in lookups]
    tables = [lookup.table for lookup in lookups]
    outgoing, incoming = [], []
    for peer in range(world_size):
        asked = [packed_rows(table, len(rows[peer]), rank) for table, rows in zip(tables, rows_of, strict=True)]
        message, parts = packed(asked, device)
        for table, rows, part in zip(tables, rows_of, parts, strict=True):
            target = as_rows(part, len(rows[peer]), table.columns_of(rank), table.weight.dtype)
            torch.index_select(table.weight.detach(), 0, torch.from_numpy(rows[peer]).to(device), out=target)
        outgoing.append(message)
        if peer == rank:
            incoming.append((message, parts))
        else:
            mine = [packed_rows(table, len(rows[rank]), peer) for table, rows in zip(tables, rows_of, strict=True)]
            incoming.append(packed(mine, device))
    yield from pairwise_exchange(outgoing, [message for message, _ in incoming], rank)
    for position, (lookup, table, rows) in enumerate(zip(lookups, tables, rows_of, strict=True)):
        num_rows = len(rows[rank])
        vectors = torch.empty(num_rows, table.dim, dtype=table.weight.dtype, device=device)
        for peer, (_, parts) in enumerate(incoming):
            part = as_rows(parts[position], num_rows, table.columns_of(peer), table.weight.dtype)
            table.cut(vectors, peer).copy_(part)
        lookup.by_rank, lookup.vectors = rows, vectors


def packed_rows(table: Table, num_rows: int, rank: int) -> int:
    """Bytes of so many rows of a rank's columns."""
    return num_rows * table.columns_of(rank) * table.weight.element_size()
