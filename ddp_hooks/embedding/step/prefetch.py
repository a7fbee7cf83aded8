"""Loader that is one batch ahead, so that tables know which rows the next batch looks up."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from torch import Tensor

from ddp_hooks.comm import see
from ddp_hooks.embedding.exchange.lookup import BatchRows, Ids, as_ids

Batch = TypeVar("Batch")
BatchIds: TypeAlias = Tensor | Sequence[Tensor] | Mapping[str, Tensor | Sequence[Tensor]]


@dataclass
class Announcement:
    """Batch that a prefetching loader hands out, and the one that follows."""

    loader: object
    current: BatchRows
    upcoming: BatchRows | None


class PrefetchQueue:
    """Batches that prefetching loaders have handed out and no forward has taken; the latest is taken first."""

    def __init__(self) -> None:
        self._by_epoch: dict[object, Announcement] = {}  # ordered by the last call of announce()
        self._trained_with: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders whose batches training forwards took

    def __reduce__(self) -> Any:
        raise TypeError(
            "prefetching loaders cannot be copied or pickled: copy the loader that tables.prefetch() was given"
        )

    def announce(self, epoch: object, announcement: Announcement) -> None:
        """Add a batch, in the place of the one that the same ``epoch``, an iteration of a loader, added before."""
        self._by_epoch.pop(epoch, None)
        self._by_epoch[epoch] = announcement

    def withdraw(self, epoch: object) -> None:
        self._by_epoch.pop(epoch, None)

    @contextmanager
    def without_evaluation(self) -> Iterator[None]:
        before = dict(self._by_epoch)
        try:
            yield
        finally:
            self._by_epoch = {epoch: batch for epoch, batch in self._by_epoch.items() if before.get(epoch) is batch}

    def take(self) -> Announcement | None:
        if not self._by_epoch:
            return None
        announcement = self._by_epoch.popitem()[1]
        with suppress(TypeError):  # lists have no weak references
            self._trained_with.add(announcement.loader)
        return announcement

    def drop_evaluation(self, expected: BatchRows | None) -> None:
        """Remove the batch of a forward without gradients, unless its loader trains or it is the ``expected`` batch."""
        if not self._by_epoch or expected is None or expected.rows is None:
            return
        epoch, announcement = next(reversed(self._by_epoch.items()))
        with suppress(TypeError):
            if announcement.loader in self._trained_with:  # a training forward follows with the same batch
                return
        if announcement.current is not expected:
            del self._by_epoch[epoch]


class PrefetchedLoader(Generic[Batch]):
    """Hands out the batches of ``loader`` and announces each one, and the next, to tables; see ``tables.prefetch``.

    Everything else (``len``, ``dataset``, ``sampler``, ``set_epoch``, …) is the loader's.
    """

    def __init__(self, queue: PrefetchQueue, loader: Iterable[Batch], rows_of: Callable[[Batch], BatchRows]) -> None:
        self._queue = queue
        self._loader = loader
        self._rows_of = rows_of

    def __iter__(self) -> Iterator[Batch]:
        epoch = object()
        prepared: Iterator[tuple[Any, Any]] = ((batch, self._rows_of(batch)) for batch in self._loader)
        end = [(None, None)]
        try:
            for (batch, rows), (_, next_rows) in itertools.pairwise(itertools.chain(prepared, end)):
                self._queue.announce(epoch, Announcement(self._loader, rows, next_rows))
                yield batch
        finally:
            self._queue.withdraw(epoch)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while an instance is unpickled there is no loader yet
            raise AttributeError(name)
        return getattr(self._loader, name)


def ids_by_table(given: BatchIds, index_of: Mapping[str, int]) -> dict[int, Ids]:
    """Return flat ids by table from what the user's function returned for a batch; ``index_of`` has all names."""
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
                f"the function given to prefetch() returned ids for an unknown table {name!r}; expected keys: {names}"
                f"{see('batches-were-not-announced')}"
            )
        tensors = [values] if isinstance(values, Tensor) else values
        parts.setdefault(index_of[key], [np.zeros(0, np.int64)]).extend(as_ids(tensor) for tensor in tensors)
    return {index: np.concatenate(several) for index, several in parts.items()}
