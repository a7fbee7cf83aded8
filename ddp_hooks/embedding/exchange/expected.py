"""Bookkeeping of gradients that are still to come, and of tables that may send theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ddp_hooks.embedding.exchange.lookup import Lookup
from ddp_hooks.embedding.table import Table


class ExpectedGradients:
    """Lookups of forwards, until their gradients are sent or a step ends what has begun.

    Tables send in an order that all ranks have agreed on. A table may send when it had as many backwards as calls on
    this rank.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.order: list[int] = []  # in which tables send; empty until ranks have agreed
        self._tables = tables
        self._lookups: dict[int, list[Lookup]] = defaultdict(list)  # by table, with gradients that were not sent
        self._calls: dict[int, int] = defaultdict(int)  # by table, since it last sent
        self._backwards: dict[int, int] = defaultdict(int)  # of those calls
        self._first_calls: dict[int, None] = {}
        self._queue: list[int] = []  # tables that send in this backward
        self._latest: list[Lookup] = []  # of the last forward
        self._backward_ended = True  # of the last forward

    def lookups(self) -> Iterator[Lookup]:
        return (lookup for lookups in self._lookups.values() for lookup in lookups)

    # -- forwards

    def begin_forward(self) -> None:
        """Drop the vectors of earlier forwards, but for the last one if its backward, which may repeat it, is to come.

        Only one forward is kept, so that forwards without backward do not fill the memory.
        """
        kept = set() if self._backward_ended else {id(lookup) for lookup in self._latest}
        for lookup in self.lookups():
            if id(lookup) not in kept:
                lookup.vectors = None
        for index in list(self._lookups):
            if not self._tables[index].weight.requires_grad:  # no backward may ever come that sends them
                self._lookups[index] = [lookup for lookup in self._lookups[index] if id(lookup) in kept]
        self._latest, self._backward_ended = [], False

    def expect(self, lookup: Lookup) -> None:
        """Add a lookup whose vectors a forward may use."""
        self._lookups[lookup.table.index].append(lookup)
        self._latest.append(lookup)

    def note_call(self, index: int, has_backward: bool) -> None:
        self._calls[index] += has_backward
        self._first_calls.setdefault(index)

    def latest_first(self, index: int) -> Iterator[Lookup]:
        """Iterate over a table's lookups in the order in which autograd repeats their forwards."""
        return reversed(self._lookups[index])

    # -- backwards

    def begin_backward(self, synchronizes: bool = True) -> None:
        """Queue the tables that were used; without synchronization none sends, and gradients add up."""
        self._queue = [index for index in self.order if self._lookups[index]] if synchronizes else []

    def count_backward(self, index: int) -> None:
        self._backwards[index] += 1

    def end_backward(self) -> None:
        """Allow the next forward to drop this one's vectors."""
        self._backward_ended = True

    def own_order(self) -> list[int]:
        """Return tables in the reverse order of this rank's first calls: gradients that complete first come first."""
        called = list(reversed(self._first_calls))
        return [*called, *(table.index for table in self._tables if table.index not in self._first_calls)]

    def take_complete(self, force: bool = False) -> Iterator[list[Lookup]]:
        """Remove and yield the lookups of each table that may send now.

        With ``force`` all queued tables may, because this rank may have left some out of its loss.
        """
        while self._queue and (force or self._backwards[self._queue[0]] == self._calls[self._queue[0]]):
            index = self._queue.pop(0)
            self._calls[index] = self._backwards[index] = 0
            yield self._lookups.pop(index)

    # -- steps

    @property
    def has_gradients(self) -> bool:
        """True if a backward has left gradients that were not sent."""
        return any(lookup.gradient is not None for lookup in self.lookups())

    def multiply(self, factor: float) -> None:
        for lookup in self.lookups():
            if lookup.gradient is not None:
                lookup.gradient.mul_(factor)

    def drop_gradients(self) -> None:
        """Forget gradients that were not sent; the same forwards may bring more."""
        for lookup in self.lookups():
            lookup.drop_gradient()

    def clear(self) -> None:
        """End what earlier forwards have begun: a step has passed, so their gradients come too late."""
        for lookup in self.lookups():
            lookup.closed = True
        self._lookups.clear()
        self._calls.clear()
        self._backwards.clear()
