"""Telling tables of batches for a loop that draws several at a time, and trains with them one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ddp_hooks.embedding import EmbeddingTables
from ddp_hooks.embedding.ids import BatchRows
from ddp_hooks.embedding.prefetch import Announcement

_END = object()


class Lookahead:
    """Draws one batch more than it is asked for, and announces each when its training begins.

    Args:
        tables: that are told.
        ids: of a batch, as :meth:`~ddp_hooks.EmbeddingTables.prefetch` takes it.
    """

    def __init__(self, tables: EmbeddingTables, ids: Callable[[Any], Any]) -> None:
        self._tables = tables
        self._ids = ids
        self._source: Iterator[Any] | None = None
        self._drawn: Any = _END  # the batch ahead
        self._rows: deque[BatchRows] = deque()  # of what was handed out and is not trained with, and the one ahead

    def over(self, source: Iterator[Any]) -> Iterator[Any]:
        """The batches of ``source``, which may be asked for again with the same one."""
        if source is not self._source:
            self.forget()
            self._source = source
            self._draw()
        while self._drawn is not _END:
            batch = self._drawn
            self._draw()
            yield batch

    def _draw(self) -> None:
        assert self._source is not None
        self._drawn = next(self._source, _END)
        if self._drawn is not _END:
            self._rows.append(self._tables.rows_of(self._ids(self._drawn)))

    def announce(self) -> None:
        """Training begins with the next batch that was handed out."""
        if self._rows:
            current = self._rows.popleft()
            upcoming = self._rows[0] if self._rows else None
            self._tables.announcements.announce(self, Announcement(self, current, upcoming))

    def forget(self) -> None:
        """An epoch has ended."""
        self._tables.announcements.withdraw(self)
        self._source, self._drawn = None, _END
        self._rows.clear()
