"""Processor time of an action of all ranks, with the interrupts that it causes; and workers per core."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from ddp_hooks.comm import LaneSettings, gather_objects

Progress: TypeAlias = Callable[[Iterable[Any]], Iterable[Any]]
T = TypeVar("T")


def gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks; collective. None: there is this rank only."""
    return [value] if group is None else gather_objects(value, group, "plan(), which measures", LaneSettings())


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of an action, until the device has done it."""
    start_s = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s


def cpu_seconds(group: dist.ProcessGroup, action: Callable[[], object], repeats: int) -> float:
    """Return the mean processor seconds of an action per rank, of all threads, after a first one; collective.

    The kernel receives in interrupts, whose time is not all accounted to the receiving process. It counts.
    """
    action()
    dist.barrier(group)
    start_s, (busy_s, interrupts_s) = time.process_time(), _host_seconds()
    for _ in range(repeats):
        action()
    own_s = time.process_time() - start_s
    dist.barrier(group)
    now_busy_s, now_interrupts_s = _host_seconds()
    rank = RankTime(socket.gethostname(), own_s, now_busy_s - busy_s, now_interrupts_s - interrupts_s)
    found = gather(rank, group)
    return total_seconds(found) / len(found) / repeats


def _host_seconds() -> tuple[float, float]:
    """Return the seconds in which cores of this host were busy, and in interrupts; 0 where the kernel does not tell."""
    try:
        numbers = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, hard, soft, steal = (int(number) / os.sysconf("SC_CLK_TCK") for number in numbers)
    except (OSError, ValueError):  # not Linux, or a kernel that counts otherwise
        return 0.0, 0.0
    return user + nice + system + hard + soft + steal, hard + soft


class RankTime(NamedTuple):
    """Processor seconds of a rank, and meanwhile of all cores of its host."""

    host: str
    own_s: float
    busy_s: float
    interrupts_s: float


def total_seconds(ranks: Sequence[RankTime]) -> float:
    """Return the time of all ranks, and of interrupts accounted to none of them; other programs do not count."""
    total_s = 0.0
    for host in {rank.host for rank in ranks}:
        neighbours = [rank for rank in ranks if rank.host == host]
        own_s = sum(rank.own_s for rank in neighbours)
        of_host = max(neighbours, key=lambda rank: rank.busy_s)
        total_s += own_s + max(0.0, min(of_host.interrupts_s, of_host.busy_s - own_s))
    return total_s


def oversubscription(group: dist.ProcessGroup) -> tuple[float, int]:
    """Return workers per core of the busiest host, and whole cores per worker, both at least 1; collective."""
    hosts = gather((socket.gethostname(), len(os.sched_getaffinity(0))), group)
    names = [name for name, _ in hosts]
    per_core = max(names.count(name) / cores for name, cores in hosts)
    return max(1.0, per_core), max(1, int(1 / per_core))
