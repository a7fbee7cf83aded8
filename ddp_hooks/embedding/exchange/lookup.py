"""Lookups: every rank sends every other rank its columns of the rows which that rank wants.

And bookkeeping of lookups whose gradients are still to come, and of tables that may send theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm
from ddp_hooks.embedding.exchange.ids import BatchRows, Ids
from ddp_hooks.embedding.exchange.packing import as_rows, exchange_parts
from ddp_hooks.embedding.table import Table


class Lookup:
    """Vectors of ``rows``, (m,), which this rank looks up in one table for one batch, and their gradients."""

    def __init__(self, table: Table, rows: Ids) -> None:
        self.table = table
        self.by_rank: list[Ids] = []  # rows that every rank looks up in this batch
        self.vectors: Tensor | None = None  # (m, dim); None before they arrive
        self.gradient: Tensor | None = None  # (m, dim), summed over calls; None: no backward so far
        self.touched: Tensor | None = None  # (m,) bool, rows that some call used
        self.closed = False  # its gradients were sent, or a step left them behind
        self._rows = rows

    def positions_of(self, ids: Ids) -> Tensor | int:
        """Return where the vectors of these ids are, (n,) int64; or the first id that was not looked up."""
        places = np.minimum(np.searchsorted(self._rows, ids), len(self._rows) - 1)
        absent = ids[self._rows[places] != ids] if len(self._rows) else ids
        return int(absent[0]) if len(absent) else torch.from_numpy(places).to(self.table.weight.device)

    def add_gradient(self, positions: Tensor, gradient: Tensor) -> None:
        """Coalesce a call's gradient, (n, dim), at (n,) ``positions`` (EmbRace, section 4.2.2)."""
        if self.gradient is None or self.touched is None:
            self.gradient = gradient.new_zeros(len(self._rows), self.table.dim)
            self.touched = torch.zeros(len(self._rows), dtype=torch.bool, device=gradient.device)
        self.gradient.index_add_(0, positions, gradient)
        self.touched[positions] = True

    def drop_gradient(self) -> None:
        self.gradient = self.touched = None


def look_up(lookups: Sequence[Lookup], batch: BatchRows) -> Algorithm:
    """Fetch the vectors of several tables in one AlltoAll of about U * dim / P numbers per pair, for U rows (Table 2).

    Does nothing if the batch's rows of all ranks are unknown.
    """
    if batch.by_rank is None or not lookups:
        return
    first = lookups[0].table
    rank, device = first.rank, first.weight.device
    asked = [(lookup.table, batch.by_rank[lookup.table.index]) for lookup in lookups]

    def nbytes(sender: int, receiver: int) -> list[int]:
        return [table.nbytes(len(rows[receiver]), sender) for table, rows in asked]

    def write(receiver: int, parts: list[Tensor]) -> None:
        for (table, rows), part in zip(asked, parts, strict=True):
            target = as_rows(part, len(rows[receiver]), table.num_columns(rank), table.weight.dtype)
            torch.index_select(table.weight.detach(), 0, torch.from_numpy(rows[receiver]).to(device), out=target)

    received = yield from exchange_parts(rank, first.world_size, device, nbytes, write)
    for position, (lookup, (table, rows)) in enumerate(zip(lookups, asked, strict=True)):
        num_rows, dtype = len(rows[rank]), table.weight.dtype
        vectors = torch.empty(num_rows, table.dim, dtype=dtype, device=device)
        for peer, parts in enumerate(received):
            table.cut(vectors, peer).copy_(as_rows(parts[position], num_rows, table.num_columns(peer), dtype))
        lookup.by_rank, lookup.vectors = rows, vectors


class ExpectedGradients:
    """Lookups of forwards, until their gradients are sent or a step ends what has begun.

    Tables send in the same order on all ranks: the last one first, as backwards come mostly. A table may send when it
    had as many backwards as calls on this rank.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.open_calls: dict[int, int] = defaultdict(int)  # by table: calls without a backward, since it last sent
        self.backward_ended = True  # of the last forward; so the next one may drop its vectors
        self._tables = tables
        self._lookups: dict[int, list[Lookup]] = defaultdict(list)  # by table, with gradients that were not sent
        self._queue: list[int] = []  # tables that send in this backward
        self._latest: list[Lookup] = []  # of the last forward

    def lookups(self) -> Iterator[Lookup]:
        return (lookup for lookups in self._lookups.values() for lookup in lookups)

    def begin_forward(self) -> None:
        """Drop the vectors of earlier forwards, but for those of the last one if a backward may repeat it."""
        kept = set() if self.backward_ended else {id(lookup) for lookup in self._latest}
        for lookup in self.lookups():
            if id(lookup) not in kept:
                lookup.vectors = None
        for index in list(self._lookups):
            if not self._tables[index].weight.requires_grad:  # no backward may ever come that sends them
                self._lookups[index] = [lookup for lookup in self._lookups[index] if id(lookup) in kept]
        self._latest, self.backward_ended = [], False

    def expect(self, lookup: Lookup) -> None:
        self._lookups[lookup.table.index].append(lookup)
        self._latest.append(lookup)

    def latest_first(self, index: int) -> Iterator[Lookup]:
        return reversed(self._lookups[index])

    def begin_backward(self, synchronizes: bool = True) -> None:
        """Queue the tables that were used; without synchronization none sends, and gradients add up."""
        self._queue = [table.index for table in reversed(self._tables) if self._lookups[table.index] and synchronizes]

    def take_complete(self, force: bool = False) -> Iterator[list[Lookup]]:
        """Remove and yield the lookups of each table that may send now; with ``force`` all that were used may."""
        while self._queue and (force or not self.open_calls[self._queue[0]]):
            index = self._queue.pop(0)
            self.open_calls[index] = 0
            yield self._lookups.pop(index)

    @property
    def has_gradients(self) -> bool:
        return any(lookup.gradient is not None for lookup in self.lookups())

    def multiply(self, factor: float) -> None:
        for lookup in self.lookups():
            if lookup.gradient is not None:
                lookup.gradient.mul_(factor)

    def drop_gradients(self) -> None:
        for lookup in self.lookups():
            lookup.drop_gradient()

    def clear(self) -> None:
        """End what earlier forwards have begun: a step has passed, so their gradients come too late."""
        for lookup in self.lookups():
            lookup.closed = True
        self._lookups.clear()
        self.open_calls.clear()
