"""What coordination has cost, and what it has moved."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CoordinationStats:
    """Totals on this rank.

    Args:
        cycles: agreements that this rank took part in.
        collectives: messages that were moved, each of one request or of several that were fused.
        message_sizes: those messages by size: number of them by ``nbytes.bit_length()``, so that under 20 are those of
            512 KiB up to less than 1 MiB. Rows of which ranks may have different numbers, and exchanges,
            count as nothing.
        requests: that were done.
        control_messages, control_bytes: that this rank has sent to agree.
        control_s: seconds in which the control thread agreed; mostly it waited for others.
        control_cpu_s: seconds of the processor that it took for that.
        sent_bytes, received_bytes: payload of all messages, without those that measured the link at the start.
        waited_for_data_s: seconds from a group's first tensor to its last one, added over requests.
        waited_for_others_s: seconds from there until all ranks had asked for it, likewise.
        queued_s: seconds from there until a lane began, likewise.
        moved_s: seconds from there to the end, likewise.
    """

    cycles: int = 0
    collectives: int = 0
    requests: int = 0
    control_messages: int = 0
    control_bytes: int = 0
    control_s: float = 0.0
    control_cpu_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    waited_for_data_s: float = 0.0
    waited_for_others_s: float = 0.0
    queued_s: float = 0.0
    moved_s: float = 0.0
    message_sizes: dict[int, int] = field(default_factory=dict)

    def note_message(self, nbytes: int) -> None:
        """Count a message that is to be moved."""
        self.collectives += 1
        size = nbytes.bit_length()
        self.message_sizes[size] = self.message_sizes.get(size, 0) + 1
