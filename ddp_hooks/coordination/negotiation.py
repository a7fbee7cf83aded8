"""One cycle of coordination, as a generator: the same on the fabric, with a clock, and between processes.

1. Ranks AND one vector: a byte of status, a bit for every message under way that has ended, where others wait for it
   (:mod:`~ddp_hooks.coordination.release`), and one for every cached request that is pending (Horovod, Algorithm 2).
   What all have is ready. Bits of status are such that one AND answers questions of all and of any.
2. If a rank asks for something else than is cached under a name, that is forgotten, on all ranks.
3. If a rank has something that is not cached, or wants to know what it waits for, ranks tell the first one, which
   answers them all: what is ready, what cannot be, who is missing (Horovod, Algorithm 1, line 20).
4. Questions about any rank are answered by a second vector, only where they were asked.

Unlike in the paper nothing is tried again every millisecond. A cycle begins where a rank has news, and what one rank
waits for is news of the last rank that asks for it, so the cycle in which it becomes ready begins there.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddp_hooks.comm import Algorithm, Round, see
from ddp_hooks.coordination.bitvector import (
    Messages,
    and_of_all,
    from_vector,
    indices,
    or_of_all,
    to_vector,
    vector_nbytes,
)
from ddp_hooks.coordination.cache import ResponseCache
from ddp_hooks.coordination.messages import broadcast, gather
from ddp_hooks.coordination.request import Request, decode, encode, packed, unpacked
from ddp_hooks.coordination.table import Table, takes_part_without_data

# Bits of status. Those of nobody are set where there is nothing, so that they survive only if that is so everywhere.
_NOBODY_HAS_NEW = 1
_NOBODY_DISAGREES_WITH_THE_CACHE = 2
_NOBODY_ASKS_WHO_IS_MISSING = 4
_NOBODY_CLOSES = 8
_ALL_CLOSE = 16
_ALL_HAVE_JOINED = 32
_NOBODY_STARVES = 64


@dataclass(frozen=True)
class Situation:
    """What a rank brings to a cycle.

    Args:
        pending: requests by name, in the order in which they were made.
        flags: of requests for ``"any"`` the bits that are set here.
        overdue: names that have waited so long that it shall be said who is missing.
        expired: names that have waited so long that everything ends.
        joined: whether this rank has run out of data.
        closing: whether this rank will ask for nothing more.
        under_way: numbers of messages that move, and are not known to have ended everywhere; the same on every rank.
        ended: those of them that have ended here.
        is_starving: whether a thread has done nothing for long, until something is agreed upon.
    """

    pending: Mapping[str, Request]
    flags: Mapping[str, int] = field(default_factory=dict)
    overdue: Collection[str] = ()
    expired: Collection[str] = ()
    joined: bool = False
    closing: bool = False
    under_way: Sequence[int] = ()
    ended: Collection[int] = ()
    is_starving: bool = False


@dataclass
class Outcome:
    """What a cycle has found, the same on every rank.

    Args:
        ready: to be done, in this order.
        answers: of requests for ``"any"``, which are not among those: the bits that are set on any rank.
        refused: by name, why it cannot be done.
        missing: by name, of what is overdue somewhere, the ranks that have not asked for it.
        failure: why nothing more can be done.
        all_joined: whether all ranks have run out of data.
        closed: whether all ranks close.
        ended: numbers of messages that have ended on all ranks.
        somebody_starves: whether that is so on any rank.
    """

    ready: list[Request] = field(default_factory=list)
    answers: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    missing: dict[str, list[int]] = field(default_factory=dict)
    failure: str | None = None
    all_joined: bool = False
    closed: bool = False
    ended: list[int] = field(default_factory=list)
    somebody_starves: bool = False


class Negotiator:
    """What one rank knows between cycles.

    Args:
        rank, ranks: which of them this one is; as messages call them.
        capacity: of the cache.
        fan_out: of the tree along which ranks tell the first one; None: all tell it themselves.
    """

    def __init__(self, rank: int, ranks: Sequence[int], capacity: int, fan_out: int | None = None) -> None:
        self.cache = ResponseCache(capacity)
        self._rank = rank
        self._ranks = ranks
        self._world_size = len(ranks)
        self._fan_out = fan_out
        self._told: set[str] = set()  # names that the first rank has heard of from here, and has not answered
        self._told_of_joining = False
        self._table = Table(ranks)  # of the first rank
        self._messages = Messages(rank, len(ranks))

    @property
    def vector_nbytes(self) -> int:
        """Length of the first message of the next cycle, if no message is under way that others wait for."""
        return vector_nbytes(self.cache.num_bits)

    def has_news_of(self, pending: Iterable[str]) -> bool:
        """Whether another cycle is due: something was forgotten that is pending here."""
        return any(self.cache.find(name) is None and name not in self._told for name in pending)

    def cycle(self, situation: Situation, outcome: Outcome) -> Algorithm:
        """Take part in one cycle; ``outcome`` is filled in."""
        new, hits_of_own, stale = self._look_up(situation)
        hits = hits_of_own | (self._stood_in_for() if situation.joined else 0)
        has_news = bool(new) or situation.joined > self._told_of_joining
        under_way = situation.under_way
        ended = sum(1 << place for place, number in enumerate(under_way) if number in situation.ended)
        num_bits = len(under_way) + self.cache.num_bits
        vector = to_vector(_status(situation, has_news, bool(stale)), ended | hits << len(under_way), num_bits)
        yield from and_of_all(vector, self._rank, self._world_size, self._messages)
        status, bits = from_vector(vector)
        outcome.somebody_starves = not status & _NOBODY_STARVES
        outcome.ended = [under_way[place] for place in indices(bits & (1 << len(under_way)) - 1)]
        common = bits >> len(under_way)
        if not status & _NOBODY_DISAGREES_WITH_THE_CACHE:
            common &= ~(yield from self._forget(stale))
        if status & _ALL_HAVE_JOINED:  # what all would stand in for, nobody need have asked for
            common &= yield from self._asked_by_any(hits_of_own)
        cached = self.cache.select(common)
        answer: dict[str, Any] = {}
        asks = not status & _NOBODY_ASKS_WHO_IS_MISSING or bool(~status & _NOBODY_CLOSES and ~status & _ALL_CLOSE)
        if asks or not status & _NOBODY_HAS_NEW:
            common_names = {request.name for request in cached}
            answer = yield from self._consult(situation, new, asks, common_names)
        fresh = unpacked(answer.get("ready", []))
        self.cache.use(common)
        for request in fresh:
            own = situation.pending.get(request.name)
            self.cache.put(own if own is not None and own == request else request)  # equal ones are found by identity
        self._told -= {request.name for request in fresh} | answer.get("refused", {}).keys()
        outcome.refused = answer.get("refused", {})
        outcome.missing = answer.get("missing", {})
        outcome.failure = answer.get("failure")
        outcome.all_joined = bool(status & _ALL_HAVE_JOINED)
        outcome.closed = bool(status & _ALL_CLOSE)
        for request in (*cached, *fresh):
            if request.operation == "any":
                outcome.answers[request.name] = yield from self._ask_all(request, situation.flags.get(request.name, 0))
            else:
                outcome.ready.append(request)

    def _look_up(self, situation: Situation) -> tuple[list[Request], int, int]:
        """What is to be told to the first rank; bits of what is cached; and of what is cached otherwise."""
        new, hits, stale = [], 0, 0
        find = self.cache.find
        for name, request in situation.pending.items():
            entry = find(name)
            if entry is None:
                if name not in self._told:
                    new.append(request)
            elif entry.request is request or entry.request == request:
                hits |= entry.mask
            else:
                stale |= entry.mask
        return new, hits, stale

    def _stood_in_for(self) -> int:
        """Bits of what a rank that has joined gives zeros for."""
        return sum(1 << bit for bit in self.cache.bits() if takes_part_without_data(self.cache.at(bit)))

    def _asked_by_any(self, hits: int) -> Generator[Round, None, int]:
        vector = to_vector(0, hits, self.cache.num_bits)
        yield from or_of_all(vector, self._rank, self._world_size)
        return from_vector(vector)[1]

    def _forget(self, stale: int) -> Generator[Round, None, int]:
        """Drop what any rank disagrees with, in ascending order of numbers."""
        vector = to_vector(0, stale, self.cache.num_bits)
        yield from or_of_all(vector, self._rank, self._world_size)
        _, dropped = from_vector(vector)
        for bit in indices(dropped):
            self.cache.drop(bit)
        return dropped

    def _ask_all(self, request: Request, flags: int) -> Generator[Round, None, int]:
        (spec,) = request.tensors
        vector = to_vector(0, flags, spec.shape[0])
        yield from or_of_all(vector, self._rank, self._world_size)
        return from_vector(vector)[1]

    # -- the first rank, and those that ask it -------------------------------------------------------------------------

    def _consult(
        self, situation: Situation, new: Sequence[Request], asks: bool, common: Collection[str]
    ) -> Generator[Round, None, dict[str, Any]]:
        self._told |= {request.name for request in new}
        self._told_of_joining = situation.joined
        question = {
            "new": packed(new),
            "waiting": [
                [name, takes_part_without_data(request)]
                for name, request in situation.pending.items()
                if asks and name not in common
            ],
            "overdue": list(situation.overdue),
            "expired": list(situation.expired),
            "joined": situation.joined,
            "closing": situation.closing,
        }
        questions = yield from gather(encode(question), self._rank, self._world_size, self._fan_out)
        answer = encode(self._answer([decode(each) for each in questions], asks)) if self._rank == 0 else b""
        answer = yield from broadcast(answer, self._rank, self._world_size)
        return dict(decode(answer))

    def _answer(self, questions: Sequence[Mapping[str, Any]], asks: bool) -> dict[str, Any]:
        for rank, question in enumerate(questions):
            for request in unpacked(question["new"]):
                self._table.add(rank, request)
        joined = [rank for rank, question in enumerate(questions) if question["joined"]]
        ready, refused = self._table.take_ready(joined)
        answer: dict[str, Any] = {"ready": packed(ready), "refused": refused}
        if asks:
            done = refused.keys() | {request.name for request in ready}
            answer |= self._say_who_is_missing(questions, done)
        return answer

    def _say_who_is_missing(self, questions: Sequence[Mapping[str, Any]], done: Collection[str]) -> dict[str, Any]:
        having: dict[str, set[int]] = {}
        joined = {rank for rank, question in enumerate(questions) if question["joined"]}
        for rank, question in enumerate(questions):
            for name, zeros_do in question["waiting"]:
                if name not in done:
                    having.setdefault(name, set(joined if zeros_do else ())).add(rank)
        everyone = set(range(self._world_size))
        missing = {name: sorted(everyone - ranks) for name, ranks in having.items()}
        overdue = {name for question in questions for name in question["overdue"] if name in missing}
        expired = [name for question in questions for name in question["expired"] if name in missing]
        closing = {rank for rank, question in enumerate(questions) if question["closing"]}
        failure = self._failure_of(missing, having, expired, closing)
        named = {name: [self._ranks[rank] for rank in missing[name]] for name in missing if name in overdue}
        return {"missing": named, "failure": failure}

    def _failure_of(
        self,
        missing: Mapping[str, Collection[int]],
        having: Mapping[str, Collection[int]],
        expired: Collection[str],
        closing: Collection[int],
    ) -> str | None:
        """Why everything ends: a rank that is missing closes, or has been waited for too long."""
        for name, ranks in missing.items():
            gone = [self._ranks[rank] for rank in ranks if rank in closing]
            if gone:
                return f"{name} waits for ranks {gone}, which have closed their coordinator{see('a-rank-is-missing')}"
            if name in expired:
                sides = self._sides(having[name], ranks)
                return f"{name} was waited for too long: {sides}{see('a-rank-is-missing')}"
        return None

    def _sides(self, having: Collection[int], missing: Collection[int]) -> str:
        has, lacks = (sorted(self._ranks[rank] for rank in ranks) for ranks in (having, missing))
        return f"ranks {has} have asked for it, ranks {lacks} have not"


def _status(situation: Situation, has_news: bool, disagrees: bool) -> int:
    bits = {
        _NOBODY_HAS_NEW: not has_news,
        _NOBODY_DISAGREES_WITH_THE_CACHE: not disagrees,
        _NOBODY_ASKS_WHO_IS_MISSING: not (situation.overdue or situation.expired),
        _NOBODY_CLOSES: not situation.closing,
        _ALL_CLOSE: situation.closing and not situation.pending,
        _ALL_HAVE_JOINED: situation.joined,
        _NOBODY_STARVES: not situation.is_starving,
    }
    return sum(bit for bit, is_set in bits.items() if is_set)
