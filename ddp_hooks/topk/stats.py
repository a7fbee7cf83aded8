"""What a step cost, for logs and tables."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TopKStats:
    """One synchronised backward, on this rank.

    Args:
        step: its number, from 1; 0 before the first.
        density: part of the elements that was to be kept.
        num_groups: groups of parameters.
        num_dense_groups: of them, those that were summed in full.
        num_lanes: lanes that carried them.
        group_mb: largest group, in MiB, that is not a single parameter.
        sent_bytes, received_bytes: payload of all messages.
        comm_s: seconds in which lanes were at work, selections among it, added over lanes. None on accelerators,
            where streams run ahead of the processor.
        stall_s: seconds that the end of the backward waited for them.
        skipped_steps: steps so far whose gradients were not finite.
    """

    step: int = 0
    density: float = 1.0
    num_groups: int = 0
    num_dense_groups: int = 0
    num_lanes: int = 0
    group_mb: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    comm_s: float | None = 0.0
    stall_s: float = 0.0
    skipped_steps: int = 0
