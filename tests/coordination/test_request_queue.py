"""Requests of one rank: when it negotiates, what it waits for, and what is late; with a clock that the test turns.

Prevents: a control thread that nobody wakes, waits that no other rank hears of, requests that nobody misses.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_hooks import LaneTimeout
from ddp_hooks.coordination.control import request_queue
from ddp_hooks.coordination.control.cycle_policy import CyclePolicy
from ddp_hooks.coordination.control.request_queue import RequestQueue
from ddp_hooks.coordination.control.submission import Agreement, PartialGroup, Submission
from ddp_hooks.coordination.request import Operation, Request, TensorSpec

MS = 1e-3


class Clock:
    """``time`` of the queue."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Waking:
    """Counts how often the control thread was woken."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(request_queue, "time", clock)
    return clock


def submission(
    name: str,
    clock: Clock,
    operation: Operation = "exchange",
    nbytes: int | None = None,
    after: Sequence[Agreement] = (),
) -> Submission:
    """An exchange, of which nobody knows how large it is; or an all-reduce of ``nbytes``."""
    if nbytes is not None:
        operation = "all_reduce"
    is_uneven = operation in ("all_gather", "all_to_all")
    specs = () if operation == "exchange" else (TensorSpec(name, (-1 if is_uneven else nbytes or 1,), "torch.uint8"),)
    request, now_s = Request(name, operation, specs), clock.now_s
    return Submission(request, [], Agreement(name), now_s, now_s, after=after)


def made(min_bytes: int = 0) -> tuple[RequestQueue, Waking]:
    waking = Waking()
    channel: Any = SimpleNamespace(wake=waking)
    return RequestQueue(CyclePolicy(1 * MS, min_bytes), channel, timeout_s=20.0, warning_s=5.0), waking


def test_requests_of_a_loop_are_one_cycles(clock: Clock) -> None:
    queue, waking = made()
    assert queue.delay_s(False) == 5.0 and queue.delay_s(True) == 0, "a group may be late, which wakes nobody"
    for index in range(20):
        queue.submit(submission(str(index), clock))
        assert queue.delay_s(False) > 0 or index > 8
        clock.now_s += 0.1 * MS
    assert waking.times == 1, "for the first of them"
    assert queue.facts().first_request_s == 100.0 and queue.facts().last_request_s == pytest.approx(100.0 + 1.9 * MS)
    assert queue.delay_s(False) == 0
    queue.begin_cycle()
    assert queue.facts().first_request_s == math.inf and queue.delay_s(False) > 4


def test_threads_that_wait_are_facts(clock: Clock) -> None:
    queue, waking = made()
    queue.submit(submission("a", clock))
    assert not queue.facts().is_blocked
    with queue.waiting():
        assert waking.times == 2 and queue.facts().is_blocked
    assert not queue.facts().is_blocked
    queue.notify(is_urgent=True)
    assert waking.times == 3 and queue.facts().is_blocked
    queue.begin_cycle()
    assert not queue.facts().is_blocked
    queue.end_cycle(clock.now_s - 3 * MS, clock.now_s, any_waiting_too_long=True)
    facts = queue.facts()
    assert facts.others_wait and facts.last_cycle_s == clock.now_s and facts.cycle_length_s == pytest.approx(3 * MS)


def test_enough_bytes_wake_the_control_thread(clock: Clock) -> None:
    queue, waking = made(min_bytes=1000)
    for index, nbytes in enumerate([400, 400]):
        queue.submit(submission(str(index), clock, nbytes=nbytes))
    assert waking.times == 1 and queue.delay_s(False) == pytest.approx(250 * MS)
    queue.submit(submission("2", clock, nbytes=400))
    assert waking.times == 2 and queue.delay_s(False) <= 1 * MS
    queue.begin_cycle()
    queue.submit(submission("3", clock, nbytes=400))
    assert queue.delay_s(False) > 200 * MS, "announced bytes do not count"


@pytest.mark.parametrize("operation", ["exchange", "all_gather", "all_to_all"])
def test_what_may_be_large_is_told_soon(clock: Clock, operation: Operation) -> None:
    queue, _ = made(min_bytes=1000)
    queue.submit(submission("a", clock, operation))
    assert queue.delay_s(False) <= 1 * MS


def test_another_cycle_is_not_debounced(clock: Clock) -> None:
    queue, _ = made(min_bytes=1000)
    queue.request_cycle()
    assert queue.delay_s(False) == 0 and not queue.facts().is_blocked
    queue.request_cycle(is_urgent=True)
    assert queue.facts().is_blocked


def test_who_waits_in_vain_tells_the_others_once(clock: Clock) -> None:
    queue, waking = made()
    queue.submit(submission("a", clock))
    queue.begin_cycle()
    with queue.waiting():
        assert waking.times == 2, "the control thread is to look when it is time"
        assert not queue.waiting_too_long and queue.delay_s(False) == pytest.approx(20 * MS)
        clock.now_s += 20.1 * MS
        assert queue.waiting_too_long and queue.delay_s(False) == 0
        queue.begin_cycle()
        assert queue.facts().blocked_since_s == math.inf, "they know"
        clock.now_s += 1
        assert queue.waiting_too_long
    assert not queue.waiting_too_long
    queue.pending.clear()
    with queue.waiting():
        assert queue.facts().blocked_since_s == math.inf, "nothing was asked for, as by who has joined"


def test_what_is_late_is_told_once_in_a_while(clock: Clock) -> None:
    queue, _ = made()
    queue.submit(submission("early", clock))
    clock.now_s += 3
    queue.submit(submission("later", clock))
    queue.begin_cycle()
    assert queue.take_late() == ([], [])
    clock.now_s += 2.1
    assert queue.delay_s(False) == 0 and queue.take_late() == (["early"], [])
    assert queue.take_late() == ([], [])
    clock.now_s += 3
    assert queue.take_late() == (["later"], [])
    clock.now_s += 12
    overdue, expired = queue.take_late()
    assert sorted(overdue) == ["early", "later"] and expired == ["early"]


def test_what_was_blocked_for_long_is_missed_in_time(clock: Clock) -> None:
    queue, _ = made()
    before = Agreement("before")
    queue.submit(submission("blocked", clock, after=[before]))
    assert queue.has_unsent and not queue.pending
    clock.now_s += 7
    queue.release_blocked()
    assert queue.delay_s(False) > 0 and queue.take_late() == ([], []), "not yet"
    before.decide()
    queue.release_blocked()
    assert list(queue.pending) == ["blocked"] and queue.delay_s(False) == 0
    clock.now_s += 5.1
    assert queue.take_late() == (["blocked"], [])
    clock.now_s += 15
    assert queue.take_late()[1] == ["blocked"]


def test_what_follows_something_that_does_not_end_fails(clock: Clock) -> None:
    queue, _ = made()
    waiting = submission("blocked", clock, after=[Agreement("before")])
    queue.submit(waiting)
    clock.now_s += 20.1
    assert queue.delay_s(False) == 0
    with queue.changed:
        queue.release_blocked()
    error = waiting.agreement.error
    assert isinstance(error, LaneTimeout) and "blocked was to follow ['before'], not done after 20 s" in str(error)
    assert not queue.has_unsent


def test_a_group_that_is_not_complete_is_named(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    queue, _ = made()
    group = PartialGroup(["a", "b"], Agreement("pair"), "sums", clock.now_s)
    group.add("a", torch.ones(1), "sums")
    queue.begin_group(group)
    clock.now_s += 5.1
    with caplog.at_level(logging.WARNING, "ddp_hooks"):
        assert queue.delay_s(False) == 0 and queue.take_late() == ([], [])
    assert "waited 5 s for pair, which lacks ['b'] here" in caplog.text
