"""Totals of coordination: its cost, and the messages that it has moved."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CoordinationStats:
    """Totals of one rank; seconds of requests are added up over all requests.

    Args:
        cycles: negotiation cycles.
        collectives: messages that were moved, of one request or of several that were fused.
        requests: requests that were done.
        control_messages, control_bytes: sent to negotiate.
        control_s: seconds in cycles; mostly waits for other ranks.
        control_cpu_s: seconds of processor time in cycles.
        sent_bytes, received_bytes: payload of all messages, without the measurement of the link.
        waited_for_data_s: seconds from a group's first tensor to its last one.
        waited_for_others_s: seconds from there until all ranks have made the request.
        queued_s: seconds from there until a lane begins.
        moved_s: seconds from there to the end.
        message_sizes: numbers of messages by ``nbytes.bit_length()``; key 20 is 512 KiB up to less than 1 MiB.
            Exchanges, and rows whose numbers may differ by rank, count as 0 bytes.
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
        """Count a message."""
        self.collectives += 1
        size = nbytes.bit_length()
        self.message_sizes[size] = self.message_sizes.get(size, 0) + 1
