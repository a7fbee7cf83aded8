"""What a step cost, for logs and tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DearStats:
    """One complete step: from the end of one ``optimizer.step()`` to the end of the next, on this rank.

    Args:
        step: number of the step, from 1; 0 before the first.
        num_groups: groups of atoms that were reduced.
        num_lanes: lanes that carried them.
        sent_bytes, received_bytes: payload of all messages.
        comm_s: seconds in which lanes were at work, added over lanes. 0 on accelerators, where streams run ahead.
        step_stall_s: seconds that ``optimizer.step()`` waited for reduce-scatters.
        forward_stall_s: seconds that forwards waited for all-gathers.
        wall_s: seconds the whole step took.
    """

    step: int = 0
    num_groups: int = 0
    num_lanes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    comm_s: float = 0.0
    step_stall_s: float = 0.0
    forward_stall_s: float = 0.0
    wall_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """Seconds in which the training thread waited for communication."""
        return self.step_stall_s + self.forward_stall_s

    @property
    def overlap(self) -> float:
        """Share of the communication time, per lane, that was hidden behind other work, from 0 to 1."""
        per_lane_s = self.comm_s / max(1, self.num_lanes)
        return max(0.0, 1.0 - self.stall_s / per_lane_s) if per_lane_s > 0 else 1.0
