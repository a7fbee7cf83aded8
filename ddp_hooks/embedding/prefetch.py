"""A loader that is one batch ahead, so that tables know what the next batch looks up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from ddp_hooks.comm import see
from ddp_hooks.embedding.ids import BatchRows, Ids, as_ids

if TYPE_CHECKING:
    from ddp_hooks.embedding.tables import EmbeddingTables

Batch = TypeVar("Batch")
BatchIds: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor | Sequence[Tensor]]


@dataclass
class Announcement:
    """What a wrapped loader hands out, and what it will hand out next."""

    loader: object
    current: BatchRows
    upcoming: BatchRows | None


class Announcements:
    """Of batches that wrapped loaders have handed out, until a forward takes them."""

    def __init__(self) -> None:
        self._by_epoch: dict[object, Announcement] = {}  # the one that has spoken last is the last
        self._trained_with: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders whose batches training forwards took

    def announce(self, epoch: object, announcement: Announcement) -> None:
        """A loader hands out a batch; each of its iterations is an ``epoch`` of its own."""
        self._by_epoch.pop(epoch, None)
        self._by_epoch[epoch] = announcement

    def withdraw(self, epoch: object) -> None:
        """An iteration has ended."""
        self._by_epoch.pop(epoch, None)

    def present(self) -> dict[object, Announcement]:
        """What nobody has taken yet."""
        return dict(self._by_epoch)

    def restore(self, former: dict[object, Announcement]) -> None:
        """Forget what was announced since then, by loaders of an evaluation."""
        self._by_epoch = {
            epoch: announcement for epoch, announcement in self._by_epoch.items() if former.get(epoch) is announcement
        }

    def take(self) -> Announcement | None:
        """What was handed out last, for the forward that begins."""
        if not self._by_epoch:
            return None
        announcement = self._by_epoch.popitem()[1]
        with suppress(TypeError):  # lists have no weak references
            self._trained_with.add(announcement.loader)
        return announcement

    def ignore_evaluation(self, expected: BatchRows | None) -> None:
        """A forward without gradients has begun: if a loader has announced its batch, that is not for training.

        Args:
            expected: the batch that ranks have told each other of, for the next step.
        """
        if self._by_epoch and expected is not None and expected.wanted is not None:
            epoch, announcement = next(reversed(self._by_epoch.items()))
            if announcement.current is not expected and not self._has_trained(announcement.loader):
                del self._by_epoch[epoch]

    def _has_trained(self, loader: object) -> bool:
        """Whether it is known for training: another forward without gradients then precedes the one of a step."""
        try:
            return loader in self._trained_with
        except TypeError:
            return False


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
        end, epoch = object(), object()
        upcoming: Any = next(iterator, end)
        its_rows = self._rows(upcoming) if upcoming is not end else None
        try:
            while upcoming is not end:
                batch, rows = upcoming, its_rows
                upcoming = next(iterator, end)
                its_rows = self._rows(upcoming) if upcoming is not end else None
                assert rows is not None
                self._tables.announcements.announce(epoch, Announcement(self._loader, rows, its_rows))
                yield batch
        finally:
            self._tables.announcements.withdraw(epoch)

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
            raise ValueError(
                f"the function that tells the ids of a batch named {name!r}; the tables are {names}: its dictionary "
                f"has to name them so{see('batches-were-not-announced')}"
            )
        tensors = [values] if isinstance(values, Tensor) else list(values)
        parts.setdefault(index_of[key], []).extend(as_ids(tensor) for tensor in tensors)
    return {index: np.concatenate(several) if several else np.zeros(0, np.int64) for index, several in parts.items()}
