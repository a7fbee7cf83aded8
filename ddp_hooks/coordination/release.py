"""What is agreed upon leaves by priority: as much at a time as the link needs to be kept busy, and no more.

A per-rank priority queue would let ranks issue collectives in different orders. Here the queue is fed in agreed order,
and what leaves it is decided by what has ended on *all* ranks, which a bit per message under way says in each cycle:
so every rank takes the same message next, and what is urgent overtakes everything that has not left (ByteScheduler's
credit; Peng et al., 2019).

As long as all requests have one priority nothing can overtake, so nothing is held back, and no bits are sent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ddp_hooks.coordination.request import Request

MAX_UNDER_WAY = 32
"""Messages whose end is awaited: bits of every cycle's vector."""

_UNKNOWN = 4
"""What has another size on every rank counts as this part of the credit."""


@dataclass(frozen=True)
class Message:
    """Requests that move together.

    Args:
        number: of messages so far, the same on every rank.
        requests: all of one priority.
    """

    number: int
    requests: tuple[Request, ...]

    @property
    def priority(self) -> int:
        return self.requests[0].priority

    def cost(self, credit_bytes: int) -> int:
        """Bytes of the credit that it takes."""
        if all(request.tensors and all(spec.numel >= 0 for spec in request.tensors) for request in self.requests):
            return sum(request.nbytes for request in self.requests)
        return credit_bytes // _UNKNOWN


class ReleaseQueue:
    """The same on every rank, if fed the same.

    Args:
        credit_bytes: what may be under way together; a message that is larger leaves alone.
    """

    def __init__(self, credit_bytes: int) -> None:
        self._credit_bytes = credit_bytes
        self._num_added = 0
        self._priorities: set[int] = set()
        self._waiting: list[Message] = []
        self._under_way: dict[int, Message] = {}

    @property
    def holds_back(self) -> bool:
        """Whether there has been more than one priority."""
        return len(self._priorities) > 1

    @property
    def waiting(self) -> Sequence[Message]:
        """What has not left, in no particular order."""
        return self._waiting

    @property
    def under_way(self) -> tuple[int, ...]:
        """Numbers of the messages that have left, and are not known to have ended everywhere."""
        return tuple(self._under_way)

    def note_priorities(self, priorities: Iterable[int]) -> None:
        """Of requests that were agreed upon, before they become messages."""
        self._priorities.update(priorities)

    def add(self, messages: Iterable[Sequence[Request]]) -> list[Message]:
        """In agreed order; returns them with their numbers."""
        added = [Message(number, tuple(requests)) for number, requests in enumerate(messages, self._num_added)]
        self._num_added += len(added)
        self._waiting += added
        return added

    def end(self, numbers: Collection[int]) -> None:
        """These have ended on all ranks."""
        for number in numbers:
            self._under_way.pop(number, None)

    def take(self) -> list[Message]:
        """What leaves now: the largest priority first, in agreed order among equals."""
        self._waiting.sort(key=lambda message: (-message.priority, message.number))
        if not self.holds_back:
            taken, self._waiting = self._waiting, []
            return taken
        taken = []
        while self._waiting and self._has_credit_for(self._waiting[0]):
            message = self._waiting.pop(0)
            self._under_way[message.number] = message
            taken.append(message)
        return taken

    def _has_credit_for(self, message: Message) -> bool:
        cost = sum(each.cost(self._credit_bytes) for each in (*self._under_way.values(), message))
        return not self._under_way or (cost <= self._credit_bytes and len(self._under_way) < MAX_UNDER_WAY)
