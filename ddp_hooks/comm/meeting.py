"""Meetings: every rank of a group makes one call, and each gets the items of all.

Ranks meet in the rendezvous store. So a meeting needs no lane, no device and no group but the caller's, and a rank
knows which ranks are present, and in which calls the others are. A meeting ends with one verdict, the first that a rank
writes: all are present, one died, or the time is over. Every rank obeys it, also a late one.

Meetings are for set-up, checkpoints and changes of settings. A normal step has none: small sums go through
:meth:`ddp_hooks.comm.Lanes.reduce_small`.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_hooks.comm.failure import (
    LaneError,
    LaneTimeout,
    describe_waits,
    died,
    end_of,
    end_wait,
    ended_first,
    expect_readers,
    failure_seen_by_lanes,
    is_lost_connection,
    lost_ranks,
    no_answer,
    note_wait,
    refuse_different_calls,
    shortened,
    tell_lanes,
    waits_of,
)
from ddp_hooks.comm.torch_compat.distributed import default_store
from ddp_hooks.comm.validation import see

logger = logging.getLogger("ddp_hooks")

_MET, _LOST, _TIMEOUT = "met", "lost ", "timeout "
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1  # between two looks into the store
_LOOK_S = 0.25  # how often connections and the verdict are looked at
_INLINE_BYTES = 32 << 10  # larger items do not go through the store, which one process serves

_numbers: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
"""How many meetings each group had, by its name, for each default group: a new one has a new store."""
_numbering = threading.Lock()
_call: ContextVar[str | None] = ContextVar("call", default=None)


class Patience(NamedTuple):
    """Time that a rank waits for others, in seconds."""

    timeout_s: float = 600.0
    stall_warning_s: float = 60.0

    @classmethod
    def of(cls, settings: object) -> Patience:
        """Return the limits that ``settings`` has as attributes, and defaults for the others."""
        found = (getattr(settings, name, None) for name in cls._fields)
        return cls(*(v if isinstance(v, int | float) and v > 0 else d for v, d in zip(found, cls(), strict=True)))


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Name the call ``what`` in messages about waits, inside of this context or the decorated function.

    The outermost of nested contexts counts. ``what`` is the same on every rank.
    """
    token = _call.set(_call.get() or what)
    try:
        yield
    finally:
        _call.reset(token)


def call_named(what: str) -> str:
    """Return the name of the call for messages: given to :func:`calling`, or ``what``."""
    return _call.get() or what


def gather_objects(item: Any, group: dist.ProcessGroup, what: str, patience: object) -> list[Any]:
    """Return every rank's ``item``, in the order of the group's ranks; collective over ``group``.

    Args:
        item: anything that can be pickled; tensors are on the CPU.
        what: the call as users know it, the same on every rank, such as ``"consolidate()"``; see :func:`calling`.
        patience: settings with ``timeout_s`` and ``stall_warning_s``; where these are none, those of :class:`Patience`.

    Raises:
        LaneTimeout: on every rank that waits: some rank has not called this within ``timeout_s``.
        LaneError: on every rank: a rank died, or ranks have called different things.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        return [item]
    data = pickle.dumps(item)
    head = _Head(call_named(what), what, None, data if len(data) <= _INLINE_BYTES else None)
    heads = _Meeting(group, ranks, head, Patience.of(patience)).hold()
    for rank, each in zip(ranks, heads, strict=True):
        if each.error is not None:
            reported = ended_first(rank, each.error)
            raise ReportedError(f"{head.call} cannot end: {reported}{see('a-rank-died', quoted=reported)}")
    refuse_different_calls(ranks, [(each.call, f": {each.what}") for each in heads])
    items = [each.data for each in heads]
    if None not in items:
        return [pickle.loads(each) for each in items if each is not None]
    gathered: list[Any] = [None] * len(ranks)
    try:
        dist.all_gather_object(gathered, item, group=group)  # all are here
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        lost = lost_ranks(group, ranks)
        raise LaneError(f"{head.call} failed: {died(lost) if lost else error}{see('a-rank-died')}") from error
    return gathered


def report_error(error: BaseException, group: dist.ProcessGroup, patience: object) -> None:
    """Make all other ranks of ``group`` raise in their next meeting, to which this rank will not come.

    For an error on this rank alone, which the caller raises afterwards. Waits for the others, as ``patience`` says.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or isinstance(error, ReportedError):
        return
    text = shortened(f"{type(error).__name__}: {error}")
    try:
        _Meeting(group, ranks, _Head("an error", "an error", text, None), Patience.of(patience)).hold()
    except LaneError as failure:  # the error that is reported is more to the point
        logger.debug("others were not told of an error: %s", failure)


def broadcast_object(item: Any, group: dist.ProcessGroup, what: str, patience: object) -> Any:
    """Return the item of the group's first rank, on every rank; collective, see :func:`gather_objects`."""
    return gather_objects(item if dist.get_rank(group) == 0 else None, group, what, patience)[0]


class ReportedError(LaneError):
    """Another rank has come to a meeting to report an error; the message names both."""


class _Head(NamedTuple):
    call: str  # as users know it
    what: str  # in that call
    error: str | None  # that ends this rank's part
    data: bytes | None  # None: too much for the store


class _Meeting:
    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], head: _Head, patience: Patience) -> None:
        self._group, self._ranks, self._head, self._patience = group, ranks, head, patience
        self._rank = ranks[dist.get_rank(group)]
        self._store = default_store()
        with _numbering:
            numbers = _numbers.setdefault(dist.group.WORLD, Counter())
            number = numbers[group.group_name]
            numbers[group.group_name] += 1
        self._prefix = f"ddp_hooks/meeting/{group.group_name}/{number}"
        self._keys = [f"{self._prefix}/{rank}" for rank in ranks]
        self._verdict, self._done = f"{self._prefix}/verdict", f"{self._prefix}/done"

    def hold(self) -> list[_Head]:
        try:
            end_wait(self._store, self._rank)
            self._store.set(f"{self._prefix}/{self._rank}", pickle.dumps(self._head))
            verdict = self._await_verdict()
            found = self._read_all() if verdict == _MET else []
            self._leave(verdict)
        except LaneError:
            raise
        except Exception as error:  # whatever a dead store raises
            lost = lost_ranks(self._group, self._ranks, patience_s=1.0)
            who = died(lost) if lost else "the process that holds it (rank 0, or torchrun's agent) probably died"
            raise LaneError(
                f"{self._head.call} cannot end: {no_answer(error)}, and {who}{see('a-rank-died')}"
            ) from error
        if verdict == _MET:
            end_wait(self._store, self._rank)
            return [pickle.loads(each) for each in found]
        if verdict.startswith(_TIMEOUT):
            raise LaneTimeout(f"{verdict.removeprefix(_TIMEOUT)}{see('a-wait-timed-out')}")
        failure = verdict.removeprefix(_LOST)
        raise LaneError(f"{self._head.call} cannot end: {failure}{see('a-rank-died', quoted=failure)}")

    def _await_verdict(self) -> str:
        start_s = time.monotonic()
        timeout_s, warn_s = self._patience.timeout_s, min(self._patience)
        look_s, pause_s, warned = start_s + _LOOK_S / 2, _FIRST_PAUSE_S, False
        while not self._store.check(self._keys):
            now_s = time.monotonic()
            if now_s >= look_s:
                look_s = now_s + _LOOK_S
                if self._store.check([self._verdict]):
                    break
                failure = self._failure()
                if failure is not None and not self._store.check(self._keys):
                    return self._decide(f"{_LOST}{failure}")
            if now_s - start_s >= warn_s and not warned:
                warned = True
                note_wait(self._store, self._rank, self._head.call)
                logger.warning("waited %.0f s: %s", now_s - start_s, self._describe())
            if now_s - start_s >= timeout_s:
                return self._decide(f"{_TIMEOUT}waited {now_s - start_s:.0f} s: {self._describe()}")
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
        return self._decide(_MET)

    def _decide(self, verdict: str) -> str:
        found: str = self._store.compare_set(self._verdict, "", verdict).decode()
        return found

    def _read_all(self) -> list[bytes]:
        if self._store.has_extended_api():
            return list(self._store.multi_get(self._keys))  # one request
        return [self._store.get(key) for key in self._keys]

    def _failure(self) -> str | None:
        """Return a sentence on the rank that was lost first; None if all live."""
        lost = [rank for rank in lost_ranks(self._group, self._ranks) if rank in self._missing()]
        if lost:
            end = end_of(self._store, lost[0])
            tell_lanes(lost[0])
            return end or died(lost)
        return failure_seen_by_lanes(self._ranks)

    def _missing(self) -> list[int]:
        return [rank for rank, key in zip(self._ranks, self._keys, strict=True) if not self._store.check([key])]

    def _describe(self) -> str:
        """Return a sentence on the call that each rank is in."""
        missing = self._missing()
        present = [rank for rank in self._ranks if rank not in missing]
        calls = {rank: pickle.loads(self._store.get(f"{self._prefix}/{rank}")).call for rank in present}
        noted = waits_of(self._store, missing)
        return describe_waits(calls | noted, [rank for rank in missing if rank not in noted])

    def _leave(self, verdict: str) -> None:
        """Delete the keys as the last rank that leaves; after a failure wait for all to read."""
        left = self._store.add(self._done, 1)
        if left == len(self._ranks):
            for key in (*self._keys, self._verdict, self._done):
                self._store.delete_key(key)
        elif verdict != _MET:
            expected = len(self._ranks) - (1 if verdict.startswith(_LOST) else len(self._missing()))
            expect_readers(self._store, self._done, expected)
