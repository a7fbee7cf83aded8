"""Lookups of forwards: of batches that prefetch has announced, one step ahead, or when a table is called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ddp_hooks.comm import see
from ddp_hooks.comm.torch_compat.autograd import in_backward
from ddp_hooks.embedding.exchange.channels import Channels
from ddp_hooks.embedding.exchange.lookup import (
    CHANGED,
    NO_ERROR,
    BatchRows,
    Ids,
    Lookup,
    Purpose,
    RankError,
    exchange_ids,
    look_up,
)
from ddp_hooks.embedding.step.prefetch import PrefetchQueue
from ddp_hooks.embedding.step.split_step import SplitStep
from ddp_hooks.embedding.table import Table


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
        """Drop vectors of earlier forwards, except the last one's if a backward may repeat it."""
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


class Lookups:
    """Vectors of the present forward's batch, and of the next batch.

    Lookups that may bring gradients are added to ``expected``. Delayed rows are applied before lookups.
    """

    def __init__(
        self, tables: Sequence[Table], channels: Channels, expected: ExpectedGradients, split_step: SplitStep
    ) -> None:
        self.queue = PrefetchQueue()
        self.current: BatchRows | None = None  # prefetched batch of the present forward
        self.ahead: BatchRows | None = None  # the next batch
        self.sync_error: str | None = None  # why ranks cannot go on; all of them raise it when backward ends
        self._tables = tables
        self._channels = channels
        self._expected = expected
        self._split_step = split_step
        self._upcoming: BatchRows | None = None  # exchanged at the end of the forward
        self._forward = 0  # forwards with gradients so far
        self._error: RankError = NO_ERROR

    def begin_forward(self) -> None:
        """Look up the batch that was announced for this forward, unless the last step has; raises ``ValueError``."""
        self._forward += 1
        self._expected.begin_forward()
        self.current = None
        announced = self.queue.take()
        if announced is None or self._channels.config.schedule == "none":
            return
        self._upcoming = announced.upcoming
        batch, ahead, self.ahead = announced.current, self.ahead, None
        if batch is not ahead or not self._is_known(batch):
            self._exchange_ids(batch, Purpose.NOW)
        lookups = batch.lookups
        if lookups is None:
            self._split_step.flush()
            lookups = self._fetch(batch)
        for lookup in lookups.values():
            self._expected.expect(lookup)
        self.current = batch

    def end_forward(self) -> None:
        if self.current is not None and self.sync_error is None:
            upcoming, self._upcoming = self._upcoming, None
            self.ahead = self._exchange_ids(upcoming or BatchRows(None), Purpose.AHEAD)

    def wait_for_next_ids(self) -> None:
        if self.ahead is not None:
            self._channels.wait(self.ahead.ids_known, self._channels.tally.gradients)
            self.sync_error = self.sync_error or self.ahead.sync_error

    def look_ahead(self, flushes: bool) -> None:
        """Request the vectors of the next batch again, since earlier ones may be of old weights."""
        if self.ahead is None:
            return
        self._channels.wait(self.ahead.ids_known, self._channels.tally.gradients)
        if self.ahead.by_rank is not None:
            if flushes:
                self._split_step.flush()  # nobody knew of this batch when rows were delayed
            self._fetch(self.ahead)

    def discard_ahead(self) -> None:
        if self.ahead is not None:
            if self.ahead.fetched is not None:
                self.ahead.fetched.wait()
            self.ahead.lookups = self.ahead.fetched = None

    def _is_known(self, batch: BatchRows) -> bool:
        """Return True if every rank has such a batch; raise ``ValueError`` if some rank has an invalid id."""
        batch.ids_known.wait()
        if batch.id_error is not None:
            raise ValueError(batch.id_error)
        return batch.by_rank is not None

    def _exchange_ids(self, batch: BatchRows, purpose: Purpose) -> BatchRows:
        algorithm = exchange_ids(batch, purpose, self._forward, self._error, self._tables, self._channels.ranks)
        batch.ids_known = self._channels.run("id", algorithm, "ids of a batch")
        batch.lookups = batch.fetched = None
        return batch

    def _fetch(self, batch: BatchRows) -> dict[int, Lookup]:
        rows = batch.rows or {}
        lookups = {table.index: Lookup(table, rows[table.index]) for table in self._tables if table.index in rows}
        algorithm = look_up(list(lookups.values()), batch)
        batch.fetched = self._channels.run("lookup", algorithm, "vectors of a batch", [batch.ids_known])
        batch.lookups = lookups
        return lookups

    def find(self, table: Table, ids: Ids, in_forward: bool) -> tuple[Lookup, Tensor] | None:
        """Return the lookup of ``ids``, and their positions; None: ranks cannot go on, and raise when backward ends."""
        if in_backward():
            return self._find_again(table, ids)
        batch = self.current if in_forward else None
        is_new = batch is None or table.index not in (batch.lookups or {})
        if is_new:
            batch = self._request_now(table, ids)
        if batch is None or not self._wait_for_vectors(batch):
            return None
        assert batch.lookups is not None
        lookup = batch.lookups[table.index]
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

    def _request_now(self, table: Table, ids: Ids) -> BatchRows | None:
        if self.sync_error is not None:
            return None
        self._split_step.end()
        self._split_step.flush()
        batch = BatchRows.of({table.index: ids}, self._tables, self._channels.config.deduplicate)
        self._fetch(self._exchange_ids(batch, Purpose.ONE_TABLE))
        return batch

    def _wait_for_vectors(self, batch: BatchRows) -> bool:
        """Return False if ranks are desynchronized and some of them see it at the end of backward; all raise there."""
        assert batch.fetched is not None
        self._channels.wait(batch.fetched, self._channels.tally.lookups)
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
