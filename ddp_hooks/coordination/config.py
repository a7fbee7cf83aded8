"""Settings of coordination, one frozen dataclass."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddp_hooks.comm import at_least, check_booleans, check_slice, check_waits, check_whole, positive


@dataclass(frozen=True)
class CoordinatorConfig:
    """How requests are agreed upon, and move; the same on every rank.

    Args:
        cycle_ms: a rank that has news waits so long after its last cycle before it begins another one, and at most so
            long after its first news while more come, so that they come together; longer where agreeing
            is slow, and, while no thread waits, where there is little to move. Ranks without news wait for nothing,
            and cost nothing.
        capacity: of the response cache: requests that are known by a bit. 0: everything is negotiated every time.
        fan_out: what is negotiated is told along a tree in which every rank hears from at most so many others
            (Horovod, section 2.2.3). None: all ranks tell the first one themselves.
        fusion_mb: all-reduces that are ready together travel as one up to this size in MiB; what is larger by itself,
            or a group, is not cut. 0: each alone.
        mix_groups: whether a group may travel with others that are ready (Horovod, section 3.2); False: alone.
        credit_mb: once requests have more than one priority, so many MiB are under way at a time, and the rest waits
            for its turn by priority; what is fused is not larger then. The smaller, the sooner what is urgent gets
            through, and the more often ranks agree.
        lanes: streams of communication side by side. None: chosen by a short measurement of the link.
        slice_mb: largest message in MiB, at least 1 KiB; those that are summed are
            ``min(slice_mb / 3, 2 * slice_mb / (P - 1))``. None: chosen by the same measurement.
        trace: record spans for :meth:`Coordinator.timeline`.
        timeout_s: what was asked for on some ranks only fails on all of them after so long, and so does a wait for a
            message.
        stall_warning_s: after so long it is logged, with the ranks that have not asked for it.
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
