"""Settings of coordination."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddp_hooks.comm import at_least, check_booleans, check_slice, check_waits, check_whole, positive


@dataclass(frozen=True)
class CoordinatorConfig:
    """Settings of a coordinator; the same on every rank.

    Args:
        cycle_ms: minimum delay between negotiation cycles, and maximum delay before a new request is negotiated while a
            thread waits. While no thread waits, few bytes are delayed for up to 250 ms; see
            :mod:`ddp_hooks.coordination.control.cycle_policy`.
        capacity: largest number of requests in the response cache; 0: every request is negotiated every time.
        fan_out: new requests travel to rank 0 along a tree with at most so many children per rank (Horovod, section
            2.2.3). None: directly.
        fusion_mb: largest message of several all-reduces in MiB; a group or a larger all-reduce is not cut. 0: each
            travels alone.
        mix_groups: a group may travel with other requests (Horovod, section 3.2). False: alone.
        credit_mb: once requests have more than one priority, so many MiB are under way at a time, and messages are not
            larger. A smaller credit lets urgent requests leave sooner, and takes more cycles.
        lanes: streams of communication side by side. None: chosen by a short measurement of the link.
        slice_mb: largest message of an all-gather in MiB, at least 1 KiB; of a reduce-scatter
            ``min(slice_mb / 3, 2 * slice_mb / (P - 1))``. None: chosen by the same measurement.
        trace: record spans for :meth:`Coordinator.timeline`.
        timeout_s: a request that only some ranks make fails on all ranks after so long, and so does a wait for a
            message.
        stall_warning_s: a late request is logged after so long, with the ranks that have not made it.
    """

    cycle_ms: float = 1.0
    capacity: int = 1024
    fan_out: int | None = None
    fusion_mb: float = 64.0
    mix_groups: bool = True
    credit_mb: float = 16.0
    lanes: int | None = None
    slice_mb: float | None = None
    trace: bool = False
    timeout_s: float = 600.0
    stall_warning_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("cycle_ms", "fusion_mb"):
            if not at_least(getattr(self, name), 0) or getattr(self, name) == math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {getattr(self, name)!r}")
        if not positive(self.credit_mb):
            raise ValueError(f"credit_mb must be > 0 and finite, got {self.credit_mb!r}")
        check_slice(self.slice_mb)
        check_waits(self.timeout_s, self.stall_warning_s)
        check_whole(self, capacity=0, fan_out=2, lanes=1)
        check_booleans(self)
