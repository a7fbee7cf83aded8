"""Order in which agreed requests leave: fused into messages, by priority, as many bytes at a time as a credit allows.

A priority queue on each rank would let ranks issue collectives in different orders. This queue is fed in agreed order,
and a message leaves it when messages have ended on *all* ranks: each cycle's vector has a bit for every message under
way. So all ranks take the same message next, and an urgent one overtakes every message that has not left
(ByteScheduler's credit; Peng et al., 2019).

While all requests have one priority nothing can overtake, so the queue holds nothing back, and no bits are sent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddp_hooks.coordination.request import Request

MAX_UNDER_WAY = 32  # messages: bits of every cycle's vector
_UNKNOWN = 4  # a message of unknown size takes this fraction of the credit


def fuse(ready: Sequence[Request], limit_bytes: int, mix_groups: bool) -> list[list[Request]]:
    """Split requests into messages, the largest priority first: neighbouring all-reduces of one type travel together.

    A message of several requests has at most ``limit_bytes``. A request is never cut, and without ``mix_groups`` a
    group travels alone.
    """
    messages: list[list[Request]] = []
    total, key = 0, object()
    for request in sorted(ready, key=lambda request: -request.priority):
        nbytes = request.nbytes
        fits = request.operation == "all_reduce" and len(request.dtypes) == 1 and (mix_groups or not request.grouped)
        # One priority per message: an urgent request must not wait for bytes that are not urgent.
        own_key = (request.dtypes, request.mean, request.priority) if fits else object()
        if own_key != key or total + nbytes > limit_bytes:
            messages.append([])
            total, key = 0, own_key
        messages[-1].append(request)
        total += nbytes
    return messages


@dataclass(frozen=True)
class Message:
    """Requests of one priority that move together."""

    number: int  # counts messages, the same on every rank
    requests: tuple[Request, ...]

    def cost(self, credit_bytes: int) -> float:
        """Return the bytes of the credit that the message takes."""
        nbytes = sum(request.known_nbytes for request in self.requests)
        return nbytes if nbytes < math.inf else credit_bytes // _UNKNOWN


class SendQueue:
    """Messages that have not left; the same on every rank if fed the same."""

    def __init__(self, credit_bytes: int, fusion_bytes: int, mix_groups: bool = True) -> None:
        self.waiting: list[Message] = []  # in no particular order
        self.under_way: dict[int, Message] = {}  # left, and not known to have ended on all ranks; by number
        self._credit_bytes = credit_bytes  # of all messages under way; a larger message leaves alone
        self._fusion_bytes = fusion_bytes
        self._mix_groups = mix_groups
        self._num_added = 0
        self._priorities: set[int] = set()

    @property
    def holds_back(self) -> bool:
        return len(self._priorities) > 1

    def add(self, ready: Sequence[Request]) -> list[Message]:
        """Add requests in agreed order; return their messages."""
        self._priorities.update(request.priority for request in ready)
        limit_bytes = min(self._fusion_bytes, self._credit_bytes) if self.holds_back else self._fusion_bytes
        messages = fuse(ready, limit_bytes, self._mix_groups)
        added = [Message(number, tuple(requests)) for number, requests in enumerate(messages, self._num_added)]
        self._num_added += len(added)
        self.waiting += added
        return added

    def end(self, numbers: Collection[int]) -> None:
        for number in list(numbers):
            del self.under_way[number]

    def take(self) -> list[Message]:
        """Return the messages that leave now: the largest priority first, in agreed order among equals."""
        self.waiting.sort(key=lambda message: (-message.requests[0].priority, message.number))
        if not self.holds_back:
            taken, self.waiting = self.waiting, []
            return taken
        taken = []
        while self.waiting and self._has_credit_for(self.waiting[0]):
            message = self.waiting.pop(0)
            self.under_way[message.number] = message
            taken.append(message)
        return taken

    def _has_credit_for(self, message: Message) -> bool:
        cost = sum(each.cost(self._credit_bytes) for each in (*self.under_way.values(), message))
        return not self.under_way or (cost <= self._credit_bytes and len(self.under_way) < MAX_UNDER_WAY)
