"""Phases of a training step under DeAR."""

from __future__ import annotations

from enum import Enum

from ddp_hooks.comm import see


class Phase(Enum):
    """Part of the training step that is under way; forwards may run in every one, for evaluation."""

    IDLE = "between backward and step"  # shards hold the gradients of all backwards, if there are some
    BACKWARD = "in a backward"  # DDP hands over buckets
    REDUCING = "after a backward"  # its gradients may travel, and are not attached to shards
    STEP = "in optimizer.step()"
    SKIPPED_STEP = "in an optimizer.step() without gradients"  # some were not finite
    BLANK_STEP = "in an optimizer.step() that only makes its state"  # afterwards comes the phase before it
    CLOSED = "closed"

    def followed_by(self, phase: Phase) -> Phase:
        """Return ``phase``, if it may follow this one."""
        if phase is not Phase.CLOSED and phase not in _NEXT[self]:
            raise RuntimeError(
                f"DearState is {self.value} and cannot be {phase.value} next; please report this, with the versions of "
                f"torch and ddp_hooks{see('please-report')}"
            )
        return phase


STEPS = (Phase.STEP, Phase.SKIPPED_STEP, Phase.BLANK_STEP)
_NEXT = {
    Phase.IDLE: {Phase.BACKWARD, *STEPS},
    Phase.BACKWARD: {Phase.REDUCING, Phase.BLANK_STEP},
    Phase.REDUCING: {Phase.IDLE, Phase.BLANK_STEP},
    Phase.STEP: {Phase.IDLE},
    Phase.SKIPPED_STEP: {Phase.IDLE},
    Phase.BLANK_STEP: {Phase.IDLE, Phase.BACKWARD, Phase.REDUCING},
    Phase.CLOSED: set[Phase](),
}  # and everything may be closed
