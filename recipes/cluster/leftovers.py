"""Names of clusters, and ending what a cluster left behind whose owner was killed together with its keeper.

A cluster's name is ``ddp-cluster-OWNER-START-NUMBER``: the owner's process id, when that process started (ids
are used again) and a number within it. All the cluster's processes carry the name in their environment; only
processes of the same user that carry the name of a dead owner are ever touched.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import defaultdict
from pathlib import Path

from recipes.cluster.keeper import end_processes, mark_of, process_ids

_NAME = re.compile(r"ddp-cluster-(?P<owner>\d+)-(?P<start>\d+)-\d+")
_numbers = itertools.count(1)


def new_name() -> str:
    """A name for a cluster of this process."""
    return f"ddp-cluster-{os.getpid()}-{_start_of(os.getpid())}-{next(_numbers)}"


def find() -> dict[str, list[int]]:
    """What is left of clusters whose owner is dead: name -> process ids."""
    return {name: processes for name, processes in _all_clusters().items() if not _owner_lives(name)}


def remove(name: str) -> int:
    """Kills what is left of one cluster and returns how many processes that were.

    Raises:
        ValueError: the name is not one of a cluster of ours, or its owner still runs.
    """
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} was not created by this tool and is left alone: "
            "its clusters are named ddp-cluster-OWNER-START-NUMBER"
        )
    if _owner_lives(name):
        owner = _NAME.fullmatch(name)["owner"]  # type: ignore[index]
        raise ValueError(f"{name} is in use by process {owner} and is left alone: end that process instead")
    return end_processes(lambda process_id: _cluster_of(process_id) == name)


def _all_clusters() -> dict[str, list[int]]:
    clusters: defaultdict[str, list[int]] = defaultdict(list)
    for process_id in process_ids():
        name = _cluster_of(process_id)
        if name is not None:
            clusters[name].append(process_id)
    return dict(clusters)


def _cluster_of(process_id: int) -> str | None:
    """Name of the cluster that a process of this user belongs to."""
    name = mark_of(process_id)
    if name is None or _NAME.fullmatch(name) is None:
        return None
    process = Path("/proc", str(process_id))
    try:
        ours = process.stat().st_uid == os.geteuid()
        # Inside a container the name's process id means another process than here.
        same_ids = os.readlink(process / "ns" / "pid") == os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return name if ours and same_ids else None


def _owner_lives(name: str) -> bool:
    parts = _NAME.fullmatch(name)
    assert parts is not None
    return _start_of(int(parts["owner"])) == int(parts["start"])


def _start_of(process_id: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it has ended."""
    try:
        stat = Path("/proc", str(process_id), "stat").read_text()
    except OSError:
        return None
    # proc_pid_stat(5): the second field is a name in parentheses, which may hold anything.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])
