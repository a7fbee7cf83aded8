"""The rows of a table's gradient on their way to whoever holds their columns, in two parts (EmbRace, Algorithm 1).

*Prior* rows are those that some rank looks up in its next batch; they are needed before the next lookup. *Delayed* rows
are the others; they have until the lookup after that. Every rank knows what every rank has looked up, so all of them
know both parts of everybody's gradient, and nothing is told.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Round, pairwise_exchange
from ddp_hooks.embedding.ids import BatchRows, Ids
from ddp_hooks.embedding.packing import as_rows, packed
from ddp_hooks.embedding.table import Table
from ddp_hooks.embedding.vectors import Lookup, packed_rows

Mask = npt.NDArray[np.bool_]


class RowSum(NamedTuple):
    """The mean over ranks of some rows of a gradient: this rank's columns of them."""

    rows: Tensor  # (n,), int64, ascending, each once
    values: Tensor  # (n, own columns)


class GradientExchange:
    """One table's gradient of one synchronised backward: this rank's rows of all columns become all ranks' of its own.

    Args:
        table: which one.
        lookups: to which the gradient belongs, the same calls on every rank; theirs is taken away.
        upcoming: the next batch, which is known when the exchange begins; None: there is none, so that everything is
            prior.
        splits: whether there are to be two parts.
        rank, world_size: of the ranks.

    Attributes:
        finite: whether this rank's gradient is, before it is summed up.
        called: whether any rank had a backward through the table; otherwise there is no gradient, not even of nothing.
        prior, delayed: what has arrived of each part; None as long as it has not.
        num_prior, num_delayed: rows of this rank in each part.
    """

    def __init__(
        self,
        table: Table,
        lookups: Sequence[Lookup],
        upcoming: BatchRows | None,
        splits: bool,
        rank: int,
        world_size: int,
    ) -> None:
        self.table = table
        self.upcoming = upcoming
        self.finite = True
        self.called = any(lookup.gradient is not None for lookup in lookups)
        self.prior: RowSum | None = None
        self.delayed: RowSum | None = None
        self.num_prior = self.num_delayed = 0
        self._rank = rank
        self._world_size = world_size
        self._splits = splits
        self._parts = [(lookup.by_rank, lookup.gradient, lookup.touched) for lookup in lookups]
        for lookup in lookups:
            lookup.closed = True
            lookup.forget_gradient()
        self._rows: list[Ids] = []  # by rank
        self._values: Tensor | None = None  # (m, dim), of this rank
        self._touched: Tensor | None = None  # (m,), bool
        self._is_prior: list[Mask] = []  # by rank

    def send_prior(self) -> Algorithm:
        """Exchange the prior rows; fills :attr:`prior`. Does nothing if ranks have turned out to have parted."""
        if self.upcoming is not None and self.upcoming.fault is not None:
            return
        self._merge()
        self._is_prior = self._split()
        self.num_prior = int(self._is_prior[self._rank].sum())
        self.num_delayed = len(self._rows[self._rank]) - self.num_prior
        (self.prior,) = yield from _exchange([self], [self._is_prior])
        if not self.called or all(mask.all() for mask in self._is_prior):
            self.delayed = self._nothing()
            self._values = self._touched = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be sent."""
        return self._values is None and self.prior is not None

    # -- parts ------------------------------------------------------------------------------------------------------

    def _split(self) -> list[Mask]:
        """Which rows of each rank are prior: those that anybody looks up next."""
        by_rank = self.upcoming.by_rank if self._splits and self.upcoming is not None else None
        if by_rank is None or self.table.index not in by_rank:
            return [np.ones(len(rows), np.bool_) for rows in self._rows]
        is_next = np.zeros(self.table.num_rows, dtype=np.bool_)
        for rows in by_rank[self.table.index]:
            is_next[rows] = True
        return [is_next[rows] for rows in self._rows]

    def _merge(self) -> None:
        """One set of rows per rank, of all lookups since the last exchange; those of padding have no gradient."""
        padding = self.table.padding_idx
        by_lookup = [by_rank for by_rank, _, _ in self._parts]
        if len(by_lookup) == 1:
            self._rows = list(by_lookup[0])
        else:
            self._rows = [np.unique(np.concatenate(rows)) for rows in zip(*by_lookup, strict=True)]
        if padding is not None:
            self._rows = [rows[rows != padding] for rows in self._rows]
        mine = self._rows[self._rank]
        for by_rank, gradient, touched in self._parts:
            if gradient is None or touched is None:
                continue
            rows = by_rank[self._rank]
            kept = np.flatnonzero(rows != padding) if padding is not None else np.arange(len(rows))
            if len(by_lookup) == 1:
                whole = len(kept) == len(rows)
                places = torch.from_numpy(kept).to(gradient.device)
                self._values = gradient if whole else gradient.index_select(0, places)
                self._touched = touched if whole else touched.index_select(0, places)
                continue
            source = torch.from_numpy(kept).to(gradient.device)
            places = torch.from_numpy(np.searchsorted(mine, rows[kept])).to(gradient.device)
            if self._values is None or self._touched is None:
                self._values = gradient.new_zeros(len(mine), self.table.dim)
                self._touched = torch.zeros(len(mine), dtype=torch.bool, device=gradient.device)
            self._values.index_add_(0, places, gradient.index_select(0, source))
            self._touched[places[touched[source]]] = True  # rows may come several times
        self._parts = []
        self.finite = self._values is None or _is_finite(self._values)
        if self._values is None:
            weight = self.table.weight
            self._values = torch.zeros(len(mine), self.table.dim, dtype=weight.dtype, device=weight.device)
            self._touched = torch.zeros(len(mine), dtype=torch.bool, device=weight.device)

    def _part(self, masks: Sequence[Mask]) -> _Part:
        assert self._values is not None and self._touched is not None
        rows = [all_rows[mask] for all_rows, mask in zip(self._rows, masks, strict=True)]
        own = torch.from_numpy(np.flatnonzero(masks[self._rank])).to(self._values.device)
        return _Part(
            self.table, rows, self._values.index_select(0, own), self._touched.index_select(0, own), self.called
        )

    def _nothing(self) -> RowSum:
        weight = self.table.weight
        values = torch.zeros(0, self.table.columns_of(self._rank), dtype=weight.dtype, device=weight.device)
        return RowSum(torch.zeros(0, dtype=torch.int64, device=weight.device), values)


def send_delayed(exchanges: Sequence[GradientExchange]) -> Algorithm:
    """Exchange the delayed rows of several tables at once, as far as that is left to do; fills their ``delayed``."""
    left = [exchange for exchange in exchanges if exchange.delayed is None]
    sums = yield from _exchange(left, [[~mask for mask in exchange._is_prior] for exchange in left])
    for exchange, part in zip(left, sums, strict=True):
        exchange.delayed = part
        exchange._values = exchange._touched = None


@dataclass
class _Part:
    """Some rows of one table's gradient.

    Args:
        rows: by rank, ascending.
        values: (m, dim), of this rank's rows.
        touched: (m,), bool: which of them have a gradient.
        called: see :class:`GradientExchange`; in the end, of any rank.
    """

    table: Table
    rows: list[Ids]
    values: Tensor
    touched: Tensor
    called: bool

    def nbytes(self, sender: int, receiver: int) -> list[int]:
        """Of what one rank sends another: columns of rows, a byte per row, and one more."""
        count = len(self.rows[sender])
        return [packed_rows(self.table, count, receiver), count + 1]

    def write(self, body: Tensor, flags: Tensor, receiver: int) -> None:
        """Fill what is sent to a rank."""
        columns, dtype = self.table.columns_of(receiver), self.values.dtype
        as_rows(body, len(self.values), columns, dtype).copy_(self.table.cut(self.values, receiver))
        flags[:-1].copy_(self.touched.view(torch.uint8))
        flags[-1] = self.called

    def sum(self, received: Sequence[tuple[Tensor, Tensor]], rank: int) -> RowSum:
        """The mean over ranks of what has come in, added up in the order of the ranks."""
        dtype, device, columns = self.values.dtype, self.values.device, self.table.columns_of(rank)
        everything = [flag.view(torch.bool).cpu().numpy() for _, flag in received]
        self.called = any(bool(flag[-1]) for flag in everything)
        flags = [flag[:-1] for flag in everything]
        touched = np.unique(np.concatenate([rows[flag] for rows, flag in zip(self.rows, flags, strict=True)]))
        total = torch.zeros(len(touched), columns, dtype=torch.promote_types(dtype, torch.float32), device=device)
        for rows, flag, (body, _) in zip(self.rows, flags, received, strict=True):
            values = as_rows(body, len(rows), columns, dtype)
            if not flag.all():
                rows = rows[flag]
                values = values.index_select(0, torch.from_numpy(np.flatnonzero(flag)).to(device))
            places = torch.from_numpy(np.searchsorted(touched, rows)).to(device)
            total.index_add_(0, places, values.to(total.dtype))
        total.div_(len(received))
        return RowSum(torch.from_numpy(touched).to(device), total.to(dtype))


def _exchange(
    exchanges: Sequence[GradientExchange], masks: Sequence[Sequence[Mask]]
) -> Generator[Round, None, list[RowSum]]:
    """Send every rank its columns of the rows under these masks, in one message each, and sum up what arrives.

    A message says of each row whether it has a gradient: a row that was looked up and not used is not touched by a lazy
    optimizer; and whether the table was used at all.
    """
    if not exchanges:
        return []
    rank, world_size = exchanges[0]._rank, exchanges[0]._world_size
    parts = [exchange._part(mask) for exchange, mask in zip(exchanges, masks, strict=True)]
    device = parts[0].values.device
    outgoing, incoming = [], []
    for peer in range(world_size):
        message, slots = packed([size for part in parts for size in part.nbytes(rank, peer)], device)
        for part, body, flags in zip(parts, slots[::2], slots[1::2], strict=True):
            part.write(body, flags, peer)
        outgoing.append(message)
        if peer == rank:
            incoming.append((message, slots))
        else:
            incoming.append(packed([size for part in parts for size in part.nbytes(peer, rank)], device))
    yield from pairwise_exchange(outgoing, [message for message, _ in incoming], rank)
    sums = []
    for number, (exchange, part) in enumerate(zip(exchanges, parts, strict=True)):
        sums.append(part.sum([(slots[2 * number], slots[2 * number + 1]) for _, slots in incoming], rank))
        exchange.called = part.called
    return sums


def _is_finite(values: Tensor) -> bool:
    # A finite sum has finite terms; one that is not may have overflowed.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def merged(parts: Sequence[RowSum]) -> RowSum:
    """The sum of several."""
    if len(parts) == 1:
        return parts[0]
    rows, places = torch.unique(torch.cat([part.rows for part in parts]), return_inverse=True)
    values = parts[0].values.new_zeros(len(rows), parts[0].values.shape[1])
    return RowSum(rows, values.index_add_(0, places, torch.cat([part.values for part in parts])))
