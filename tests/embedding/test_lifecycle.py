"""Lifecycles of a step: transitions that can happen, and no others.

Prevents: a backward inside of a forward that ends the forward, gradients that are applied twice, and events that pass
unnoticed in a state in which they cannot happen.
"""

from __future__ import annotations

import pytest

from ddp_hooks.embedding.step.lifecycle import Event, GradientState, Phase, after


def run(events: list[Event], phase: Phase = Phase.IDLE) -> list[Phase]:
    phases = [phase]
    for event in events:
        phases.append(after(event, phases[-1]))
    return phases[1:]


def test_a_step_returns_to_idle() -> None:
    step = [Event.FORWARD_BEGINS, Event.FORWARD_ENDS, Event.BACKWARD_BEGINS, Event.BACKWARD_ENDS]
    assert run(step) == [Phase.FORWARD, Phase.IDLE, Phase.BACKWARD, Phase.IDLE]


def test_a_backward_inside_of_a_forward_leaves_the_forward_open() -> None:
    inside = [Event.FORWARD_BEGINS, Event.BACKWARD_BEGINS, Event.BACKWARD_ENDS, Event.FORWARD_ENDS]
    assert run(inside) == [Phase.FORWARD, Phase.BACKWARD_IN_FORWARD, Phase.FORWARD, Phase.IDLE]
    assert Phase.BACKWARD_IN_FORWARD.in_forward and Phase.BACKWARD_IN_FORWARD.in_backward


def test_two_threads_may_notice_one_backward() -> None:
    for phase in (Phase.IDLE, Phase.FORWARD):
        first, second = run([Event.BACKWARD_BEGINS] * 2, phase)
        assert first is second and first.in_backward


def test_a_forward_begins_after_an_interrupted_backward() -> None:
    assert run([Event.FORWARD_BEGINS, Event.BACKWARD_ENDS], Phase.BACKWARD) == [Phase.FORWARD, Phase.FORWARD]


def test_closed_is_final() -> None:
    assert {after(Event.CLOSE, phase) for phase in Phase} == {Phase.CLOSED}
    assert run([Event.BACKWARD_BEGINS, Event.BACKWARD_ENDS], Phase.CLOSED) == [Phase.CLOSED] * 2
    with pytest.raises(AssertionError, match="FORWARD_BEGINS"):
        after(Event.FORWARD_BEGINS, Phase.CLOSED)


def test_gradients_are_applied_once() -> None:
    applied = after(Event.STEP, GradientState.NEW)
    added = after(Event.BACKWARD_BEGINS, applied)
    assert (applied, added) == (GradientState.APPLIED, GradientState.ADDED_TO_APPLIED)
    with pytest.raises(AssertionError, match="STEP"):
        after(Event.STEP, added)
    assert {after(Event.ZERO_GRAD, state) for state in GradientState} == {GradientState.NEW}
