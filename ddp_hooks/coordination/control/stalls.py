"""Stall monitor: finds requests that other ranks have not made for long, and groups that lack members for long."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_hooks.coordination.control.submission import Blocked, PartialGroup, Submission

logger = logging.getLogger("ddp_hooks")


@dataclass
class StallMonitor:
    """Monitor of the contents of a request queue; the caller brings the time.

    Args:
        timeout_s, warning_s: of the coordinator's settings.
        pending, groups, blocked: contents of the queue, by name.
    """

    timeout_s: float
    warning_s: float
    pending: Mapping[str, Submission] = field(default_factory=dict)
    groups: Mapping[str, PartialGroup] = field(default_factory=dict)
    blocked: Mapping[str, Blocked] = field(default_factory=dict)
    _due_s: float = math.inf  # nothing is late before; maybe nothing is late then

    def watch(self, since_s: float) -> None:
        """Note that something waits since ``since_s``."""
        self._due_s = min(self._due_s, since_s + min(self.warning_s, self.timeout_s))

    def delay_s(self, now_s: float) -> float:
        """Return the seconds until something is late."""
        if now_s >= self._due_s:
            self._due_s = self._next_due_s()
        return max(0.0, self._due_s - now_s)

    def take_late(self, now_s: float) -> tuple[list[str], list[str]]:
        """Return pending names to warn of, and pending names that have timed out; log groups that are not complete."""
        if now_s < self._due_s:
            return [], []
        overdue = [name for name, s in self.pending.items() if now_s >= self._warning_due_s(s.asked_s, s.warned_s)]
        expired = [name for name, s in self.pending.items() if now_s >= s.asked_s + self.timeout_s]
        for name in overdue:
            self.pending[name].warned_s = now_s
        for name, group in self.groups.items():
            if now_s >= self._warning_due_s(group.began_s, group.warned_s):
                group.warned_s = now_s
                logger.warning("waited %.0f s for %s, which lacks %s here", now_s - group.began_s, name, group.lacking)
        self._due_s = self._next_due_s()
        return overdue, expired

    def _warning_due_s(self, since_s: float, warned_s: float) -> float:
        return max(since_s, warned_s) + self.warning_s

    def _next_due_s(self) -> float:
        due_s = [self._warning_due_s(s.asked_s, s.warned_s) for s in self.pending.values()]
        due_s += [s.asked_s + self.timeout_s for s in self.pending.values()]
        due_s += [self._warning_due_s(group.began_s, group.warned_s) for group in self.groups.values()]
        due_s += [each.submission.began_s + self.timeout_s for each in self.blocked.values()]
        return min(due_s, default=math.inf)
