"""Who failed first: a note in the rendezvous store that the first witness writes and everybody else reads.

When a worker dies, its neighbours' connections break, they raise and leave, and so break *their* neighbours'
connections: later witnesses would blame the wrong rank. So a witness writes what it saw before it lets go of
anything, and a rank that finds such a note reports the note instead of its own broken connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from ddp_hooks.comm import compat
from ddp_hooks.comm.advice import see

logger = logging.getLogger("ddp_hooks")


class LaneError(RuntimeError):
    """Communication failed; the message names this rank, what was under way, and the rank that failed first."""


class LaneTimeout(LaneError):
    """Communication did not complete in time; the message names what was waited for and who reports no wait."""


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether torch or gloo raised ``error`` because another process went away."""
    if not isinstance(error, RuntimeError) or isinstance(error, LaneError):
        return False
    signs = ("gloo/transport", "connection closed by peer", "connection reset by peer", "broken pipe")
    return isinstance(error, compat.NETWORK_ERRORS) or any(sign in str(error).lower() for sign in signs)


class Witness:
    """Writes and reads the first failure, and who waits for what, in the store under ``prefix``; ranks are global."""

    def __init__(self, store: Any, prefix: str, rank: int, ranks: Sequence[int]) -> None:
        self._store = store
        self._prefix = f"ddp_hooks/{prefix}"
        self._rank = rank
        self._ranks = ranks
        self._reported = False

    @property
    def prefix(self) -> str:
        """Of keys in the store, of this group alone."""
        return self._prefix

    def blame(self, suspect: int) -> str:
        """Report that the connection to ``suspect`` broke; returns a sentence on who failed first, as far as known."""
        mine = f"{self._rank}:{suspect}"
        try:
            first = self._store.compare_set(f"{self._prefix}/failure", "", mine).decode()
        except Exception as error:  # whatever a dead store raises; its being dead is the news
            return (
                f"the connection to rank {suspect} broke, and the rendezvous store does not answer either "
                f"({type(error).__name__}), so the process that holds the store (rank 0, or torchrun's agent) "
                f"probably died first"
            )
        return f"rank {suspect} died or closed its connection" if first == mine else _sentence(first)

    def failure_of(self, error: Exception, peer: int, description: str) -> LaneError:
        """What the backend's, or a socket's, ``error`` about a message to or from ``peer`` means, ready to be raised.

        Args:
            error: that was raised.
            peer: a global rank.
            description: where this rank is.
        """
        text = str(error).splitlines()[0]
        if "timed out" in text.lower() or "timeout" in text.lower():
            hint = self.report_wait(description)
            return LaneTimeout(
                f"{description} timed out waiting for rank {peer}. {hint} ({text}){see('a-wait-timed-out')}"
            )
        culprit = self.blame(peer)
        return LaneError(f"{description} failed ({text}): {culprit}{see('a-rank-died', quoted=culprit)}")

    def confess(self, reason: str) -> None:
        """Report that this rank ends by itself because of ``reason``."""
        try:
            self._store.compare_set(f"{self._prefix}/failure", "", f"{self._rank}:{self._rank}:{reason}")
        except Exception as error:  # whatever a dead store raises; this rank ends anyway
            logger.debug("could not report the end of rank %d: %s", self._rank, error)

    def first_failure(self) -> str | None:
        """What another rank has reported, or None; for ranks whose own connections still stand."""
        try:
            if self._store.check([f"{self._prefix}/failure"]):
                return _sentence(self._store.get(f"{self._prefix}/failure").decode())
        except Exception as error:  # see blame()
            return f"the rendezvous store does not answer ({type(error).__name__}): the process that holds it died"
        return None

    def report_wait(self, description: str) -> str:
        """Note what this rank waits for; returns a sentence that names the ranks which report no wait."""
        try:
            self._store.set(f"{self._prefix}/waiting/{self._rank}", description)
            others = [rank for rank in self._ranks if rank != self._rank]
            silent = [r for r in others if not self._store.check([f"{self._prefix}/waiting/{r}"])]
        except Exception as error:  # a warning must not turn into a failure of its own
            return f"the rendezvous store does not answer ({type(error).__name__})"
        self._reported = True
        if not silent:
            return "all other ranks report a wait of their own: compare their messages"
        return f"ranks that report no wait so far, and may be the cause: {silent}"

    def end_wait(self) -> None:
        """The wait that was reported is over."""
        if self._reported:
            self._reported = False
            try:
                self._store.delete_key(f"{self._prefix}/waiting/{self._rank}")
            except Exception as error:  # the wait has succeeded; only its note stays
                logger.debug("could not take back the report of a wait: %s", error)

    def wait_for_farewells(self, deadline_s: float) -> None:
        """Return when every rank has come here, or one has failed, or the store is gone.

        Args:
            deadline_s: when to return in any case, in ``time.monotonic()``'s seconds.
        """
        try:
            present = self._store.add(f"{self._prefix}/farewells", 1)
            while present < len(self._ranks) and time.monotonic() < deadline_s and self.first_failure() is None:
                time.sleep(0.02)
                present = self._store.add(f"{self._prefix}/farewells", 0)
        except Exception as error:  # whoever held the store has left already
            logger.debug("left without a farewell: %s", error)


def _sentence(note: str) -> str:
    witness, culprit, *reason = note.split(":", 2)
    if reason:
        return f"rank {culprit} ended first, with {reason[0]}"
    return f"rank {culprit} died or closed its connection first (seen by rank {witness})"
