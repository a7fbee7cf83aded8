"""What the extension has moved and waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExtStats:
    """Totals on this rank since :func:`~fsdp_ext.extend`, of the groups that lanes serve; 0 on NCCL, which has its own.

    Args:
        gathers, reduce_scatters: collectives that were submitted.
        deferred: of the reduce-scatters, those that were not waited for one by one.
        early: of the others, those that had begun before FSDP2 asked for them.
        sent_bytes, received_bytes: payload of all messages.
        comm_s: seconds in which lanes were at work, added over lanes.
        gather_stall_s: seconds that forwards and backwards waited for parameters.
        reduce_scatter_stall_s: seconds that backwards waited for gradients.
    """

    gathers: int = 0
    reduce_scatters: int = 0
    deferred: int = 0
    early: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    comm_s: float = 0.0
    gather_stall_s: float = 0.0
    reduce_scatter_stall_s: float = 0.0

    @property
    def stall_s(self) -> float:
        """Seconds in which the training thread waited for communication."""
        return self.gather_stall_s + self.reduce_scatter_stall_s
