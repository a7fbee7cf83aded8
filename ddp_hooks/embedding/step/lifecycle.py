"""Lifecycles of a training step, with checked transitions."""

from __future__ import annotations

from enum import Enum, auto
from typing import TypeVar


class Phase(Enum):
    """Position in the training loop."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    BACKWARD_IN_FORWARD = auto()
    CLOSED = auto()

    @property
    def in_forward(self) -> bool:
        """True in a forward with gradients."""
        return self in (Phase.FORWARD, Phase.BACKWARD_IN_FORWARD)

    @property
    def in_backward(self) -> bool:
        """True in a backward that tables have noticed."""
        return self in (Phase.BACKWARD, Phase.BACKWARD_IN_FORWARD)


class GradientState(Enum):
    """Lifecycle of the tables' gradients from one ``zero_grad()`` to the next."""

    NEW = auto()
    """No step has applied them."""
    APPLIED = auto()
    """A step has applied them and did not keep them."""
    ADDED_TO_APPLIED = auto()
    """A backward came after that step, so plain DDP would have added to gradients that are gone."""


Event = Enum("Event", "FORWARD_BEGINS FORWARD_ENDS BACKWARD_BEGINS BACKWARD_ENDS STEP ZERO_GRAD CLOSE")
State = TypeVar("State", Phase, GradientState)

_PHASES: dict[Event, dict[Phase, Phase]] = {
    # An exception may have ended a backward, and activation checkpointing repeats the model's forward within one.
    Event.FORWARD_BEGINS: dict.fromkeys([p for p in Phase if p is not Phase.CLOSED], Phase.FORWARD),
    Event.FORWARD_ENDS: {Phase.FORWARD: Phase.IDLE, Phase.BACKWARD_IN_FORWARD: Phase.BACKWARD},
    Event.BACKWARD_BEGINS: {
        Phase.IDLE: Phase.BACKWARD,
        Phase.FORWARD: Phase.BACKWARD_IN_FORWARD,
        # Autograd has a thread per device, and several may notice the same backward.
        **{phase: phase for phase in (Phase.BACKWARD, Phase.BACKWARD_IN_FORWARD, Phase.CLOSED)},
    },
    Event.BACKWARD_ENDS: {
        Phase.BACKWARD: Phase.IDLE,
        Phase.BACKWARD_IN_FORWARD: Phase.FORWARD,
        **{phase: phase for phase in (Phase.IDLE, Phase.FORWARD, Phase.CLOSED)},  # a forward has begun meanwhile
    },
    Event.CLOSE: dict.fromkeys(Phase, Phase.CLOSED),
}
_GRADIENT_STATES: dict[Event, dict[GradientState, GradientState]] = {
    Event.BACKWARD_BEGINS: {
        GradientState.NEW: GradientState.NEW,
        GradientState.APPLIED: GradientState.ADDED_TO_APPLIED,
        GradientState.ADDED_TO_APPLIED: GradientState.ADDED_TO_APPLIED,
    },
    Event.STEP: {GradientState.NEW: GradientState.APPLIED, GradientState.APPLIED: GradientState.APPLIED},
    Event.ZERO_GRAD: dict.fromkeys(GradientState, GradientState.NEW),
}


def after(event: Event, state: State) -> State:
    """Return the state that follows; an event that cannot happen in ``state`` is a fault of ours."""
    table: dict[Event, dict[State, State]] = _PHASES if isinstance(state, Phase) else _GRADIENT_STATES  # type: ignore[assignment]
    following = table[event].get(state)
    assert following is not None, f"{event.name} in {state}"
    return following
