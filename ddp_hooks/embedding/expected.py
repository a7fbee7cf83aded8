"""Which gradients of tables are still to come, and which tables may send theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ddp_hooks.embedding.table import Table
from ddp_hooks.embedding.vectors import Lookup


class ExpectedGradients:
    """Lookups of forwards, from which gradients come back, until these are sent or a step ends what has begun.

    Tables send in an order that all ranks have agreed on, each as soon as as many backwards as calls have come on this
    rank.

    Args:
        tables: the tables.

    Attributes:
        order: in which tables send; empty until ranks have agreed.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.order: list[int] = []
        self._tables = tables
        self._lookups: dict[int, list[Lookup]] = defaultdict(list)  # whose gradients have not been sent, by table
        self._calls: dict[int, int] = defaultdict(int)  # of forwards since then
        self._backwards: dict[int, int] = defaultdict(int)  # of those calls
        self._first_calls: dict[int, None] = {}
        self._queue: list[int] = []  # tables that are to send in the present backward
        self._latest: list[Lookup] = []  # of the present forward, or of the last one
        self._backward_ended = True  # of the last forward

    # -- forwards ---------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Drop the vectors of earlier forwards, except of the last one if its backward is to come, which may repeat it.

        Of one only: forwards without a backward are not to fill the memory.
        """
        kept = set() if self._backward_ended else {id(lookup) for lookup in self._latest}
        for lookup in self._all():
            if id(lookup) not in kept:
                lookup.vectors = None
        for index in [index for index in self._lookups if not self._tables[index].weight.requires_grad]:
            # No backward may ever come for these, and so nothing that would send and forget them.
            self._lookups[index] = [lookup for lookup in self._lookups[index] if id(lookup) in kept]
        self._latest, self._backward_ended = [], False

    def expect(self, lookup: Lookup) -> None:
        """A forward may use these vectors."""
        self._lookups[lookup.table.index].append(lookup)
        self._latest.append(lookup)

    def count_call(self, index: int) -> None:
        """A forward has used a table, whose backward is to come."""
        self._calls[index] += 1

    def note_first_call(self, index: int) -> None:
        """A forward has used a table, with gradients or without."""
        self._first_calls.setdefault(index)

    def latest_first(self, index: int) -> Iterator[Lookup]:
        """The lookups of a table: of several forwards, autograd repeats the last one first."""
        return reversed(self._lookups[index])

    # -- backwards --------------------------------------------------------------------------------------------------

    def queue(self, synchronises: bool = True) -> None:
        """Have the tables send, in order, that were used.

        Args:
            synchronises: False: none of them sends, gradients add up.
        """
        self._queue = [index for index in self.order if self._lookups[index]] if synchronises else []

    def count_backward(self, index: int) -> None:
        """A call's gradient has come."""
        self._backwards[index] += 1

    def end_backward(self) -> None:
        """Its vectors are not needed any more."""
        self._backward_ended = True

    def own_order(self) -> list[int]:
        """Tables whose gradients are complete early first: the reverse of this rank's first calls."""
        called = list(reversed(self._first_calls))
        return [*called, *(table.index for table in self._tables if table.index not in self._first_calls)]

    def take_complete(self, force: bool = False) -> Iterator[list[Lookup]]:
        """Per table that may send now, its lookups, which are forgotten here.

        Args:
            force: take all that are queued, although this rank may have left some tables out.
        """
        while self._queue and (force or self._backwards[self._queue[0]] == self._calls[self._queue[0]]):
            index = self._queue.pop(0)
            self._calls[index] = self._backwards[index] = 0
            yield self._lookups.pop(index)

    # -- steps ------------------------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has left some that are not sent."""
        return any(lookup.gradient is not None for lookup in self._all())

    def multiply(self, factor: float) -> None:
        """Multiply them."""
        for lookup in self._all():
            if lookup.gradient is not None:
                lookup.gradient.mul_(factor)

    def drop_gradients(self) -> None:
        """Forget them; more may come of the same forwards."""
        for lookup in self._all():
            lookup.forget_gradient()

    def clear(self) -> None:
        """A step ends what earlier forwards have begun: gradients that come of them now are too late."""
        for lookup in self._all():
            lookup.closed = True
        self._lookups.clear()
        self._calls.clear()
        self._backwards.clear()

    def _all(self) -> Iterator[Lookup]:
        return (lookup for lookups in self._lookups.values() for lookup in lookups)
