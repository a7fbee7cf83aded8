"""Response cache (Horovod, section 3.1.1): a number for every agreed request, the same on every rank.

Only calls that all ranks make in the same order change it, so caches never differ; looking up changes nothing. Unlike
in Algorithm 1, line 23, it holds single requests, before fusion.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

from ddp_hooks.coordination.negotiation.messages import indices
from ddp_hooks.coordination.request import Request


class Entry(NamedTuple):
    bit: int
    request: Request


class ResponseCache:
    """Requests by name and by number, at most ``capacity``: the least recently used one is dropped."""

    def __init__(self, capacity: int) -> None:
        self.num_bits = 0  # length of a vector with a bit for every request
        self._capacity = capacity
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # in the order of their last use
        self._names: dict[int, str] = {}
        self._free: list[int] = []  # a heap of unused numbers below ``num_bits``

    def find(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def entries(self) -> list[Entry]:
        return sorted(self._entries.values(), key=lambda entry: entry.bit)

    def use(self, bits: int) -> list[Request]:
        """Return the requests of these numbers, and note their use, in ascending order; in agreed order."""
        names = [self._names[bit] for bit in indices(bits)]
        for name in names:
            self._entries.move_to_end(name)
        return [self._entries[name].request for name in names]

    def put(self, request: Request) -> None:
        """Add an agreed request under the lowest free number; in agreed order."""
        if self._capacity == 0:
            return
        if request.name in self._entries:
            self.drop(self._entries[request.name].bit)
        if len(self._entries) == self._capacity:
            self.drop(next(iter(self._entries.values())).bit)
        if not self._free:
            heapq.heappush(self._free, self.num_bits)
            self.num_bits += 1
        bit = heapq.heappop(self._free)
        self._entries[request.name] = Entry(bit, request)
        self._names[bit] = request.name

    def drop(self, bit: int) -> None:
        del self._entries[self._names.pop(bit)]
        heapq.heappush(self._free, bit)
