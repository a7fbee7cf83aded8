"""Failures: the first rank that notices one reports it in the rendezvous store, and all others read it there.

When a rank dies, the connections of its neighbours break. They raise and leave, and so break *their* neighbours'
connections: those would report the wrong rank. So a rank reports what it saw before it closes anything, and a rank that
finds a report raises that in place of its own broken connection.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm.torch_compat.distributed import NOTICE_TAG, connection_is_broken, default_store, serves
from ddp_hooks.comm.validation import see

logger = logging.getLogger("ddp_hooks")

_SHOWN = 8  # ranks that a message names
_NOTICE_BYTES = 768
_NOTICES_S = 1.0  # seconds that a rank waits for notices when the store is gone
_OWN_TIMEOUT_S = 5.0  # seconds that a rank reported by others waits for a timeout of its own lane
_LINGER_S = 5.0  # seconds that the process that serves the store stays for others to read of a failure
_stores: weakref.WeakSet[FailureStore] = weakref.WeakSet()
_noted: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # default groups with a note of this rank
_expected: dict[str, tuple[Any, int]] = {}  # key of a count of readers -> its store, and how many there are to be


class LaneError(RuntimeError):
    """Communication failed; the message names this rank, what was under way, and the rank that failed first."""


class LaneTimeout(LaneError):
    """Communication did not complete in time; the message names the wait, and the ranks that report none."""


def is_lost_connection(error: BaseException | None) -> bool:
    """Return True if torch or gloo raised ``error`` because another process went away."""
    if not isinstance(error, RuntimeError) or isinstance(error, LaneError):
        return False
    signs = ("gloo/transport", "connection closed by peer", "connection reset by peer", "broken pipe")
    network_errors = (dist.DistNetworkError, dist.DistBackendError)
    return isinstance(error, network_errors) or any(sign in str(error).lower() for sign in signs)


def describe_waits(calls: Mapping[int, str], silent: Iterable[int], are_messages: bool = False) -> str:
    """Return a sentence on the calls that ranks wait in, by rank, and on the ranks that wait in none.

    With ``are_messages`` ranks wait for messages of lanes, which belong to many calls.

    >>> describe_waits({0: "consolidate()"}, [1])
    'rank 0 waits in consolidate(); rank 1 has not called it: is it under `if rank == 0`?'
    >>> describe_waits({0: "consolidate()", 1: "clip_grad_norm_()", 2: "consolidate()"}, [])
    'ranks 0, 2 wait in consolidate(); rank 1 waits in clip_grad_norm_()'
    """
    ranks_by_call: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        ranks_by_call.setdefault(call, []).append(rank)
    parts = [
        f"{_named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {call}" for call, ranks in ranks_by_call.items()
    ]
    missing = sorted(silent)
    if missing and are_messages:
        reports = "reports" if len(missing) == 1 else "report"
        parts.append(f"{_named(missing)} {reports} no wait so far, and may be the cause")
    elif missing:
        it = "it" if len(parts) == 1 else "any of these"
        has = "has" if len(missing) == 1 else "have"
        parts.append(f"{_named(missing)} {has} not called {it}: is it under `if rank == 0`?")
    return "; ".join(parts)


def refuse_different_calls(ranks: Sequence[int], calls: Sequence[tuple[str, str]]) -> None:
    """Raise :class:`LaneError` unless the ``calls`` of ``ranks`` are equal: names, and details, for the same names."""
    named = [name for name, _ in calls]
    if len(set(named)) == 1:
        named = [name + detail for name, detail in calls]
    if len(set(named)) > 1:
        found = describe_waits(dict(zip(ranks, named, strict=True)), ())
        raise LaneError(f"ranks have called different things: {found}{see('ranks-differ')}")


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")


# Only ranks that have waited long note the call that they wait in; one note for all groups. The note of a failed wait
# stays, for ranks that still wait.


def note_wait(store: Any, rank: int, call: str) -> None:
    _noted[dist.group.WORLD] = True
    store.set(_wait_key(rank), call)


def end_wait(store: Any, rank: int) -> None:
    """Delete this rank's note, if it has written one."""
    if _noted.pop(dist.group.WORLD, False):
        store.delete_key(_wait_key(rank))


def waits_of(store: Any, ranks: Iterable[int]) -> dict[int, str]:
    """Return the calls that these ranks have noted."""
    noted = [rank for rank in ranks if store.check([_wait_key(rank)])]
    return {rank: store.get(_wait_key(rank)).decode() for rank in noted}


def _wait_key(rank: int) -> str:
    return f"ddp_hooks/waiting/{rank}"


class FailureStore:
    """Reports and reads the first failure in the store under ``prefix``, and the waits of ranks; ranks are global.

    A note of a failure is ``reporter:culprit``, or ``rank:rank:reason`` from a rank that ends. It also travels on the
    connections of ``group``, unless None, whether anybody waits or not: every rank posts a receive from each other rank
    at the beginning, and looks at the memory when it has a reason to. So a late rank reads the note of a rank that has
    ended since, perhaps with the store.
    """

    def __init__(
        self, store: Any, prefix: str, rank: int, ranks: Sequence[int], group: dist.ProcessGroup | None = None
    ) -> None:
        self.prefix = f"ddp_hooks/{prefix}"  # of keys in the store, of this group alone
        self.ranks = ranks  # of the group
        self.knows = False  # of a failure
        self._store = store
        self._rank = rank
        self._group = group  # None where gloo does not carry it
        self._boxes: dict[int, Tensor] = {}  # for the note of each other rank
        self._handles: list[Any] = []
        for peer in range(len(ranks)):
            if group is not None and ranks[peer] != rank:
                box = self._boxes[peer] = torch.zeros(_NOTICE_BYTES, dtype=torch.uint8)
                self._handles.append(group.recv([box], peer, NOTICE_TAG))
        self._blamed_until_s: float | None = None  # another rank lost the connection to this one; see _own_timeout()
        self._gave_up: LaneTimeout | None = None  # the first message of this rank that timed out
        _stores.add(self)

    def report_peer(self, suspect: int) -> str:
        """Report that the connection to ``suspect`` broke; return a sentence on the rank that failed first."""
        mine = f"{self._rank}:{suspect}"
        note, dead_store = self._report(mine)
        if dead_store is not None:
            return f"{_plainly(note, note == mine)}; {no_answer(dead_store)}"
        return self._sentence(note, note == mine)

    def report_self(self, reason: str) -> None:
        self._report(f"{self._rank}:{self._rank}:{reason}")

    def _report(self, mine: str) -> tuple[str, Exception | None]:
        """Report a failure, and pass the first one on; return its note, and the error of a store that is dead."""
        note = self._notice() or mine
        dead_store = None
        try:
            note = self._store.compare_set(f"{self.prefix}/failure", "", note).decode()
        except Exception as error:  # whatever a dead store raises; its being dead is the news
            dead_store = error
        self._tell(note)
        return note, dead_store

    def failure_of(self, error: Exception, peer: int, description: str) -> LaneError:
        """Report a broken connection; return the error to raise for ``error`` of the backend or a socket.

        ``description`` begins with this rank, "rank 3, ".
        """
        text = str(error).splitlines()[0]
        if "timed out" in text.lower() or "timeout" in text.lower():
            hint = self.report_wait(description)
            timeout = LaneTimeout(
                f"{description} timed out waiting for rank {peer}. {hint} ({text}){see('a-wait-timed-out')}"
            )
            self._gave_up = self._gave_up or timeout
            return timeout
        culprit = self.report_peer(peer)
        return self._own_timeout() or LaneError(
            f"{description} failed ({text}): {culprit}{see('a-rank-died', quoted=culprit)}"
        )

    def failure_during(self, description: str) -> LaneError | None:
        """Return the error that ends a wait in ``description``, if a rank has failed or this one has timed out.

        For ranks whose own connections still stand. A message that times out closes its connection, so others may
        report this rank before its lane has raised its timeout: this waits a few seconds for the lane.
        """
        failure = self.first_failure()
        if failure is None:
            return None
        return self._own_timeout() or LaneError(f"{description}: {failure}{see('a-rank-died', quoted=failure)}")

    def _own_timeout(self) -> LaneTimeout | None:
        """Return the timeout of this rank that others took for its end; None if there was none."""
        if self._blamed_until_s is None:
            return None
        while self._gave_up is None and time.monotonic() < self._blamed_until_s:
            time.sleep(0.02)
        return copy.copy(self._gave_up)  # each thread raises one of its own

    def first_failure(self) -> str | None:
        """Return a sentence on the failure that another rank has reported, or None."""
        note = self._notice()
        try:
            if self._store.check([f"{self.prefix}/failure"]):
                note = self._store.get(f"{self.prefix}/failure").decode()
        except Exception as error:  # whatever a dead store raises
            return self._without_store(error)
        if note is None:
            return None
        self._tell(note)
        return self._sentence(note)

    def check_peers(self) -> str | None:
        """Return :meth:`first_failure`, or report a broken connection of this rank; for waits without messages."""
        failure = self.first_failure()
        lost = self._lost() if failure is None else []
        return self.report_peer(lost[0]) if lost else failure

    def _without_store(self, error: Exception) -> str:
        """Return a sentence on the first failure where the store is gone, from notices or broken connections."""
        deadline_s = time.monotonic() + _NOTICES_S
        while True:
            note, lost = self._notice(), self._lost()
            if note is None and lost:
                note = f"{self._rank}:{lost[0]}"
            if note is not None:
                self._tell(note)
                return f"{_plainly(note)}; {no_answer(error)}"
            if time.monotonic() >= deadline_s:
                return f"{no_answer(error)}: the process that holds it (rank 0, or torchrun's agent) died"
            time.sleep(0.05)

    def report_wait(self, description: str) -> str:
        """Note that this rank waits in ``description``; return a sentence on the calls that all ranks wait in."""
        call = description.removeprefix(f"rank {self._rank}, ")
        try:
            note_wait(self._store, self._rank, call)
            others = [rank for rank in self.ranks if rank != self._rank]
            calls = {self._rank: call} | waits_of(self._store, others)
        except Exception as error:  # a warning must not turn into a failure of its own
            return no_answer(error)
        return describe_waits(calls, [rank for rank in self.ranks if rank not in calls], are_messages=True)

    def end_wait(self) -> None:
        """Take back the note of a wait, which is over."""
        try:
            end_wait(self._store, self._rank)
        except Exception as error:  # the wait has succeeded; only its note stays
            logger.debug("could not take back the report of a wait: %s", error)

    def close(self) -> None:
        """Report and read no more failures, and let go of the group."""
        _stores.discard(self)
        self._handles, self._boxes, self._group = [], {}, None  # a receive ends before its memory goes

    def exit_barrier(self, deadline_s: float) -> bool:
        """Wait until all ranks are here, one failed, or the store or the time is gone; return True if all are here."""
        try:
            present = self._store.add(f"{self.prefix}/exit_barrier", 1)
            while present < len(self.ranks) and time.monotonic() < deadline_s and self.first_failure() is None:
                time.sleep(0.02)
                present = self._store.add(f"{self.prefix}/exit_barrier", 0)
            return present >= len(self.ranks)
        except Exception as error:  # the process that serves the store has left
            logger.debug("left without the exit barrier: %s", error)
            return False

    def _notice(self) -> str | None:
        """Return a note that has arrived, or None."""
        for box in self._boxes.values():
            if box[-1] == 1:  # it comes last
                return unpacked(box[:-1])
        return None

    def _lost(self) -> list[int]:
        return lost_ranks(self._group, self.ranks) if self._group is not None else []

    def _tell(self, note: str) -> None:
        """Pass the report on, before this rank ends and others take its end for the first failure."""
        if self.knows:
            return
        self.knows = True
        group = self._group
        if group is not None:
            notice = torch.cat([packed(note, _NOTICE_BYTES - 1), torch.ones(1, dtype=torch.uint8)])
            for peer in self._boxes:
                with contextlib.suppress(RuntimeError):  # the connection is broken
                    self._handles.append(group.send([notice], peer, NOTICE_TAG))
        try:
            self._store.add(f"{self.prefix}/readers", 1)
            expect_readers(self._store, f"{self.prefix}/readers", len(self.ranks) - 1)
        except Exception as error:  # letters are on their way
            logger.debug("could not say that a failure was noticed: %s", error)

    def _sentence(self, note: str, is_mine: bool = False) -> str:
        reporter, culprit, *reason = note.split(":", 2)
        if not reason:
            if int(culprit) == self._rank != int(reporter) and self._blamed_until_s is None:
                self._blamed_until_s = time.monotonic() + _OWN_TIMEOUT_S
            try:
                end = end_of(self._store, int(culprit))
                return end or _plainly(note, is_mine, waits_of(self._store, [int(culprit)]).get(int(culprit)))
            except Exception as error:  # a note is enough
                logger.debug("could not ask about the end of rank %s: %s", culprit, error)
        return _plainly(note, is_mine)


def _plainly(note: str, is_mine: bool = False, wait: str | None = None) -> str:
    """Return a sentence for a note of a failure; ``wait``: a call that the culprit may have given up."""
    reporter, culprit, *reason = note.split(":", 2)
    if reason:
        return ended_first(culprit, reason[0])
    lost = f"gave up its wait in {wait}, or died" if wait is not None else "died or closed its connection"
    return f"rank {culprit} {lost}" if is_mine else f"rank {culprit} {lost} first (seen by rank {reporter})"


def ended_first(rank: int | str, error: str) -> str:
    return f"rank {rank} ended first, with {error}"


def no_answer(error: Exception) -> str:
    return f"the rendezvous store does not answer ({type(error).__name__})"


def lost_ranks(group: dist.ProcessGroup, ranks: Sequence[int], patience_s: float = 0.0) -> list[int]:
    """Return the ranks whose connection to this one is broken, waiting up to ``patience_s`` for one; gloo only."""
    deadline_s, own = time.monotonic() + patience_s, dist.get_rank(group)
    while True:
        lost = [r for i, r in enumerate(ranks) if i != own and connection_is_broken(group, i)]
        if lost or time.monotonic() >= deadline_s:
            return lost
        time.sleep(0.05)


def died(ranks: Sequence[int]) -> str:
    """Return a sentence on ranks whose connections broke."""
    return f"{_named(ranks)} died or closed {'its connection' if len(ranks) == 1 else 'their connections'}"


def failure_seen_by_lanes(ranks: Iterable[int]) -> str | None:
    """Return a sentence on a failure that was reported to lanes over some of ``ranks`` and is news here, or None."""
    known = set(ranks)
    for failures in [each for each in _stores if not each.knows and known.intersection(each.ranks)]:
        failure = failures.first_failure()
        if failure is not None:
            return failure
    return None


def tell_lanes(lost: int) -> None:
    """Report to the lanes of this process that rank ``lost`` died, before this rank ends, too."""
    for failures in [each for each in _stores if lost in each.ranks]:
        failures.report_peer(lost)


def end_of(store: Any, rank: int) -> str | None:
    """Return a sentence on the error that ended rank ``rank``, if it has reported one."""
    key = f"ddp_hooks/end/{rank}"
    return ended_first(rank, store.get(key).decode()) if store.check([key]) else None


def expect_readers(store: Any, key: str, num_readers: int) -> None:
    """Keep this process, if it serves the store, alive until ``key`` counts as many ranks that read of a failure."""
    if serves(store):
        _expected[key] = store, num_readers


@atexit.register
def last_words() -> None:
    """Report the error that ends this process, and wait a little for ranks that have not read of a failure."""
    error = getattr(sys, "last_value", None)
    try:
        if error is not None and dist.is_initialized():
            end = shortened(f"{type(error).__name__}: {error}")
            default_store().set(f"ddp_hooks/end/{dist.get_rank()}", end)
        deadline_s = time.monotonic() + _LINGER_S
        while _expected and time.monotonic() < deadline_s:
            for key, (store, num_readers) in list(_expected.items()):
                if store.add(key, 0) >= num_readers:
                    del _expected[key]
            time.sleep(0.02)
    except Exception as failure:  # whatever a dead store raises
        logger.debug("left without last words: %s", failure)
    _expected.clear()


def packed(text: str, num_bytes: int) -> Tensor:
    """Return a text as bytes, cut off or padded."""
    return torch.frombuffer(bytearray(text.encode()[:num_bytes].ljust(num_bytes, b"\0")), dtype=torch.uint8)


def unpacked(data: Tensor) -> str:
    return bytes(data.numpy()).rstrip(b"\0").decode(errors="replace")


def shortened(reason: str) -> str:
    """Shorten a reason to fit a note in the store; keep its end, where our errors link to the documentation."""
    return reason if len(reason) <= 500 else f"{reason[:390]} … {reason[-100:]}"
