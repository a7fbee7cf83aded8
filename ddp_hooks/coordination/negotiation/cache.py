"""Response cache (Horovod, section 3.1.1): a number for every agreed request, the same on every rank.

Only calls that all ranks make in the same order change it, so caches never differ; looking up changes nothing. Unlike
in Algorithm 1, line 23, it holds single requests, before fusion.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

from ddp_hooks.coordination.negotiation.bitvector import indices
from ddp_hooks.coordination.request import Request

REMEMBERED = 16  # combinations of requests; most steps agree on the same ones


class Entry(NamedTuple):
    """A request with its number; ``mask`` is ``1 << bit``."""

    bit: int
    request: Request
    mask: int


class ResponseCache:
    """Requests by name and by number, at most ``capacity``: the least recently used one is dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # in the order of their last use
        self._names: dict[int, str] = {}
        self._free: list[int] = []  # a heap of unused numbers below ``num_bits``
        self._num_bits = 0
        self._uses: OrderedDict[int, None] = OrderedDict()  # not yet in the order of ``_entries``
        self._selections: dict[int, tuple[Request, ...]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bits(self) -> int:
        """Length of a vector with a bit for every request."""
        return self._num_bits

    def find(self, name: str) -> Entry | None:
        """Return the entry of a name."""
        return self._entries.get(name)

    def at(self, bit: int) -> Request:
        """Return the request of a number."""
        return self._entries[self._names[bit]].request

    def bits(self) -> list[int]:
        """Return all numbers in use, ascending."""
        return sorted(self._names)

    def select(self, bits: int) -> tuple[Request, ...]:
        """Return the requests of these numbers, in ascending order."""
        found = self._selections.get(bits)
        if found is None:
            if len(self._selections) >= REMEMBERED:
                self._selections.clear()
            entries = self._entries
            found = tuple(entries[name].request for name in map(self._names.__getitem__, indices(bits)))
            self._selections[bits] = found
        return found

    def use(self, bits: int) -> None:
        """Note a use of these numbers, the lower before the higher ones; in agreed order."""
        self._uses[bits] = None
        self._uses.move_to_end(bits)  # only the last time counts
        if len(self._uses) >= REMEMBERED:
            self._note_uses()

    def _note_uses(self) -> None:
        for bits in self._uses:
            for bit in indices(bits):
                self._entries.move_to_end(self._names[bit])
        self._uses.clear()

    def put(self, request: Request) -> None:
        """Add an agreed request under the lowest free number; in agreed order."""
        if self._capacity == 0:
            return
        self._begin_change()
        if request.name in self._entries:
            self.drop(self._entries[request.name].bit)
        if len(self._entries) == self._capacity:
            self.drop(next(iter(self._entries.values())).bit)
        if not self._free:
            heapq.heappush(self._free, self._num_bits)
            self._num_bits += 1
        bit = heapq.heappop(self._free)
        self._entries[request.name] = Entry(bit, request, 1 << bit)
        self._names[bit] = request.name

    def drop(self, bit: int) -> None:
        """Drop a request; in agreed order."""
        self._begin_change()
        del self._entries[self._names.pop(bit)]
        heapq.heappush(self._free, bit)

    def _begin_change(self) -> None:
        """Prepare for another meaning of numbers."""
        self._note_uses()
        self._selections.clear()
