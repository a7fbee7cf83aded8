"""When a rank begins to negotiate: a pure function of facts and the time.

Prevents: cycles that come too late for a thread that waits, or so often that they are all that happens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ddp_hooks.coordination.control.cycle_policy import CycleFacts, CyclePolicy

MS = 1e-3
POLICY = CyclePolicy(cycle_s=1 * MS)
NOTHING = CycleFacts(last_cycle_s=50.0)
ONE = replace(NOTHING, first_request_s=100.0, last_request_s=100.0, pending_bytes=math.inf)
BLOCKED = replace(ONE, is_blocked=True)


def test_without_requests_nothing_begins() -> None:
    assert POLICY.delay_s(NOTHING, 100.0) == math.inf
    assert POLICY.delay_s(replace(NOTHING, is_blocked=True), 100.0) == math.inf, "as of a rank that has joined"
    assert POLICY.delay_s(NOTHING, 100.0, peer_has_begun=True) == 0


@pytest.mark.parametrize("facts", [ONE, BLOCKED], ids=["nobody waits", "blocked"])
def test_requests_are_debounced_but_not_for_ever(facts: CycleFacts) -> None:
    assert POLICY.delay_s(facts, 100.0) == pytest.approx(0.25 * MS), "a quarter of a pause after the last request"
    assert POLICY.delay_s(facts, 100.0 + 0.3 * MS) == 0
    later = replace(facts, last_request_s=100.0 + 0.9 * MS)
    assert POLICY.delay_s(later, 100.0 + 0.9 * MS) == pytest.approx(0.1 * MS), "a pause after the first request"


@pytest.mark.parametrize(("took_ms", "pause_ms", "rest_ms"), [(0.1, 1, 1), (3, 3, 6), (500, 5, 20)])
def test_cycles_rest_while_no_thread_waits(took_ms: float, pause_ms: float, rest_ms: float) -> None:
    asked = replace(ONE, last_cycle_s=100.0, cycle_length_s=took_ms * MS)
    assert POLICY.delay_s(asked, 100.0) == pytest.approx(rest_ms * MS)
    assert POLICY.delay_s(replace(asked, is_blocked=True), 100.0) == pytest.approx(pause_ms * MS)
    assert POLICY.delay_s(replace(asked, others_wait=True), 100.0) == pytest.approx(pause_ms * MS)


@pytest.mark.parametrize("took_ms", [0.1, 3, 500])
def test_joining_a_cycle_does_not_wait_for_a_pause(took_ms: float) -> None:
    asked = replace(ONE, last_cycle_s=100.0, cycle_length_s=took_ms * MS)
    for policy in (POLICY, CyclePolicy(cycle_s=1.0)):
        delay_s = policy.delay_s(asked, 100.0, peer_has_begun=True)
        assert 0 < delay_s <= 0.25 * min(5, max(1, took_ms)) * MS, "another rank waits for this one's part"
        assert policy.delay_s(replace(asked, is_blocked=True), 100.0, peer_has_begun=True) == 0


def test_few_bytes_wait_while_no_thread_does() -> None:
    policy = CyclePolicy(cycle_s=1 * MS, min_bytes=1000)
    few = replace(ONE, pending_bytes=800)
    assert policy.delay_s(few, 100.0) == pytest.approx(250 * MS), "not for ever"
    for facts in (
        replace(few, pending_bytes=1000),
        replace(few, pending_bytes=math.inf),
        replace(few, is_blocked=True),
        replace(few, others_wait=True),
    ):
        assert policy.delay_s(facts, 100.0) == pytest.approx(0.25 * MS), facts
    assert policy.delay_s(few, 100.0, peer_has_begun=True) == pytest.approx(0.25 * MS)


def test_a_long_wait_is_announced() -> None:
    waiting = replace(NOTHING, is_blocked=True, blocked_since_s=100.0)
    assert POLICY.delay_s(waiting, 100.0) == pytest.approx(20 * MS)
    assert POLICY.delay_s(waiting, 100.021) == 0
    assert POLICY.delay_s(replace(BLOCKED, blocked_since_s=100.0), 100.0) == pytest.approx(0.25 * MS), "new ones first"
