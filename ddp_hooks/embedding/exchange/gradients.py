"""Gradient rows of a table on their way to the owners of their columns, in two parts (EmbRace, Algorithm 1).

*Prior* rows are looked up by some rank in the next batch, so they must arrive before the next lookup. *Delayed* rows
are the rest. Every rank knows which rows every rank looks up, hence both parts of everybody's gradient.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Round
from ddp_hooks.embedding.exchange.lookup import BatchRows, Ids, Lookup, as_rows, exchange_parts
from ddp_hooks.embedding.table import Table

Mask = npt.NDArray[np.bool_]


class RowSum(NamedTuple):
    rows: Tensor  # (n,), int64, ascending, each once
    values: Tensor  # (n, columns)


def mean_of_rows(rows: Sequence[Ids], values: Sequence[Tensor]) -> RowSum:
    """Return the mean over ranks of their rows, added in the order of ranks, in float32 or wider.

    ``rows`` and ``values`` are per rank, (n,) and (n, columns); a row may come several times.
    """
    union = np.unique(np.concatenate(rows))
    dtype, device = values[0].dtype, values[0].device
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros(len(union), values[0].shape[1], dtype=wide, device=device)
    for own, part in zip(rows, values, strict=True):
        total.index_add_(0, torch.from_numpy(np.searchsorted(union, own)).to(device), part.to(wide))
    total.div_(len(rows))  # before rounding: a sum of 16-bit numbers may be out of their range
    return RowSum(torch.from_numpy(union).to(device), total.to(dtype))


def sum_of_rows(parts: Sequence[RowSum]) -> RowSum:
    if len(parts) == 1:
        return parts[0]
    rows, places = torch.unique(torch.cat([part.rows for part in parts]), return_inverse=True)
    values = parts[0].values.new_zeros(len(rows), parts[0].values.shape[1])
    return RowSum(rows, values.index_add_(0, places, torch.cat([part.values for part in parts])))


class GradientExchange:
    """One table's gradient of one synchronised backward, taken out of ``lookups`` of the same calls on every rank.

    This rank sends all columns of its rows, and receives its own columns of all rows. The rows of ``upcoming``, the
    next batch, are known when the exchange begins. Without it, or without ``splits``, all rows are prior.
    """

    def __init__(self, table: Table, lookups: Sequence[Lookup], upcoming: BatchRows | None, splits: bool) -> None:
        self.table = table
        self.upcoming = upcoming
        self.finite = True  # this rank's gradient
        # Some rank ran a backward through the table; if none did, there is no gradient at all.
        self.called = any(lookup.gradient is not None for lookup in lookups)
        self.prior: RowSum | None = None  # as it has arrived
        self.delayed: RowSum | None = None
        self.num_prior = self.num_delayed = 0  # rows of this rank
        self._splits = splits
        self._lookups = [(lookup.by_rank, lookup.gradient, lookup.touched) for lookup in lookups]
        for lookup in lookups:
            lookup.closed = True
            lookup.drop_gradient()
        self._rows: list[Ids] = []  # by rank
        self._values: Tensor | None = None  # (m, dim), of this rank
        self._touched: Tensor | None = None  # (m,), bool
        self._is_prior: list[Mask] = []  # by rank

    def send_prior(self) -> Algorithm:
        """Exchange prior rows; fills :attr:`prior`. Does nothing if ranks turn out to be desynchronized."""
        if self.upcoming is not None and self.upcoming.sync_error is not None:
            return
        self._merge()
        self._is_prior = self._split()
        rank, weight = self.table.rank, self.table.weight.detach()
        self.num_prior = int(self._is_prior[rank].sum())
        self.num_delayed = len(self._rows[rank]) - self.num_prior
        (self.prior,) = yield from _exchange([self.part(prior=True)])
        if not self.called or all(mask.all() for mask in self._is_prior):
            self.receive_delayed(RowSum(weight.new_zeros(0, dtype=torch.int64), weight[:0]))

    def receive_delayed(self, rows: RowSum) -> None:
        self.delayed, self._values, self._touched = rows, None, None

    def _merge(self) -> None:
        """Build one set of rows per rank from all lookups; rows of padding are left out."""
        rank, padding = self.table.rank, self.table.padding_idx
        by_lookup = [by_rank for by_rank, _, _ in self._lookups]
        single = len(by_lookup) == 1
        merged = by_lookup[0] if single else [np.unique(np.concatenate(each)) for each in zip(*by_lookup, strict=True)]
        self._rows = [rows if padding is None else rows[rows != padding] for rows in merged]
        mine = self._rows[rank]
        own: tuple[Tensor, Tensor] | None = None  # values, and which of them are used
        for by_rank, gradient, touched in self._lookups:
            if gradient is None or touched is None:
                continue
            rows = by_rank[rank]
            kept = np.arange(len(rows)) if padding is None else np.flatnonzero(rows != padding)
            gradient, touched = _take(gradient, kept), _take(touched, kept)
            if single:
                own = gradient, touched
                continue
            own = own or self._zeros(len(mine))
            places = torch.from_numpy(np.searchsorted(mine, rows[kept])).to(gradient.device)
            own[0].index_add_(0, places, gradient)
            own[1][places[touched]] = True  # a row may come several times
        values, self._touched = own or self._zeros(len(mine))
        self._values, self._lookups = values, []
        # A finite sum has finite terms; a sum that is not finite may have overflowed.
        self.finite = bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())

    def _zeros(self, num_rows: int) -> tuple[Tensor, Tensor]:
        weight = self.table.weight.detach()
        return weight.new_zeros(num_rows, self.table.dim), weight.new_zeros(num_rows, dtype=torch.bool)

    def _split(self) -> list[Mask]:
        """Return, per rank, which rows are prior: looked up next by any rank."""
        by_rank = self.upcoming.by_rank if self._splits and self.upcoming is not None else None
        if by_rank is None or self.table.index not in by_rank:
            return [np.ones(len(rows), np.bool_) for rows in self._rows]
        is_next = np.zeros(self.table.num_rows, dtype=np.bool_)
        for rows in by_rank[self.table.index]:
            is_next[rows] = True
        return [is_next[rows] for rows in self._rows]

    def part(self, prior: bool) -> _Part:
        assert self._values is not None and self._touched is not None
        masks = self._is_prior if prior else [~mask for mask in self._is_prior]
        own = np.flatnonzero(masks[self.table.rank])
        rows = [rows[mask] for rows, mask in zip(self._rows, masks, strict=True)]
        return _Part(self, rows, _take(self._values, own), _take(self._touched, own))


def send_delayed(exchanges: Sequence[GradientExchange]) -> Algorithm:
    """Exchange the delayed rows of several tables in one message per rank; fills their ``delayed``."""
    left = [exchange for exchange in exchanges if exchange.delayed is None]
    sums = yield from _exchange([exchange.part(prior=False) for exchange in left])
    for exchange, rows in zip(left, sums, strict=True):
        exchange.receive_delayed(rows)


@dataclass
class _Part:
    """Rows of one exchange that travel together."""

    exchange: GradientExchange
    rows: list[Ids]  # by rank, ascending
    values: Tensor  # (m, dim), of this rank
    touched: Tensor  # (m,) bool, rows of this rank that have a gradient

    def nbytes(self, sender: int, receiver: int) -> tuple[int, int]:
        count = len(self.rows[sender])
        return self.exchange.table.nbytes(count, receiver), count + 1

    def write(self, body: Tensor, flags: Tensor, receiver: int) -> None:
        table = self.exchange.table
        slot = as_rows(body, len(self.values), table.num_columns(receiver), self.values.dtype)
        slot.copy_(table.cut(self.values, receiver))
        flags[:-1].copy_(self.touched.view(torch.uint8))
        flags[-1] = self.exchange.called

    def mean(self, received: Sequence[tuple[Tensor, Tensor]]) -> RowSum:
        """Return the mean of what all ranks sent, and note if any of them has used the table."""
        flags = [flags.view(torch.bool).cpu().numpy() for _, flags in received]
        self.exchange.called = any(bool(flag[-1]) for flag in flags)
        touched = [np.flatnonzero(flag[:-1]) for flag in flags]
        columns = self.exchange.table.num_columns(self.exchange.table.rank)
        rows, values = [], []
        for (body, _), sent, places in zip(received, self.rows, touched, strict=True):
            rows.append(sent[places])
            values.append(_take(as_rows(body, len(sent), columns, self.values.dtype), places))
        return mean_of_rows(rows, values)


def _exchange(parts: Sequence[_Part]) -> Generator[Round, None, list[RowSum]]:
    """Send every rank its columns of these parts in one message each; return their means over ranks."""
    # A flag per row says if it has a gradient: a lazy optimizer must not touch a row that was looked up and not used.
    # One more flag says if the rank used the table at all.
    if not parts:
        return []

    def nbytes(sender: int, receiver: int) -> list[int]:
        return [size for part in parts for size in part.nbytes(sender, receiver)]

    def write(receiver: int, slots: list[Tensor]) -> None:
        for part, body, flags in zip(parts, slots[::2], slots[1::2], strict=True):
            part.write(body, flags, receiver)

    table = parts[0].exchange.table
    received = yield from exchange_parts(table.rank, table.world_size, parts[0].values.device, nbytes, write)
    pairs = [list(zip(slots[::2], slots[1::2], strict=True)) for slots in received]
    return [part.mean([of_rank[number] for of_rank in pairs]) for number, part in enumerate(parts)]


def _take(values: Tensor, positions: Ids) -> Tensor:
    """Return the rows at these ascending positions; no copy if these are all."""
    if len(positions) == len(values):
        return values
    return values.index_select(0, torch.from_numpy(positions).to(values.device))
