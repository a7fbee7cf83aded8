"""Costs of a step, for logs and tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ddp_hooks.comm import Lanes, Stall, Traffic, check_whole


@dataclass(frozen=True)
class DearStats:
    """One complete step: from the end of one ``optimizer.step()`` to the end of the next, on this rank.

    Args:
        step: number of the step, from 1; 0 before the first.
        num_groups: groups of atoms that were reduced.
        num_lanes: lanes that carried them.
        fusion_mb: largest group, in MiB, in the next step; None where sizes do not matter.
        sent_bytes, received_bytes: payload of all messages.
        comm_s: seconds in which lanes were at work, added over lanes. None on accelerators, where streams run ahead of
            the processor: see ``torch.profiler``.
        step_stall_s: seconds that ``optimizer.step()``, or clipping before it, waited for reduce-scatters and for
            scalars over the ranks; of the processor's, also on accelerators, where streams wait.
        forward_stall_s: likewise, seconds that forwards waited for all-gathers.
        wall_s: seconds the whole step took.
        grad_norm: 2-norm of the gradients before clipping, with ``max_grad_norm``; None without.
        skipped_steps: updates left out so far, with ``on_nonfinite="skip"``.
    """

    step: int = 0
    num_groups: int = 0
    num_lanes: int = 0
    fusion_mb: float | None = None
    sent_bytes: int = 0
    received_bytes: int = 0
    comm_s: float | None = 0.0
    step_stall_s: float = 0.0
    forward_stall_s: float = 0.0
    wall_s: float = 0.0
    grad_norm: float | None = None
    skipped_steps: int = 0

    @property
    def stall_s(self) -> float:
        """Seconds in which the training thread, but no stream, waited for communication."""
        return self.step_stall_s + self.forward_stall_s

    @property
    def overlap(self) -> float | None:
        """Share of the communication time, per lane, that was hidden behind other work, from 0 to 1.

        None where that time is not measured, or there was none.
        """
        if not self.comm_s:
            return None
        return max(0.0, 1.0 - self.stall_s * max(1, self.num_lanes) / self.comm_s)


class ScalarWriter(Protocol):
    """Writer of scalars, like ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Note one value."""


@dataclass(frozen=True)
class StatsLog:
    """Writes statistics as scalars, every ``every`` steps, under names that begin with ``prefix``."""

    writer: ScalarWriter
    every: int
    prefix: str

    def __post_init__(self) -> None:
        check_whole(self, every=1)

    def write(self, step: int, measure: Callable[[], DearStats]) -> None:
        if step % self.every:
            return
        stats = measure()
        values = {**asdict(stats), "stall_s": stats.stall_s, "overlap": stats.overlap}
        for name, value in values.items():
            if name != "step" and value is not None:
                self.writer.add_scalar(f"{self.prefix}/{name}", value, stats.step)


class StepMeter:
    """Measures every step by the differences of running totals."""

    def __init__(self, lanes: Lanes, step_stall: Stall, forward_stall: Stall) -> None:
        self.latest = DearStats()
        self._lanes = lanes
        self._step_stall = step_stall
        self._forward_stall = forward_stall
        self._before = self._totals()

    def end_step(self, num_groups: int, fusion_mb: float | None) -> None:
        """Put the costs since the last call into :attr:`latest`."""
        then, self._before = self._before, self._totals()
        traffic = self._before[0] - then[0]
        step_stall_s, forward_stall_s, wall_s = (b - a for a, b in zip(then[1:], self._before[1:], strict=True))
        self.latest = DearStats(
            step=self.latest.step + 1,
            num_groups=num_groups,
            num_lanes=len(self._lanes),
            fusion_mb=fusion_mb,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=None if self._lanes.native else traffic.busy_s,
            step_stall_s=step_stall_s,
            forward_stall_s=forward_stall_s,
            wall_s=wall_s,
        )

    def _totals(self) -> tuple[Traffic, float, float, float]:
        return self._lanes.traffic, self._step_stall.seconds, self._forward_stall.seconds, time.perf_counter()
