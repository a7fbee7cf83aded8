"""Which rows every rank looks up: found once per batch, told to all ranks, known from then on.

Whoever looks up a row sends a gradient for it later, so neither exchange of a step has to send an index again. What the
next batch looks up decides which rows of this one's gradient are urgent (EmbRace, Algorithm 1; PAPER_NOTES 13: the
paper's costs leave this exchange out).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, bruck_all_gather, see
from ddp_hooks.embedding.table import Table

Ids = npt.NDArray[np.int64]

_ABSENT = -1  # as a number of rows: the table is not part of it


def as_ids(ids: Tensor) -> Ids:
    """(n,), int64, on the host."""
    values: Ids = ids.detach().cpu().numpy().astype(np.int64).reshape(-1)
    return values


class Purpose(IntEnum):
    """Why ranks tell each other ids; must be the same on all of them."""

    AHEAD = 0  # for the next batch
    NOW = 1  # for the batch whose forward begins
    ONE_TABLE = 2  # for a table's forward


class Wanted(NamedTuple):
    """What one rank looks up in one table for one batch."""

    ids: Ids  # (n,), as the model will ask for them
    rows: Ids  # (m,), which of them travel: all of them, or each once, in ascending order

    @staticmethod
    def of(ids: Ids, deduplicate: bool) -> Wanted:
        """What has to travel for these ids."""
        return Wanted(ids, np.unique(ids) if deduplicate else ids)


class Complaint(NamedTuple):
    """Why a rank cannot go on, in numbers that travel; ``kind`` 0: it can."""

    kind: int = 0
    table: int = 0
    detail: int = 0


NO_COMPLAINT = Complaint()
OUT_OF_RANGE, CHANGED = 1, 2


@dataclass
class BatchRows:
    """One batch: what this rank looks up, and once ranks have told each other, what all of them do.

    Args:
        wanted: by table, of this rank; None: there is no such batch.
        by_rank: by table, the rows that each rank looks up; None as long as it is not known, or where some rank has no
            such batch.
        problem: why nothing can be looked up, the same text on every rank.
        fault: why ranks cannot go on, likewise.
        parted: whether ranks told each other of different things, so that some of them hear of it later.
        complaint: of this rank.
    """

    wanted: Mapping[int, Wanted] | None
    by_rank: dict[int, list[Ids]] | None = None
    problem: str | None = None
    fault: str | None = None
    parted: bool = False
    complaint: Complaint = field(default=NO_COMPLAINT)

    @staticmethod
    def of(ids: Mapping[int, Ids], tables: Sequence[Table], deduplicate: bool) -> BatchRows:
        """The rows for these ids, by table; ids that do not exist are found here."""
        complaint = NO_COMPLAINT
        wanted = {}
        for index, values in ids.items():
            bad = first_out_of_range(values, tables[index].num_rows)
            if bad is not None and not complaint.kind:
                complaint = Complaint(OUT_OF_RANGE, index, bad)
            wanted[index] = Wanted.of(values, deduplicate)
        return BatchRows(wanted, complaint=complaint)


def first_out_of_range(ids: Ids, num_rows: int) -> int | None:
    """The first id that is no row of a table."""
    if not len(ids) or (ids.min() >= 0 and ids.max() < num_rows):
        return None
    return int(ids[(ids < 0) | (ids >= num_rows)][0])


def tell_ids(
    batch: BatchRows,
    purpose: Purpose,
    serial: int,
    complaint: Complaint,
    tables: Sequence[Table],
    rank: int,
    ranks: Sequence[int],
) -> Algorithm:
    """Tell every rank which rows this one looks up, and hear the same of all; fills ``batch``.

    Two all-gathers in ceil(log2 P) rounds: of numbers, and of the ids, four bytes each where they fit.

    Args:
        batch: the same tables on every rank, or none.
        purpose: why; must be equal on all ranks.
        serial: of the forward that it belongs to; likewise.
        complaint: of this rank about the present forward; ids do not travel if there is any, or one about the batch.
        tables: all of them.
        rank: this one, among
        ranks: whose global numbers these are, for messages.
    """
    counts = [
        _ABSENT if batch.wanted is None or table.index not in batch.wanted else len(batch.wanted[table.index].rows)
        for table in tables
    ]
    complaint = complaint if complaint.kind else batch.complaint
    mine = torch.tensor([purpose, serial, *complaint, *counts], dtype=torch.int64)
    everyone = range(len(ranks))
    headers = [h.tolist() for h in (yield from bruck_all_gather(mine, [len(mine)] * len(ranks), everyone, rank))]
    batch.fault = _first_fault(headers, tables, ranks)
    batch.parted = len({header[0] for header in headers}) > 1
    batch.problem = _first_problem(headers, tables, ranks)
    all_counts = [header[5:] for header in headers]
    if batch.fault or batch.problem or any(max(row, default=_ABSENT) == _ABSENT for row in all_counts):
        return
    wanted = batch.wanted
    assert wanted is not None
    dtype = np.int32 if max(table.num_rows for table in tables) <= np.iinfo(np.int32).max else np.int64
    present = [table.index for table in tables if table.index in wanted]
    message = np.concatenate([wanted[index].rows for index in present]).astype(dtype)
    sizes = [sum(row[index] for index in present) for row in all_counts]
    gathered = yield from bruck_all_gather(torch.from_numpy(message), sizes, everyone, rank)
    by_rank: dict[int, list[Ids]] = {index: [] for index in present}
    for told, row in zip(gathered, all_counts, strict=True):
        parts = np.split(as_ids(told), np.cumsum([row[index] for index in present])[:-1])
        for index, part in zip(present, parts, strict=True):
            by_rank[index].append(part)
    batch.by_rank = by_rank


def _first_problem(headers: Sequence[Sequence[int]], tables: Sequence[Table], ranks: Sequence[int]) -> str | None:
    for (_, _, kind, table, detail, *_), rank in zip(headers, ranks, strict=True):
        if kind == OUT_OF_RANGE:
            return (
                f"rank {rank} looks up id {detail} in {tables[table].name}, which has the rows 0 to "
                f"{tables[table].num_rows - 1}: check the tokenizer, or make the table larger"
            )
    return None


def _first_fault(headers: Sequence[Sequence[int]], tables: Sequence[Table], ranks: Sequence[int]) -> str | None:
    for (_, serial, kind, table, detail, *_), rank in zip(headers, ranks, strict=True):
        if kind == CHANGED:
            return (
                f"on rank {rank} forward {serial} asks {tables[table].name} for id {detail}, which is not among those "
                f"that prefetch was told of for this batch: return all ids of a batch from the function given to "
                f"tables.prefetch(), and do not skip, reorder or change batches after it (do it before, in the sampler "
                f"or the collate function){see('batches-were-not-announced')}"
            )
    if len({tuple(header[:2]) for header in headers}) > 1:
        places = [f"rank {rank}: {_place(header)}" for header, rank in zip(headers, ranks, strict=True)]
        return (
            f"ranks are at different places ({'; '.join(places)}): every rank must skip the same batches and run the "
            f"same forwards; for evaluation with other numbers of batches use tables.local(){see('ranks-out-of-step')}"
        )
    present = [tuple(count == _ABSENT for count in header[5:]) for header in headers]
    if len({absent for absent in present if not all(absent)}) > 1:
        sides = [f"rank {rank}: {_present(row, tables)}" for row, rank in zip(present, ranks, strict=True)]
        return (
            f"ranks look up rows in different tables ({'; '.join(sides)}): every rank must use the same ones"
            f"{see('ranks-out-of-step')}"
        )
    return None


def _present(absent: Sequence[bool], tables: Sequence[Table]) -> str:
    return ", ".join(table.name for table, is_absent in zip(tables, absent, strict=True) if not is_absent) or "none"


def _place(header: Sequence[int]) -> str:
    purpose = ("at the end of forward", "at the beginning of forward", "in a table's forward, after forward")
    return f"{purpose[header[0]]} {header[1]}"
