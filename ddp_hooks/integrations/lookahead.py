"""Prefetch of table rows for a loop that draws several batches at a time, and trains with them one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ddp_hooks.embedding import EmbeddingTables
from ddp_hooks.embedding.exchange.ids import BatchRows
from ddp_hooks.embedding.step.prefetch import Announcement

_END = object()


class Lookahead:
    """Draws one batch ahead, and announces each batch to the tables when its training begins.

    ``ids`` returns the ids of a batch, as for :meth:`~ddp_hooks.EmbeddingTables.prefetch`.
    """

    def __init__(self, tables: EmbeddingTables, ids: Callable[[Any], Any]) -> None:
        self._tables = tables
        self._ids = ids
        self._source: Iterator[Any] | None = None
        self._drawn: Any = _END  # the batch ahead
        self._rows: deque[BatchRows] = deque()  # of batches that are not trained with yet, the one ahead included

    def over(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of ``source``; several calls with the same source continue it."""
        if source is not self._source:
            self._tables.announcements.withdraw(self)
            self._rows.clear()
            self._source, self._drawn = source, _END
            self._draw(source)
        while self._drawn is not _END:
            batch = self._drawn
            self._draw(source)
            yield batch

    def _draw(self, source: Iterator[Any]) -> None:
        self._drawn = next(source, _END)
        if self._drawn is not _END:
            self._rows.append(self._tables.rows_of(self._ids(self._drawn)))

    def announce(self) -> None:
        """Announce the next batch to train with, and the one after it."""
        if self._rows:
            current = self._rows.popleft()
            upcoming = self._rows[0] if self._rows else None
            self._tables.announcements.announce(self, Announcement(self, current, upcoming))
