"""Rows that every rank looks up: exchanged once per batch, and known to all ranks afterwards.

A rank that looks up a row later sends a gradient for it, so vectors and gradients travel without indices. Rows of the
next batch decide which gradient rows are prior (EmbRace, Algorithm 1; PAPER_NOTES 13: the paper's costs leave this
exchange out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, bruck_all_gather, see
from ddp_hooks.embedding.table import Table

Ids = npt.NDArray[np.int64]

_ABSENT = -1  # in place of a number of rows: the batch does not use the table


def as_ids(ids: Tensor) -> Ids:
    """Return (n,) int64 on the host."""
    values: Ids = ids.detach().cpu().numpy().astype(np.int64).reshape(-1)
    return values


class Purpose(IntEnum):
    """Place in the step at which ranks exchange ids; equal on all of them."""

    AHEAD = 0
    """End of a forward, for the next batch."""
    NOW = 1
    """Begin of a forward, for its batch."""
    ONE_TABLE = 2
    """Forward of one table."""


_PLACES = ("at the end of forward", "at the beginning of forward", "in a table's forward, after forward")


class RankError(NamedTuple):
    """Reason why a rank cannot go on, in numbers that travel; ``kind`` 0: no error."""

    kind: int = 0
    table: int = 0
    id: int = 0


NO_ERROR = RankError()
OUT_OF_RANGE, CHANGED = 1, 2


class Wanted(NamedTuple):
    """Rows that one rank looks up in one table for one batch."""

    ids: Ids  # (n,), as the model asks for them
    rows: Ids  # (m,), as they travel: each id once, in ascending order; all ids without deduplication


@dataclass
class BatchRows:
    """Rows of one batch: this rank's at first, all ranks' after :func:`exchange_ids`.

    Args:
        wanted: this rank's rows by table; None: there is no such batch.
        error: found in this rank's ids.
        by_rank: rows of every rank, by table; None: not exchanged yet, or some rank has no such batch.
        id_error: message if some rank has an invalid id; equal on every rank.
        sync_error: message if ranks cannot go on together; equal on every rank.
        desynchronized: ranks exchanged ids for different purposes, so some of them see the error later.
    """

    wanted: Mapping[int, Wanted] | None
    error: RankError = NO_ERROR
    by_rank: dict[int, list[Ids]] | None = None
    id_error: str | None = None
    sync_error: str | None = None
    desynchronized: bool = False

    @staticmethod
    def of(ids: Mapping[int, Ids], tables: Sequence[Table], deduplicate: bool) -> BatchRows:
        """Return the rows of these ids by table; an id out of range becomes the batch's ``error``."""
        error, wanted = NO_ERROR, {}
        for index, values in ids.items():
            bad = _first_out_of_range(values, tables[index].num_rows)
            if bad is not None and not error.kind:
                error = RankError(OUT_OF_RANGE, index, bad)
            wanted[index] = Wanted(values, np.unique(values) if deduplicate else values)
        return BatchRows(wanted, error)


def _first_out_of_range(ids: Ids, num_rows: int) -> int | None:
    if not len(ids) or (ids.min() >= 0 and ids.max() < num_rows):
        return None
    return int(ids[(ids < 0) | (ids >= num_rows)][0])


def exchange_ids(
    batch: BatchRows,
    purpose: Purpose,
    forward: int,
    error: RankError,
    tables: Sequence[Table],
    rank: int,
    ranks: Sequence[int],
) -> Algorithm:
    """Send every rank the rows that this rank looks up, and receive theirs; fills ``batch``.

    Two all-gathers of ceil(log2 P) rounds: of a few numbers, and of ids (int32 if every row number fits).

    Args:
        batch: the same tables on every rank, or no batch.
        purpose, forward: place of the exchange, and number of the forward; equal on all ranks.
        error: this rank's, in the present forward; with an error no ids travel.
        tables: all tables.
        rank, ranks: position of this rank in the global ranks.
    """
    wanted = batch.wanted or {}
    counts = [len(wanted[table.index].rows) if table.index in wanted else _ABSENT for table in tables]
    own_error = error if error.kind else batch.error
    mine = torch.tensor([purpose, forward, *own_error, *counts], dtype=torch.int64)
    everyone = range(len(ranks))
    headers = [h.tolist() for h in (yield from bruck_all_gather(mine, [len(mine)] * len(ranks), everyone, rank))]
    batch.sync_error = _sync_error(headers, tables, ranks)
    batch.desynchronized = len({header[0] for header in headers}) > 1
    batch.id_error = _id_error(headers, tables, ranks)
    all_counts = [header[5:] for header in headers]
    if batch.sync_error or batch.id_error or any(max(row, default=_ABSENT) == _ABSENT for row in all_counts):
        return
    dtype = np.int32 if max(table.num_rows for table in tables) <= np.iinfo(np.int32).max else np.int64
    present = [table.index for table in tables if table.index in wanted]
    message = np.concatenate([wanted[index].rows for index in present]).astype(dtype)
    sizes = [sum(row[index] for index in present) for row in all_counts]
    gathered = yield from bruck_all_gather(torch.from_numpy(message), sizes, everyone, rank)
    by_rank: dict[int, list[Ids]] = {index: [] for index in present}
    for received, row in zip(gathered, all_counts, strict=True):
        parts = np.split(as_ids(received), np.cumsum([row[index] for index in present])[:-1])
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
