"""The response cache (Horovod, section 3.1.1): what was agreed upon before has a number, the same on every rank.

Only calls that all ranks make in the same order change it, so caches never differ: looking something up changes
nothing, also not what was used last. It holds what was agreed for single requests, not what was fused of them, other
than Algorithm 1, line 23, has it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

from ddp_hooks.coordination.bitvector import indices
from ddp_hooks.coordination.request import Request

REMEMBERED = 16  # combinations of requests, as most steps agree on the same ones


class Entry(NamedTuple):
    """A request with its number, of a bit that ``mask`` has set."""

    bit: int
    request: Request
    mask: int


class ResponseCache:
    """Requests by name and by number; of more than ``capacity`` the one whose last use is longest ago is dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # in the order of their last use
        self._names: dict[int, str] = {}
        self._free: list[int] = []  # a heap of numbers below ``num_bits`` that nothing has
        self._num_bits = 0
        self._uses: OrderedDict[int, None] = OrderedDict()  # that are not in the entries' order so far
        self._selections: dict[int, tuple[Request, ...]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bits(self) -> int:
        """Bits of a vector that has one for each request."""
        return self._num_bits

    def find(self, name: str) -> Entry | None:
        """What is known under a name."""
        return self._entries.get(name)

    def at(self, bit: int) -> Request:
        """What has this number."""
        return self._entries[self._names[bit]].request

    def bits(self) -> list[int]:
        """All numbers in use, ascending."""
        return sorted(self._names)

    def select(self, bits: int) -> tuple[Request, ...]:
        """What these numbers have, in ascending order."""
        found = self._selections.get(bits)
        if found is None:
            if len(self._selections) >= REMEMBERED:
                self._selections.clear()
            entries = self._entries
            found = tuple(entries[name].request for name in map(self._names.__getitem__, indices(bits)))
            self._selections[bits] = found
        return found

    def use(self, bits: int) -> None:
        """Note that these were used, the lower ones before the higher; in agreed order."""
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
        """Add what was agreed upon, under the lowest free number; in agreed order."""
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
        """Forget it, so that it has to be agreed upon anew; in agreed order."""
        self._begin_change()
        del self._entries[self._names.pop(bit)]
        heapq.heappush(self._free, bit)

    def _begin_change(self) -> None:
        """Numbers are about to mean something else."""
        self._note_uses()
        self._selections.clear()
