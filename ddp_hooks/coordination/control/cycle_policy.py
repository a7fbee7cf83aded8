"""When a rank begins a negotiation cycle: a pure function of a few facts and the time.

1. *Debounce*: a cycle begins ``pause / 4`` after the last new request, and at most ``pause`` after the first one.
2. While a thread is blocked, cycles are at least ``pause`` apart.
3. While no thread is blocked on any rank, cycles are at least ``max(cycle_ms, 2 * length)`` apart, where the length of
   the latest cycle counts up to 10 ms; and few bytes wait up to 250 ms for more.
4. A rank that hears another rank begin joins after at most 1 ms, and at once if it has nothing new or a blocked thread.
5. A thread that is blocked for 20 ms is announced to the other ranks, which then follow rule 2 as well.

``pause`` is ``cycle_ms``, or the length of the latest cycle (5 ms at most) if that is longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

WAITING_TOO_LONG_S = 0.02
PATIENCE_S = 0.25
_QUIET = 0.25  # of a pause
_REST = 2.0  # of the latest cycle: negotiation takes a third of the time at most
_LONGEST_REST_S = 0.02
_JOIN_S = 0.001  # longest pause while another rank waits for this one
_LONGEST_PAUSE_S = 0.005  # unless ``cycle_ms`` is longer


@dataclass
class CycleFacts:
    """Facts of one rank; times are those of ``time.perf_counter()``."""

    first_request_s: float = math.inf  # first and last request that no cycle has announced; infinite: there is none
    last_request_s: float = math.inf
    pending_bytes: float = 0  # of these requests; infinite if unknown
    is_blocked: bool = False  # a thread of this rank waits for a decision, or the next cycle is urgent
    blocked_since_s: float = math.inf  # start of a wait that rule 5 is to announce; infinite: there is none
    others_wait: bool = False  # some rank announced a blocked thread in the latest cycle
    last_cycle_s: float = 0.0  # end of the latest cycle
    cycle_length_s: float = 0.0  # of the latest cycle


@dataclass(frozen=True)
class CyclePolicy:
    cycle_s: float  # CoordinatorConfig.cycle_ms
    min_bytes: float = 0  # size from which new requests are worth a cycle although no thread is blocked

    def delay_s(self, facts: CycleFacts, now_s: float, peer_has_begun: bool = False) -> float:
        """Return the seconds until the next cycle of this rank: 0 if it is due, infinity without a reason for one."""
        start_s = self._joining_s(facts) if peer_has_begun else self._start_s(facts)
        return max(0.0, start_s - now_s)

    def _start_s(self, facts: CycleFacts) -> float:
        if facts.first_request_s == math.inf:
            return facts.blocked_since_s + WAITING_TOO_LONG_S
        pause_s = max(self.cycle_s, _slow_s(facts))
        start_s = _debounced_s(facts, pause_s)
        if facts.is_blocked or facts.others_wait:
            return max(start_s, facts.last_cycle_s + pause_s)
        if facts.pending_bytes < self.min_bytes:
            start_s = max(start_s, facts.first_request_s + PATIENCE_S)
        rest_s = max(self.cycle_s, min(_LONGEST_REST_S, _REST * facts.cycle_length_s))
        return max(start_s, facts.last_cycle_s + rest_s)

    def _joining_s(self, facts: CycleFacts) -> float:
        if facts.first_request_s == math.inf or facts.is_blocked:
            return 0.0
        return _debounced_s(facts, max(_slow_s(facts), min(self.cycle_s, _JOIN_S)))


def _slow_s(facts: CycleFacts) -> float:
    return min(_LONGEST_PAUSE_S, facts.cycle_length_s)


def _debounced_s(facts: CycleFacts, pause_s: float) -> float:
    return min(facts.last_request_s + _QUIET * pause_s, facts.first_request_s + pause_s)
