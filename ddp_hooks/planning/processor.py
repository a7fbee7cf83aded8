"""Processor time of what ranks do together, and of the interrupts that it causes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist


def cpu_seconds(group: dist.ProcessGroup, action: Callable[[], object], repeats: int) -> float:
    """Processor seconds of an action, of a rank on average, all of its threads; collective.

    The kernel moves what arrives in interrupts, whose time is not all accounted to the process that they are for. They
    count, too.

    Args:
        group: the ranks, which all do it.
        action: done once before it counts.
        repeats: how often it is done.
    """
    action()
    dist.barrier(group)
    start_s, since = time.process_time(), HostTime.now()
    for _ in range(repeats):
        action()
    own_s = time.process_time() - start_s
    dist.barrier(group)
    mine = RankTime(socket.gethostname(), own_s, HostTime.now().since(since))
    found = [mine] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return total_seconds(found) / len(found) / repeats


class HostTime(NamedTuple):
    """Seconds since a host was started, of all cores together; 0 where the kernel does not tell."""

    busy_s: float
    interrupts_s: float

    @staticmethod
    def now() -> HostTime:
        """Of this host."""
        try:
            numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, _, _, hard, soft, steal = (int(number) / os.sysconf("SC_CLK_TCK") for number in numbers)
        except (OSError, ValueError):  # not Linux, or one that counts otherwise
            return HostTime(0.0, 0.0)
        return HostTime(user + nice + system + hard + soft + steal, hard + soft)

    def since(self, before: HostTime) -> HostTime:
        """What has gone by."""
        return HostTime(self.busy_s - before.busy_s, self.interrupts_s - before.interrupts_s)


class RankTime(NamedTuple):
    """What a rank has used, and what its host has meanwhile."""

    host: str
    own_s: float
    of_host: HostTime


def total_seconds(ranks: Sequence[RankTime]) -> float:
    """Of all ranks, and of interrupts that were accounted to none of them; other programs do not count."""
    total_s = 0.0
    for host in {rank.host for rank in ranks}:
        neighbours = [rank for rank in ranks if rank.host == host]
        own_s = sum(rank.own_s for rank in neighbours)
        of_host = max((rank.of_host for rank in neighbours), key=lambda each: each.busy_s)
        total_s += own_s + max(0.0, min(of_host.interrupts_s, of_host.busy_s - own_s))
    return total_s
