"""Rows that every rank looks up, exchanged once per batch, and the vectors of these rows.

A rank that looks up a row later sends a gradient for it, so vectors and gradients travel without indices. Rows of the
next batch decide which gradient rows are prior (EmbRace, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Round, Work, bruck_all_gather, pairwise_exchange, see
from ddp_hooks.embedding.table import Table

Ids = npt.NDArray[np.int64]

_ABSENT = -1  # in place of a number of rows: the batch does not use the table
_ALIGNMENT = 16  # bytes, so that every part can be viewed in its own dtype


def as_ids(ids: Tensor) -> Ids:
    """Return (n,) int64 on the host."""
    values: Ids = ids.detach().cpu().numpy().astype(np.int64).reshape(-1)
    return values


class Purpose(IntEnum):
    """Place in the step at which ranks exchange ids; equal on all of them."""

    AHEAD = 0  # end of a forward, for the next batch
    NOW = 1  # begin of a forward, for its batch
    ONE_TABLE = 2  # forward of one table


_PLACES = ("at the end of forward", "at the beginning of forward", "in a table's forward, after forward")


class RankError(NamedTuple):
    """Reason why a rank cannot go on, in numbers that travel; ``kind`` 0: no error."""

    kind: int = 0
    table: int = 0
    id: int = 0


NO_ERROR = RankError()
OUT_OF_RANGE, CHANGED = 1, 2


@dataclass
class BatchRows:
    """Rows of one batch, by table: this rank's at first, all ranks' after :func:`exchange_ids`."""

    rows: Mapping[int, Ids] | None  # of this rank, ascending, each once if deduplicated; None: there is no such batch
    error: RankError = NO_ERROR  # in this rank's ids
    by_rank: dict[int, list[Ids]] | None = None  # None: not exchanged yet, or some rank has no such batch
    # Messages, equal on every rank:
    id_error: str | None = None  # some rank has an invalid id
    sync_error: str | None = None  # ranks cannot go on together
    desynchronized: bool = False  # ranks exchanged ids for different purposes, so some of them see the error later
    ids_known: Work = field(init=False, repr=False)  # done when the rows of all ranks are known
    lookups: dict[int, Lookup] | None = None  # of its vectors, by table; None: not requested yet
    fetched: Work | None = None  # done when the vectors are here

    @staticmethod
    def of(ids: Mapping[int, Ids], tables: Sequence[Table], deduplicate: bool) -> BatchRows:
        """Return the rows of these ids by table; an id out of range becomes the batch's ``error``."""
        error, rows = NO_ERROR, {}
        for index, values in ids.items():
            bad = values[(values < 0) | (values >= tables[index].num_rows)]
            if len(bad) and not error.kind:
                error = RankError(OUT_OF_RANGE, index, int(bad[0]))
            rows[index] = np.unique(values) if deduplicate else np.sort(values)
        return BatchRows(rows, error)


def exchange_ids(
    batch: BatchRows, purpose: Purpose, forward: int, error: RankError, tables: Sequence[Table], ranks: Sequence[int]
) -> Algorithm:
    """Send every rank the rows that this rank looks up, and receive theirs; fills ``batch``.

    Two all-gathers of ceil(log2 P) rounds: of a few numbers, and of ids (int32 if every row number fits). With an error
    of some rank, in this forward or its batch, no ids travel. ``ranks`` are global ranks, for messages.
    """
    rows = batch.rows or {}
    counts = [len(rows[table.index]) if table.index in rows else _ABSENT for table in tables]
    own_error = error if error.kind else batch.error
    mine = torch.tensor([purpose, forward, *own_error, *counts], dtype=torch.int64)
    everyone, rank = range(len(ranks)), tables[0].rank
    headers = [h.tolist() for h in (yield from bruck_all_gather(mine, [len(mine)] * len(ranks), everyone, rank))]
    batch.sync_error = _sync_error(headers, tables, ranks)
    batch.desynchronized = len({header[0] for header in headers}) > 1
    batch.id_error = _id_error(headers, tables, ranks)
    all_counts = [header[5:] for header in headers]
    if batch.sync_error or batch.id_error or any(max(each, default=_ABSENT) == _ABSENT for each in all_counts):
        return
    dtype = np.int32 if max(table.num_rows for table in tables) <= np.iinfo(np.int32).max else np.int64
    present = [table.index for table in tables if table.index in rows]
    message = np.concatenate([rows[index] for index in present]).astype(dtype)
    sizes = [sum(each[index] for index in present) for each in all_counts]
    gathered = yield from bruck_all_gather(torch.from_numpy(message), sizes, everyone, rank)
    by_rank: dict[int, list[Ids]] = {index: [] for index in present}
    for received, each in zip(gathered, all_counts, strict=True):
        parts = np.split(as_ids(received), np.cumsum([each[index] for index in present])[:-1])
        for index, part in zip(present, parts, strict=True):
            by_rank[index].append(part)
    batch.by_rank = by_rank


def _id_error(headers: Sequence[Sequence[int]], tables: Sequence[Table], ranks: Sequence[int]) -> str | None:
    for (_, _, kind, table, value, *_), rank in zip(headers, ranks, strict=True):
        if kind == OUT_OF_RANGE:
            return (
                f"rank {rank} looks up id {value} in {tables[table].name}, which has the rows 0 to "
                f"{tables[table].num_rows - 1}: check the tokenizer, or make the table larger"
            )
    return None


def _sync_error(headers: Sequence[Sequence[int]], tables: Sequence[Table], ranks: Sequence[int]) -> str | None:
    for (_, forward, kind, table, value, *_), rank in zip(headers, ranks, strict=True):
        if kind == CHANGED:
            return (
                f"on rank {rank} forward {forward} asks {tables[table].name} for id {value}, which prefetch did not "
                f"announce for this batch: return all ids of a batch from the function given to tables.prefetch(), and "
                f"do not skip, reorder or change batches after it (do it before, in the sampler or the collate "
                f"function){see('batches-were-not-announced')}"
            )
    if len({tuple(header[:2]) for header in headers}) > 1:
        places = [f"rank {rank}: {_PLACES[h[0]]} {h[1]}" for h, rank in zip(headers, ranks, strict=True)]
        return (
            f"ranks are at different places ({'; '.join(places)}): every rank must skip the same batches and run the "
            f"same forwards; for evaluation with other numbers of batches use tables.local(){see('ranks-out-of-step')}"
        )
    present = [[table.name for table in tables if header[5 + table.index] != _ABSENT] for header in headers]
    if len({tuple(names) for names in present if names}) > 1:
        sides = [f"rank {rank}: {', '.join(names) or 'none'}" for names, rank in zip(present, ranks, strict=True)]
        return (
            f"ranks look up rows in different tables ({'; '.join(sides)}): every rank must use the same tables"
            f"{see('ranks-out-of-step')}"
        )
    return None


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


def new_message(nbytes: Sequence[int], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Allocate a message for parts of these sizes; return the message, 1-D uint8, and views of its parts."""
    message = torch.empty(message_bytes(nbytes), dtype=torch.uint8, device=device)
    return message, parts_of(message, nbytes)


def message_bytes(nbytes: Sequence[int]) -> int:
    return sum(-(-size // _ALIGNMENT) * _ALIGNMENT for size in nbytes)


def parts_of(message: Tensor, nbytes: Sequence[int]) -> list[Tensor]:
    starts = [message_bytes(nbytes[:position]) for position in range(len(nbytes))]
    return [message[start : start + size] for start, size in zip(starts, nbytes, strict=True)]


def as_rows(part: Tensor, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    return part.view(dtype).view(num_rows, num_columns)


def exchange_parts(
    rank: int,
    world_size: int,
    device: torch.device,
    nbytes: Callable[[int, int], Sequence[int]],
    write: Callable[[int, list[Tensor]], None],
) -> Generator[Round, None, list[list[Tensor]]]:
    """Send every rank a message of several parts; return the parts that each rank has sent.

    ``nbytes(sender, receiver)`` are the sizes of the parts, and ``write(receiver, parts)`` fills them.
    """
    outgoing, incoming, received = [], [], []
    for peer in range(world_size):
        message, parts = new_message(nbytes(rank, peer), device)
        write(peer, parts)
        outgoing.append(message)
        if peer != rank:
            message, parts = new_message(nbytes(peer, rank), device)
        incoming.append(message)
        received.append(parts)
    yield from pairwise_exchange(outgoing, incoming, rank)
    return received
