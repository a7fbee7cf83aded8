"""Negotiation cycle as a generator: the same on the fabric, with a clock, and between processes.

1. Ranks AND one vector: a byte of status, a bit for every message under way that has ended (only where other messages
   wait for its end), and a bit for every cached request that is pending (Horovod, Algorithm 2). A bit that all ranks
   have set is a ready request. Status bits are such that one AND answers questions about all ranks and about any rank.
2. If a rank requests something else under a cached name, all ranks drop the cached request.
3. If a rank has a request that is not cached, or a late one, all ranks send theirs to rank 0, which answers with
   ready requests, refused requests and missing ranks (Horovod, Algorithm 1, line 20).
4. Requests for ``"any"`` take a second vector each.

Unlike in the paper no rank negotiates every millisecond. A cycle begins on a rank with a new request. A request becomes
ready by the request of the last rank, so the cycle in which it becomes ready begins on that rank.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddp_hooks.comm import Algorithm, Round
from ddp_hooks.coordination.negotiation.cache import ResponseCache
from ddp_hooks.coordination.negotiation.messages import VectorBuffers, and_of_all, broadcast, gather, indices, or_of_all
from ddp_hooks.coordination.negotiation.request_table import RequestTable
from ddp_hooks.coordination.request import Request, pack, unpack

# Bits of status. NO_RANK_... is set on ranks without, so that the AND is set only if there is none.
_NO_RANK_HAS_NEW = 1
_NO_RANK_DIFFERS_FROM_CACHE = 2
_NO_RANK_IS_LATE = 4
_NO_RANK_CLOSES = 8
_ALL_CLOSE = 16
_ALL_HAVE_JOINED = 32
_NO_RANK_WAITS_TOO_LONG = 64
STATUS_BITS = 8


@dataclass(frozen=True)
class CycleInput:
    pending: Mapping[str, Request]  # by name, in the order of requests
    flags: Mapping[str, int] = field(default_factory=dict)  # set bits of requests for "any", by name
    overdue: Collection[str] = ()  # names of late requests: missing ranks are to be named
    expired: Collection[str] = ()  # names of requests that have timed out
    joined: bool = False  # this rank has run out of data
    closing: bool = False  # this rank makes no further request
    under_way: Sequence[int] = ()  # messages not known to have ended on all ranks; the same on every rank
    ended: Collection[int] = ()  # messages under way that have ended here
    waiting_too_long: bool = False  # a thread is blocked for long


@dataclass
class CycleResult:
    """Result of a cycle, the same on every rank."""

    ready: list[Request] = field(default_factory=list)  # agreed requests, in order
    answers: dict[str, int] = field(default_factory=dict)  # to requests for "any": bits that are set on any rank
    refused: dict[str, str] = field(default_factory=dict)  # reasons by name
    missing: dict[str, list[int]] = field(default_factory=dict)  # ranks that have not made a late request, by name
    failure: str | None = None  # the reason why all requests end
    all_joined: bool = False
    closed: bool = False  # all ranks close
    ended: list[int] = field(default_factory=list)  # messages that have ended on all ranks
    any_waiting_too_long: bool = False


class Negotiator:
    """State of one rank between cycles; ``ranks`` are all of the group, as messages call them."""

    def __init__(self, rank: int, ranks: Sequence[int], capacity: int, fan_out: int | None = None) -> None:
        self.cache = ResponseCache(capacity)
        self._rank = rank
        self._world_size = len(ranks)
        self._fan_out = fan_out
        self._announced: set[str] = set()  # names that rank 0 has heard of from here, and has not answered
        self._announced_joined = False
        self._table = RequestTable(ranks)  # used on rank 0
        self._buffers = VectorBuffers(rank, len(ranks))

    def has_news_of(self, pending: Iterable[str]) -> bool:
        """Return True if a pending request was dropped from the cache, so that another cycle is due."""
        return any(self.cache.find(name) is None and name not in self._announced for name in pending)

    def cycle(self, given: CycleInput, result: CycleResult) -> Algorithm:
        """Take part in one cycle; fill in ``result``."""
        new, hits_of_own, stale = self._look_up(given)
        hits = hits_of_own
        if given.joined:
            hits |= sum(1 << bit for bit, request in self.cache.entries() if request.works_without_data)
        has_new = bool(new) or given.joined > self._announced_joined
        under_way = given.under_way
        ended = sum(1 << place for place, number in enumerate(under_way) if number in given.ended)
        first_hit = STATUS_BITS + len(under_way)
        vector = _status(given, has_new, bool(stale)) | ended << STATUS_BITS | hits << first_hit
        vector = yield from and_of_all(vector, first_hit + self.cache.num_bits, self._buffers)
        result.any_waiting_too_long = not vector & _NO_RANK_WAITS_TOO_LONG
        result.all_joined = bool(vector & _ALL_HAVE_JOINED)
        result.closed = bool(vector & _ALL_CLOSE)
        result.ended = [number for place, number in enumerate(under_way, STATUS_BITS) if vector >> place & 1]
        common = vector >> first_hit
        if not vector & _NO_RANK_DIFFERS_FROM_CACHE:
            dropped = yield from self._or(stale, self.cache.num_bits)
            for bit in indices(dropped):  # in ascending order, the same on every rank
                self.cache.drop(bit)
            common &= ~dropped
        if result.all_joined:  # all ranks stand in for each request; some rank must have made it
            common &= yield from self._or(hits_of_own, self.cache.num_bits)
        agreed = self.cache.use(common)
        names_missing = not vector & _NO_RANK_IS_LATE or not (vector & _NO_RANK_CLOSES or result.closed)
        if names_missing or not vector & _NO_RANK_HAS_NEW:
            cached = {request.name for request in agreed}
            waiting = [each for each in given.pending.values() if names_missing and each.name not in cached]
            agreed += yield from self._consult(given, new, waiting, result)
        for request in agreed:
            if request.operation == "any":
                (spec,) = request.tensors
                result.answers[request.name] = yield from self._or(given.flags.get(request.name, 0), spec.shape[0])
            else:
                result.ready.append(request)

    def _look_up(self, given: CycleInput) -> tuple[list[Request], int, int]:
        """Return requests for rank 0, bits of cached requests, and bits of cached requests that differ."""
        new, hits, stale = [], 0, 0
        for name, request in given.pending.items():
            entry = self.cache.find(name)
            if entry is None:
                if name not in self._announced:
                    new.append(request)
            elif entry.request is request or entry.request == request:
                hits |= 1 << entry.bit
            else:
                stale |= 1 << entry.bit
        return new, hits, stale

    def _or(self, bits: int, num_bits: int) -> Generator[Round, None, int]:
        # Memory of its own: the cycle's first vector may still travel.
        return or_of_all(bits, num_bits, VectorBuffers(self._rank, self._world_size))

    def _consult(
        self, given: CycleInput, new: Sequence[Request], waiting: Sequence[Request], result: CycleResult
    ) -> Generator[Round, None, list[Request]]:
        """Ask rank 0; return the requests that it found ready."""
        self._announced |= {request.name for request in new}
        self._announced_joined = given.joined
        question = {
            "new": pack(new),
            "waiting": [[request.name, request.works_without_data] for request in waiting],
            "overdue": list(given.overdue),
            "expired": list(given.expired),
            "joined": given.joined,
            "closing": given.closing,
        }
        questions = yield from gather(question, self._rank, self._world_size, self._fan_out)
        answer = self._table.answer(questions) if self._rank == 0 else {}
        answer = yield from broadcast(answer, self._rank, self._world_size)
        result.refused = answer["refused"]
        result.missing = answer.get("missing", {})
        result.failure = answer.get("failure")
        fresh = unpack(answer["ready"])
        for request in fresh:
            own = given.pending.get(request.name)
            self.cache.put(own if own is not None and own == request else request)  # equal ones are found by identity
        self._announced -= {request.name for request in fresh} | result.refused.keys()
        return fresh


def _status(given: CycleInput, has_new: bool, differs: bool) -> int:
    bits = {
        _NO_RANK_HAS_NEW: not has_new,
        _NO_RANK_DIFFERS_FROM_CACHE: not differs,
        _NO_RANK_IS_LATE: not (given.overdue or given.expired),
        _NO_RANK_CLOSES: not given.closing,
        _ALL_CLOSE: given.closing and not given.pending,
        _ALL_HAVE_JOINED: given.joined,
        _NO_RANK_WAITS_TOO_LONG: not given.waiting_too_long,
    }
    return sum(bit for bit, is_set in bits.items() if is_set)
