"""Lookups of forwards: of batches that prefetch has announced, one step ahead, or when a table is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ddp_hooks.comm import Work, see
from ddp_hooks.comm.torch_compat.autograd import in_backward
from ddp_hooks.embedding.exchange.channels import Channels
from ddp_hooks.embedding.exchange.ids import CHANGED, NO_ERROR, BatchRows, Ids, Purpose, RankError, exchange_ids
from ddp_hooks.embedding.exchange.lookup import ExpectedGradients, Lookup, look_up
from ddp_hooks.embedding.step.prefetch import PrefetchQueue
from ddp_hooks.embedding.step.split_step import SplitStep
from ddp_hooks.embedding.table import Table


@dataclass
class PreparedBatch:
    """Batch whose ids ranks exchange."""

    batch: BatchRows
    ids_known: Work  # done when the rows of all ranks are known
    lookups: dict[int, Lookup] | None = None  # of its vectors, by table; None: not requested yet
    fetched: Work | None = None  # done when the vectors are here


class Lookups:
    """Vectors of the present forward's batch, and of the next batch.

    Lookups that may bring gradients are added to ``expected``. Delayed rows are applied before lookups.
    """

    def __init__(
        self, tables: Sequence[Table], channels: Channels, expected: ExpectedGradients, split_step: SplitStep
    ) -> None:
        self.queue = PrefetchQueue()
        self.current: PreparedBatch | None = None  # prefetched batch of the present forward
        self.ahead: PreparedBatch | None = None  # the next batch
        self.sync_error: str | None = None  # why ranks cannot go on; all of them raise it when backward ends
        self._tables = tables
        self._channels = channels
        self._expected = expected
        self._split_step = split_step
        self._upcoming: BatchRows | None = None  # exchanged at the end of the forward
        self._forward = 0  # forwards with gradients so far
        self._error: RankError = NO_ERROR

    @property
    def next_rows(self) -> BatchRows | None:
        return self.ahead.batch if self.ahead is not None else None

    def begin_forward(self) -> None:
        """Look up the batch that was announced for this forward, unless the last step has; raises ``ValueError``."""
        self._forward += 1
        self._expected.begin_forward()
        self.current = None
        announced = self.queue.take()
        if announced is None or self._channels.config.schedule == "none":
            return
        self._upcoming = announced.upcoming
        prepared, self.ahead = self.ahead, None
        if prepared is None or prepared.batch is not announced.current or not self._is_known(prepared):
            prepared = self._exchange_ids(announced.current, Purpose.NOW)
        lookups = prepared.lookups
        if lookups is None:
            self._split_step.flush()
            lookups = self._fetch(prepared)
        for lookup in lookups.values():
            self._expected.expect(lookup)
        self.current = prepared

    def end_forward(self) -> None:
        if self.current is not None and self.sync_error is None:
            upcoming, self._upcoming = self._upcoming, None
            self.ahead = self._exchange_ids(upcoming or BatchRows(None), Purpose.AHEAD)

    def wait_for_next_ids(self) -> None:
        if self.ahead is not None:
            self._channels.wait(self.ahead.ids_known, self._channels.tally.gradients)
            self.sync_error = self.sync_error or self.ahead.batch.sync_error

    def look_ahead(self, flushes: bool) -> None:
        """Request the vectors of the next batch again, since earlier ones may be of old weights."""
        if self.ahead is None:
            return
        self._channels.wait(self.ahead.ids_known, self._channels.tally.gradients)
        if self.ahead.batch.by_rank is not None:
            if flushes:
                self._split_step.flush()  # nobody knew of this batch when rows were delayed
            self._fetch(self.ahead)

    def discard_ahead(self) -> None:
        if self.ahead is not None:
            if self.ahead.fetched is not None:
                self.ahead.fetched.wait()
            self.ahead.lookups = self.ahead.fetched = None

    def _is_known(self, ahead: PreparedBatch) -> bool:
        """Return True if every rank has such a batch; raise ``ValueError`` if some rank has an invalid id."""
        ahead.ids_known.wait()
        if ahead.batch.id_error is not None:
            raise ValueError(ahead.batch.id_error)
        return ahead.batch.by_rank is not None

    def _exchange_ids(self, batch: BatchRows, purpose: Purpose) -> PreparedBatch:
        channels = self._channels
        algorithm = exchange_ids(batch, purpose, self._forward, self._error, self._tables, channels.ranks)
        return PreparedBatch(batch, channels.run("id", algorithm, "ids of a batch"))

    def _fetch(self, prepared: PreparedBatch) -> dict[int, Lookup]:
        rows = prepared.batch.rows or {}
        lookups = {table.index: Lookup(table, rows[table.index]) for table in self._tables if table.index in rows}
        algorithm = look_up(list(lookups.values()), prepared.batch)
        prepared.fetched = self._channels.run("lookup", algorithm, "vectors of a batch", [prepared.ids_known])
        prepared.lookups = lookups
        return lookups

    def find(self, table: Table, ids: Ids, in_forward: bool) -> tuple[Lookup, Tensor] | None:
        """Return the lookup of ``ids``, and their positions; None: ranks cannot go on, and raise when backward ends."""
        if in_backward():
            return self._find_again(table, ids)
        prepared = self.current if in_forward else None
        is_new = prepared is None or table.index not in (prepared.lookups or {})
        if is_new:
            prepared = self._request_now(table, ids)
        if prepared is None or not self._wait_for_vectors(prepared):
            return None
        assert prepared.lookups is not None
        lookup = prepared.lookups[table.index]
        if is_new and (in_forward or torch.is_grad_enabled()):
            self._expected.expect(lookup)
        positions = lookup.positions_of(ids)
        if isinstance(positions, int):
            self._error = RankError(CHANGED, table.index, positions)
            return None
        return lookup, positions

    def _find_again(self, table: Table, ids: Ids) -> tuple[Lookup, Tensor] | None:
        """Serve a forward that activation checkpointing repeats; no rank may communicate for it."""
        if self.sync_error is not None or self._error is not NO_ERROR:  # the forward itself found nothing
            return None
        for lookup in self._expected.latest_first(table.index):
            positions = lookup.positions_of(ids) if lookup.vectors is not None else 0
            if isinstance(positions, Tensor):
                return lookup, positions
        raise RuntimeError(
            f"a forward was repeated during backward and asks {table.name} for ids whose vectors are not here: "
            f"activation checkpointing needs the same ids again, and no more than two forwards before their backward"
            f"{see('late-gradients')}"
        )

    def _request_now(self, table: Table, ids: Ids) -> PreparedBatch | None:
        if self.sync_error is not None:
            return None
        self._split_step.end()
        self._split_step.flush()
        batch = BatchRows.of({table.index: ids}, self._tables, self._channels.config.deduplicate)
        prepared = self._exchange_ids(batch, Purpose.ONE_TABLE)
        self._fetch(prepared)
        return prepared

    def _wait_for_vectors(self, prepared: PreparedBatch) -> bool:
        """Return False if ranks are desynchronized and some of them see it at the end of backward; all raise there."""
        assert prepared.fetched is not None
        self._channels.wait(prepared.fetched, self._channels.tally.lookups)
        batch = prepared.batch
        if batch.id_error is not None:
            raise ValueError(batch.id_error)
        if batch.sync_error is not None:
            if not (batch.desynchronized and torch.is_grad_enabled()):
                raise RuntimeError(batch.sync_error)
            self.sync_error = batch.sync_error
            return False
        return True


class GatherVectors(torch.autograd.Function):
    """Select vectors of a lookup; the backward hands their gradient to ``receive``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: Lookup, positions: Tensor, receive: Callable[..., None]) -> Tensor:
        # The anchor is empty and requires a gradient, so the result does.
        ctx.lookup, ctx.receive, ctx.is_first = lookup, receive, True
        ctx.save_for_backward(positions)
        assert lookup.vectors is not None
        return lookup.vectors.index_select(0, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        (positions,) = ctx.saved_tensors
        ctx.receive(ctx.lookup, positions, gradient, ctx.is_first)
        ctx.is_first = False
        return None, None, None, None
