"""Totals of coordination, and where the time of requests goes (figure 9 of the paper)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hooks.comm import Span
from ddp_hooks.planning import timeline

PHASES = ("waits for data", "waits for others", "waits for a lane", "moves")
"""Phases of a request in order, which are tracks of :meth:`Coordinator.timeline`.

Waiting for *data* is computation, waiting for *others* is the cost of late ranks, and waiting for *a lane* means that
the link is busy.
"""


@dataclass
class CoordinationStats:
    """Totals of one rank."""

    cycles: int = 0  #: of negotiation
    collectives: int = 0  #: messages that were moved, of one request or of several that were fused
    requests: int = 0  #: that were done
    control_messages: int = 0  #: sent to negotiate
    control_bytes: int = 0  #: of these messages
    control_s: float = 0.0  #: seconds in cycles; mostly waits for other ranks
    control_cpu_s: float = 0.0  #: seconds of processor time in cycles
    sent_bytes: int = 0  #: payload of all messages, without the measurement of the link
    received_bytes: int = 0  #: as ``sent_bytes``
    #: Numbers of messages by ``nbytes.bit_length()``; key 20 is 512 KiB up to less than 1 MiB. Exchanges, and rows
    #: whose numbers may differ by rank, count as 0 bytes.
    message_sizes: dict[int, int] = field(default_factory=dict)


def seconds_by_name(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase by name of the request, added up over all requests of that name."""
    totals: dict[str, dict[str, float]] = {}
    for span in spans:
        if span.track in PHASES:
            phases = totals.setdefault(span.name, dict.fromkeys(PHASES, 0.0))
            phases[span.track] += span.end_s - span.start_s
    return totals


def write_trace(spans: Sequence[Span], path: Path, title: str = "coordination") -> None:
    """Write spans of ``Coordinator.timeline()``, at least one, to a ``.json`` file for https://ui.perfetto.dev."""
    ends_s = (min(span.start_s for span in spans), max(span.end_s for span in spans))
    timeline.write_trace([timeline.Timeline(title, ends_s, spans)], path)
