"""Lookups: every rank sends every other rank its columns of the rows which that rank wants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, pairwise_exchange
from ddp_hooks.embedding.exchange.ids import BatchRows, Ids, Wanted
from ddp_hooks.embedding.exchange.packing import as_rows, new_message
from ddp_hooks.embedding.table import Table


class Lookup:
    """Vectors that one rank looks up in one table for one batch, and their gradients.

    Attributes:
        by_rank: rows that every rank looks up in this batch.
        vectors: (m, dim), of the rows of ``wanted``; None before they arrive.
        gradient: (m, dim), summed over calls; None: no backward so far.
        touched: (m,) bool, rows that some call used.
        closed: its gradients were sent, or a step left them behind.
    """

    def __init__(self, table: Table, wanted: Wanted) -> None:
        self.table = table
        self.by_rank: list[Ids] = []
        self.vectors: Tensor | None = None
        self.gradient: Tensor | None = None
        self.touched: Tensor | None = None
        self.closed = False
        self._wanted = wanted
        self._positions: Tensor | None = None  # of wanted.ids
        self._sorted: tuple[Ids, Ids] | None = None  # rows in ascending order, and their positions

    def positions_of(self, ids: Ids) -> Tensor | int:
        """Return where the vectors of these ids are, (n,) int64; or the first id that was not looked up."""
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
        """Coalesce a call's gradient, (n, dim), at (n,) ``positions`` (EmbRace, section 4.2.2)."""
        if self.gradient is None or self.touched is None:
            self.gradient = gradient.new_zeros(len(self._wanted.rows), self.table.dim)
            self.touched = torch.zeros(len(self._wanted.rows), dtype=torch.bool, device=gradient.device)
        self.gradient.index_add_(0, positions, gradient)
        self.touched[positions] = True

    def drop_gradient(self) -> None:
        """Forget what backwards have left."""
        self.gradient = self.touched = None


def look_up(lookups: Sequence[Lookup], batch: BatchRows, rank: int, world_size: int) -> Algorithm:
    """Fetch the vectors of several tables in one AlltoAll of about U * dim / P numbers per pair, for U rows (Table 2).

    Does nothing if the batch's rows of all ranks are unknown.
    """
    if batch.by_rank is None or not lookups:
        return
    device = lookups[0].table.weight.device
    tables = [lookup.table for lookup in lookups]
    rows_of = [batch.by_rank[table.index] for table in tables]
    outgoing, incoming = [], []
    for peer in range(world_size):
        asked = [table.nbytes(len(rows[peer]), rank) for table, rows in zip(tables, rows_of, strict=True)]
        message, parts = new_message(asked, device)
        for table, rows, part in zip(tables, rows_of, parts, strict=True):
            target = as_rows(part, len(rows[peer]), table.num_columns(rank), table.weight.dtype)
            torch.index_select(table.weight.detach(), 0, torch.from_numpy(rows[peer]).to(device), out=target)
        outgoing.append(message)
        if peer != rank:
            mine = [table.nbytes(len(rows[rank]), peer) for table, rows in zip(tables, rows_of, strict=True)]
            message, parts = new_message(mine, device)
        incoming.append((message, parts))
    yield from pairwise_exchange(outgoing, [message for message, _ in incoming], rank)
    for position, (lookup, table, rows) in enumerate(zip(lookups, tables, rows_of, strict=True)):
        num_rows = len(rows[rank])
        vectors = torch.empty(num_rows, table.dim, dtype=table.weight.dtype, device=device)
        for peer, (_, parts) in enumerate(incoming):
            part = as_rows(parts[position], num_rows, table.num_columns(peer), table.weight.dtype)
            table.cut(vectors, peer).copy_(part)
        lookup.by_rank, lookup.vectors = rows, vectors
