"""A loader that is one batch ahead, so that tables know what the next batch looks up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from ddp_hooks.embedding.ids import BatchRows, Ids, as_ids

if TYPE_CHECKING:
    from ddp_hooks.embedding.tables import EmbeddingTables

Batch = TypeVar("Batch")
BatchIds: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor | Sequence[Tensor]]


@dataclass
class Announcement:
    """What a wrapped loader hands out, and what it will hand out next."""

    current: BatchRows
    upcoming: BatchRows | None


class Announcements:
    """Of batches that wrapped loaders have handed out, until a forward takes them."""

    def __init__(self) -> None:
        self._by_loader: dict[object, Announcement] = {}  # the one that has spoken last is the last

    def announce(self, loader: object, current: BatchRows, upcoming: BatchRows | None) -> None:
        """A loader hands out a batch."""
        self._by_loader.pop(loader, None)
        self._by_loader[loader] = Announcement(current, upcoming)

    def withdraw(self, loader: object) -> None:
        """A loader has ended."""
        self._by_loader.pop(loader, None)

    def take(self) -> Announcement | None:
        """What was handed out last, for the forward that begins."""
        return self._by_loader.popitem()[1] if self._by_loader else None

    def ignore_evaluation(self, expected: BatchRows | None) -> None:
        """A forward without gradients has begun: if a loader has announced its batch, that is not for training.

        Args:
            expected: the batch that ranks have told each other of, for the next step.
        """
        if self._by_loader and expected is not None and expected.wanted is not None:
            loader, announcement = next(reversed(self._by_loader.items()))
            if announcement.current is not expected:
                del self._by_loader[loader]


class PrefetchedLoader(Generic[Batch]):
    """Hands out the batches of ``loader``, and tells ``tables`` of each one and the next; see ``tables.prefetch``.

    Everything else (``len``, ``dataset``, ``sampler``, ``set_epoch``, …) is the loader's.
    """

    def __init__(
        self, tables: EmbeddingTables, loader: Iterable[Batch], ids: Callable[[Batch], BatchIds]
    ) -> None:
        self._tables = tables
        self._loader = loader
        self._ids = ids

    def __iter__(self) -> Iterator[Batch]:
        iterator = iter(self._loader)
        end, token = object(), object()
        upcoming: Any = next(iterator, end)
        its_rows = self._rows(upcoming) if upcoming is not end else None
        try:
            while upcoming is not end:
                batch, rows = upcoming, its_rows
                upcoming = next(iterator, end)
                its_rows = self._rows(upcoming) if upcoming is not end else None
                assert rows is not None
                self._tables.announcements.announce(token, rows, its_rows)
                yield batch
        finally:
            self._tables.announcements.withdraw(token)

    def _rows(self, batch: Batch) -> BatchRows:
        return self._tables.rows_of(self._ids(batch))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while an instance is unpickled there is no loader yet
            raise AttributeError(name)
        return getattr(self._loader, name)


def ids_by_table(given: BatchIds, index_of: Mapping[str, int]) -> dict[int, Ids]:
    """Flat ids by table, from what the user's function has returned for a batch.

    Args:
        given: ids by the name of a table; without names if there is only one table. Several tensors where a forward
            asks several times.
        index_of: of the tables, by all their names.

    Raises:
        ValueError: a name is that of no table.
    """
    names = ", ".join(index_of)
    if not isinstance(given, Mapping):
        if len(set(index_of.values())) > 1:
            raise ValueError(f"the function given to prefetch() must return ids by table, a dict with keys of {names}")
        given = {next(iter(index_of)): given}
    parts: dict[int, list[Ids]] = {}
    for name, values in given.items():
        key = name.removesuffix(".weight")
        if key not in index_of:
            raise ValueError(f"the function given to prefetch() returned ids for {name!r}; the tables are {names}")
        tensors = [values] if isinstance(values, Tensor) else list(values)
        parts.setdefault(index_of[key], []).extend(as_ids(tensor) for tensor in tensors)
    return {index: np.concatenate(several) if several else np.zeros(0, np.int64) for index, several in parts.items()}
