"""Gradient rows of a table on their way to the owners of their columns, in two parts (EmbRace, Algorithm 1).

*Prior* rows are looked up by some rank in the next batch, so they must arrive before the next lookup. *Delayed* rows
are the rest; they may arrive one step later. Every rank knows which rows every rank looks up, hence both parts of
everybody's gradient.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Round, pairwise_exchange
from ddp_hooks.embedding.exchange.ids import BatchRows, Ids
from ddp_hooks.embedding.exchange.lookup import Lookup
from ddp_hooks.embedding.exchange.packing import as_rows, new_message
from ddp_hooks.embedding.table import Table

Mask = npt.NDArray[np.bool_]


class RowSum(NamedTuple):
    """Some rows of a gradient, summed up or averaged."""

    rows: Tensor  # (n,), int64, ascending, each once
    values: Tensor  # (n, columns)


def mean_of_rows(rows: Sequence[Ids], values: Iterable[Tensor]) -> RowSum:
    """Return the mean over ranks of their rows, added in the order of ranks, in float32 or wider.

    Args:
        rows: per rank, (n,); a row may come several times.
        values: per rank, (n, columns).
    """
    union = np.unique(np.concatenate(rows))
    total, dtype = None, torch.float32
    for own, part in zip(rows, values, strict=True):
        if total is None:
            dtype = part.dtype
            wide = torch.promote_types(dtype, torch.float32)
            total = torch.zeros(len(union), part.shape[1], dtype=wide, device=part.device)
        places = torch.from_numpy(np.searchsorted(union, own)).to(part.device)
        total.index_add_(0, places, part.to(total.dtype))
    assert total is not None
    total.div_(len(rows))  # before rounding: a sum of 16-bit numbers may be out of their range
    return RowSum(torch.from_numpy(union).to(total.device), total.to(dtype))


def sum_of_rows(parts: Sequence[RowSum]) -> RowSum:
    """Return the sum of several parts."""
    if len(parts) == 1:
        return parts[0]
    rows, places = torch.unique(torch.cat([part.rows for part in parts]), return_inverse=True)
    values = parts[0].values.new_zeros(len(rows), parts[0].values.shape[1])
    return RowSum(rows, values.index_add_(0, places, torch.cat([part.values for part in parts])))


class GradientExchange:
    """One table's gradient of one synchronised backward: this rank sends all columns of its rows, and receives its
    own columns of all rows.

    Args:
        table: owner of the gradient.
        lookups: with gradients of the same calls on every rank; the gradients are taken out of them.
        upcoming: next batch, whose rows are known when the exchange begins; None: all rows are prior.
        splits: False: all rows are prior.
        rank, world_size: of this rank.

    Attributes:
        finite: this rank's gradient is finite.
        called: some rank ran a backward through the table; if none did, there is no gradient at all.
        prior, delayed: what has arrived of each part, or None.
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
        self.rank, self.world_size = rank, world_size
        self._splits = splits
        self._lookups = [(lookup.by_rank, lookup.gradient, lookup.touched) for lookup in lookups]
        for lookup in lookups:
            lookup.closed = True
            lookup.drop_gradient()
        self._rows: list[Ids] = []  # by rank
        self._values: Tensor | None = None  # (m, dim), of this rank
        self._touched: Tensor | None = None  # (m,), bool
        self._is_prior: list[Mask] = []  # by rank

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to send."""
        return self._values is None and self.prior is not None

    def send_prior(self) -> Algorithm:
        """Exchange prior rows; fills :attr:`prior`. Does nothing if ranks turn out to be desynchronized."""
        if self.upcoming is not None and self.upcoming.sync_error is not None:
            return
        self._merge()
        self._is_prior = self._split()
        self.num_prior = int(self._is_prior[self.rank].sum())
        self.num_delayed = len(self._rows[self.rank]) - self.num_prior
        (self.prior,) = yield from _exchange([self._part(self._is_prior)])
        if not self.called or all(mask.all() for mask in self._is_prior):
            weight = self.table.weight
            nothing = torch.zeros(0, self.table.num_columns(self.rank), dtype=weight.dtype, device=weight.device)
            self.receive_delayed(RowSum(torch.zeros(0, dtype=torch.int64, device=weight.device), nothing))

    def delayed_part(self) -> _Part:
        """Return this rank's rows that are still to be sent."""
        return self._part([~mask for mask in self._is_prior])

    def receive_delayed(self, rows: RowSum) -> None:
        """Complete the exchange."""
        self.delayed = rows
        self._values = self._touched = None

    def _merge(self) -> None:
        """Build one set of rows per rank from all lookups; rows of padding are left out."""
        padding = self.table.padding_idx
        by_lookup = [by_rank for by_rank, _, _ in self._lookups]
        single = len(by_lookup) == 1
        if single:
            self._rows = list(by_lookup[0])
        else:
            self._rows = [np.unique(np.concatenate(rows)) for rows in zip(*by_lookup, strict=True)]
        if padding is not None:
            self._rows = [rows[rows != padding] for rows in self._rows]
        mine = self._rows[self.rank]
        for by_rank, gradient, touched in self._lookups:
            if gradient is None or touched is None:
                continue
            rows = by_rank[self.rank]
            kept = np.flatnonzero(rows != padding) if padding is not None else np.arange(len(rows))
            source = torch.from_numpy(kept).to(gradient.device)
            if single:
                whole = len(kept) == len(rows)
                self._values = gradient if whole else gradient.index_select(0, source)
                self._touched = touched if whole else touched.index_select(0, source)
                continue
            places = torch.from_numpy(np.searchsorted(mine, rows[kept])).to(gradient.device)
            if self._values is None or self._touched is None:
                self._values = gradient.new_zeros(len(mine), self.table.dim)
                self._touched = torch.zeros(len(mine), dtype=torch.bool, device=gradient.device)
            self._values.index_add_(0, places, gradient.index_select(0, source))
            self._touched[places[touched[source]]] = True  # a row may come several times
        self._lookups = []
        if self._values is None:
            weight = self.table.weight
            self._values = torch.zeros(len(mine), self.table.dim, dtype=weight.dtype, device=weight.device)
            self._touched = torch.zeros(len(mine), dtype=torch.bool, device=weight.device)
        self.finite = _is_finite(self._values)

    def _split(self) -> list[Mask]:
        """Return, per rank, which rows are prior: looked up next by any rank."""
        by_rank = self.upcoming.by_rank if self._splits and self.upcoming is not None else None
        if by_rank is None or self.table.index not in by_rank:
            return [np.ones(len(rows), np.bool_) for rows in self._rows]
        is_next = np.zeros(self.table.num_rows, dtype=np.bool_)
        for rows in by_rank[self.table.index]:
            is_next[rows] = True
        return [is_next[rows] for rows in self._rows]

    def _part(self, masks: Sequence[Mask]) -> _Part:
        assert self._values is not None and self._touched is not None
        own = torch.from_numpy(np.flatnonzero(masks[self.rank])).to(self._values.device)
        return _Part(
            self,
            [rows[mask] for rows, mask in zip(self._rows, masks, strict=True)],
            self._values.index_select(0, own),
            self._touched.index_select(0, own),
        )


def send_delayed(exchanges: Sequence[GradientExchange]) -> Algorithm:
    """Exchange the delayed rows of several tables in one message per rank; fills their ``delayed``."""
    left = [exchange for exchange in exchanges if exchange.delayed is None]
    sums = yield from _exchange([exchange.delayed_part() for exchange in left])
    for exchange, rows in zip(left, sums, strict=True):
        exchange.receive_delayed(rows)


@dataclass
class _Part:
    """Rows of one exchange that travel together.

    Args:
        exchange: where they come from.
        rows: by rank, ascending.
        values: (m, dim), of this rank.
        touched: (m,) bool, rows of this rank that have a gradient.
    """

    exchange: GradientExchange
    rows: list[Ids]
    values: Tensor
    touched: Tensor

    def nbytes(self, sender: int, receiver: int) -> tuple[int, int]:
        """Return the bytes that one rank sends another: columns of rows, and flags."""
        count = len(self.rows[sender])
        return self.exchange.table.nbytes(count, receiver), count + 1

    def write(self, body: Tensor, flags: Tensor, receiver: int) -> None:
        """Fill the slots of a message to ``receiver``."""
        table = self.exchange.table
        slot = as_rows(body, len(self.values), table.num_columns(receiver), self.values.dtype)
        slot.copy_(table.cut(self.values, receiver))
        flags[:-1].copy_(self.touched.view(torch.uint8))
        flags[-1] = self.exchange.called

    def mean(self, received: Sequence[tuple[Tensor, Tensor]]) -> RowSum:
        """Return the mean of what all ranks sent, and note if any of them has used the table."""
        flags = [flags.view(torch.bool).cpu().numpy() for _, flags in received]
        self.exchange.called = any(bool(flag[-1]) for flag in flags)
        rows = [rows[flag[:-1]] for rows, flag in zip(self.rows, flags, strict=True)]
        bodies = zip(received, flags, strict=True)
        return mean_of_rows(rows, (self._touched_of(body, flag[:-1]) for (body, _), flag in bodies))

    def _touched_of(self, body: Tensor, touched: Mask) -> Tensor:
        num_columns = self.exchange.table.num_columns(self.exchange.rank)
        values = as_rows(body, len(touched), num_columns, self.values.dtype)
        if touched.all():
            return values
        return values.index_select(0, torch.from_numpy(np.flatnonzero(touched)).to(values.device))


def _exchange(parts: Sequence[_Part]) -> Generator[Round, None, list[RowSum]]:
    """Send every rank its columns of these parts in one message each; return their means over ranks.

    A flag per row says if it has a gradient: a lazy optimizer must not touch a row that was looked up and not used. One
    more flag says if the rank used the table at all.
    """
    if not parts:
        return []
    rank, world_size, device = parts[0].exchange.rank, parts[0].exchange.world_size, parts[0].values.device
    outgoing, incoming = [], []
    for peer in range(world_size):
        message, slots = new_message([size for part in parts for size in part.nbytes(rank, peer)], device)
        for part, body, flags in zip(parts, slots[::2], slots[1::2], strict=True):
            part.write(body, flags, peer)
        outgoing.append(message)
        if peer != rank:
            message, slots = new_message([size for part in parts for size in part.nbytes(peer, rank)], device)
        incoming.append((message, slots))
    yield from pairwise_exchange(outgoing, [message for message, _ in incoming], rank)
    return [
        part.mean([(slots[2 * number], slots[2 * number + 1]) for _, slots in incoming])
        for number, part in enumerate(parts)
    ]


def _is_finite(values: Tensor) -> bool:
    # A finite sum has finite terms; a sum that is not finite may have overflowed.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())
