"""When a rank begins to agree, and when something has waited too long: with a clock that the test turns.

Prevents: cycles that come too late for somebody who waits, or so often that they are all that happens; requests that
nobody misses.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_hooks import LaneTimeout
from ddp_hooks.coordination import CoordinatorConfig, desk
from ddp_hooks.coordination.desk import Begun, Desk
from ddp_hooks.coordination.execution import Submission
from ddp_hooks.coordination.request import Operation, Request, TensorSpec

MS = 1e-3
CONFIG = CoordinatorConfig(cycle_ms=1.0, stall_warning_s=5.0, timeout_s=20.0)


class Clock:
    """``time`` of the desk."""

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
    monkeypatch.setattr(desk, "time", clock)
    return clock


def submission(
    name: str, clock: Clock, operation: Operation = "exchange", nbytes: int | None = None
) -> Submission:
    """An exchange, of which nobody knows how large it is; or an all-reduce of ``nbytes``."""
    errors: list[Exception] = []
    agreement: Any = SimpleNamespace(errors=errors, decide=lambda work=None, error=None: errors.append(error))
    if nbytes is not None:
        operation = "all_reduce"
    is_uneven = operation in ("all_gather", "all_to_all")
    specs = () if operation == "exchange" else (TensorSpec(name, (-1 if is_uneven else nbytes or 1,), "torch.uint8"),)
    return Submission(Request(name, operation, specs), [], agreement, began_s=clock.now_s, asked_s=clock.now_s)


def made(config: CoordinatorConfig = CONFIG, worth_bytes: int = 0) -> tuple[Desk, Waking]:
    waking = Waking()
    return Desk(config, {"pair": ["a", "b"]}, waking, worth_bytes), waking


def test_what_is_asked_for_in_a_loop_is_one_cycles(clock: Clock) -> None:
    own, waking = made()
    assert own.begin_s(has_heard=False) == float("inf") and own.begin_s(has_heard=True) == 0
    for index in range(20):
        own.ask(submission(str(index), clock))
        assert own.begin_s(has_heard=False) > clock.now_s or index > 8
        clock.now_s += 0.1 * MS
    assert waking.times == 1, "for the first of them"
    assert own.begin_s(has_heard=False) == pytest.approx(100.0 + 1 * MS), "not for ever"
    own.take_news()
    assert own.begin_s(has_heard=False) == float("inf")


@pytest.mark.parametrize(("took_ms", "rest_ms"), [(0.1, 1), (3, 6), (500, 20)])
def test_cycles_rest_while_nobody_waits(clock: Clock, took_ms: float, rest_ms: float) -> None:
    own, waking = made()
    own.note_cycle(clock.now_s - took_ms * MS, clock.now_s, somebody_starves=False)
    own.ask(submission("a", clock))
    rested_s, soon_s = clock.now_s + rest_ms * MS, clock.now_s + min(5, max(1, took_ms)) * MS
    assert own.begin_s(has_heard=False) == pytest.approx(rested_s)
    assert own.begin_s(has_heard=True) <= soon_s, "another rank waits for this one's part"
    with own.being_waited_for():
        assert waking.times == 2
        assert own.begin_s(has_heard=False) == pytest.approx(soon_s)
        assert own.begin_s(has_heard=True) == 0
    assert own.begin_s(has_heard=False) == pytest.approx(rested_s)
    own.tell(is_urgent=True)
    assert waking.times == 3 and own.begin_s(has_heard=False) == pytest.approx(soon_s)
    own.take_news()
    own.note_cycle(clock.now_s - took_ms * MS, clock.now_s, somebody_starves=True)
    own.ask(submission("b", clock))
    assert own.begin_s(has_heard=False) == pytest.approx(soon_s), "on another rank"


def test_little_news_lies_while_nobody_waits(clock: Clock) -> None:
    own, waking = made(worth_bytes=1000)
    for index, told_of in enumerate([400, 400]):
        own.ask(submission(str(index), clock, nbytes=told_of))
    assert waking.times == 1 and own.begin_s(has_heard=False) == pytest.approx(clock.now_s + 250 * MS), "not for ever"
    assert own.begin_s(has_heard=True) <= clock.now_s + 1 * MS, "another rank has begun"
    with own.being_waited_for():
        assert own.begin_s(has_heard=False) <= clock.now_s + 1 * MS
    own.ask(submission("2", clock, nbytes=400))
    assert waking.times == 3 and own.begin_s(has_heard=False) <= clock.now_s + 1 * MS, "now it is enough"
    own.take_news()
    own.ask(submission("3", clock, nbytes=400))
    assert own.begin_s(has_heard=False) > clock.now_s + 200 * MS, "what was told is no news"
    own.note_cycle(clock.now_s - 0.1 * MS, clock.now_s, somebody_starves=True)
    assert own.begin_s(has_heard=False) <= clock.now_s + 1 * MS, "another rank has waited for long"


@pytest.mark.parametrize("operation", ["exchange", "all_gather", "all_to_all"])
def test_what_may_be_large_is_told_soon(clock: Clock, operation: Operation) -> None:
    own, _ = made(worth_bytes=1000)
    own.ask(submission("a", clock, operation))
    assert own.begin_s(has_heard=False) <= clock.now_s + 1 * MS


def test_who_waits_in_vain_tells_the_others_once(clock: Clock) -> None:
    own, waking = made()
    own.ask(submission("a", clock))
    own.take_news()
    with own.being_waited_for():
        assert waking.times == 2, "the control thread is to look when it is time"
        assert not own.is_starving and own.begin_s(has_heard=False) == pytest.approx(clock.now_s + 20 * MS)
        clock.now_s += 20.1 * MS
        assert own.is_starving and own.rest_s(has_heard=False) == 0
        own.take_news()
        assert own.begin_s(has_heard=False) == float("inf"), "they know"
        clock.now_s += 1
        assert own.is_starving
    assert not own.is_starving
    own.pending.clear()
    with own.being_waited_for():
        assert own.begin_s(has_heard=False) == float("inf"), "nothing was asked for, as by who has joined"


def test_a_long_pause_does_not_keep_others_waiting(clock: Clock) -> None:
    own, _ = made(CoordinatorConfig(cycle_ms=1000.0))
    own.ask(submission("a", clock))
    assert own.begin_s(has_heard=False) >= clock.now_s + 0.25
    assert own.begin_s(has_heard=True) <= clock.now_s + 1 * MS


def test_what_is_late_is_told_once_in_a_while(clock: Clock) -> None:
    own, _ = made()
    own.ask(submission("early", clock))
    clock.now_s += 3
    own.ask(submission("later", clock))
    assert own.late() == ([], [])
    clock.now_s += 2.1
    assert own.rest_s(has_heard=False) == 0 and own.late() == (["early"], [])
    assert own.late() == ([], [])
    clock.now_s += 3
    assert own.late() == (["later"], [])
    clock.now_s += 12
    overdue, expired = own.late()
    assert sorted(overdue) == ["early", "later"] and expired == ["early"]


def test_what_was_held_for_long_is_missed_in_time(clock: Clock) -> None:
    own, _ = made()
    before = SimpleNamespace(done=False, label="before")
    own.ask(submission("held", clock), [before])
    clock.now_s += 7
    own.ask_for_held()
    assert own.rest_s(has_heard=False) > 0 and own.late() == ([], []), "nobody else is to be asked for it yet"
    before.done = True
    own.ask_for_held()
    assert list(own.pending) == ["held"]
    clock.now_s += 5.1
    assert own.late() == (["held"], [])
    clock.now_s += 15
    assert own.late()[1] == ["held"]


def test_what_follows_something_that_does_not_end_fails(clock: Clock) -> None:
    own, _ = made()
    waiting = submission("held", clock)
    own.ask(waiting, [SimpleNamespace(done=False, label="before")])
    clock.now_s += 20.1
    with own.changed:
        own.ask_for_held()
    (error,) = waiting.agreement.errors  # type: ignore[attr-defined]
    assert isinstance(error, LaneTimeout) and "held was to follow ['before'], not done after 20 s" in str(error)
    assert not own.is_awaiting


def test_a_group_that_is_not_complete_is_named(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    own, _ = made()
    agreement: Any = SimpleNamespace()
    own.begin("pair", Begun({"a": torch.ones(1)}, agreement, False, 0, torch.float32, clock.now_s))
    clock.now_s += 5.1
    with caplog.at_level(logging.WARNING, "ddp_hooks"):
        assert own.rest_s(has_heard=False) == 0 and own.late() == ([], [])
    assert "waited 5 s for pair, which lacks ['b'] here" in caplog.text
