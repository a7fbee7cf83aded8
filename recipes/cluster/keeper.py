"""Holds a cluster's network namespaces, and ends all that runs in them when its owner is done or gone.

    python keeper.py NUM_NAMESPACES MARK

Creates the namespaces, prints one open file descriptor per namespace, and waits on standard input, a pipe
from its owner. The namespaces have no names in the file system: they live while this process or a worker
does, so that no crash can leave any behind. The owner writes a byte when it is done; if it is killed, the
kernel closes the pipe. Either way this process kills whatever still runs in the namespaces, and ends.

A program of its own, because it must outlive its owner; standard library only, so that it starts quickly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# Holds the cluster's name in the environment of all its processes.
MARK_VARIABLE = "DDP_HOOKS_CLUSTER"

CLONE_NEWNET = 0x40000000  # linux/sched.h; os.unshare needs Python 3.12
SCAN_INTERVAL_S = 0.02
GIVE_UP_S = 10.0  # a process in an uninterruptible wait must not hold us for ever


def process_ids() -> Iterator[int]:
    """Ids of all processes on this machine except this one."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            yield int(name)


def mark_of(process_id: int) -> str | None:
    """Name of the cluster that this process was started in; None for any other, or one we may not look at."""
    prefix = f"{MARK_VARIABLE}=".encode()
    try:
        environment = Path(f"/proc/{process_id}/environ").read_bytes()
    except OSError:
        return None
    marks = [entry[len(prefix) :] for entry in environment.split(b"\0") if entry.startswith(prefix)]
    return marks[0].decode(errors="replace") if marks else None


def network_of(process_id: int) -> int | None:
    """Inode of the network namespace this process is in; None if it ended or we may not look."""
    try:
        return os.stat(f"/proc/{process_id}/ns/net").st_ino
    except OSError:
        return None


def end_processes(belongs: Callable[[int], bool], quiet_s: float = 0.0) -> int:
    """Kills all processes that belong, until none has been seen for `quiet_s` seconds.

    Returns:
        how many were killed.
    """
    killed: set[int] = set()
    give_up = time.monotonic() + GIVE_UP_S
    last_seen = time.monotonic()
    while time.monotonic() < give_up:
        victims = [process_id for process_id in process_ids() if belongs(process_id)]
        for victim in victims:
            try:
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
            except OSError:
                pass  # it ended by itself meanwhile
        if victims:
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen >= quiet_s:
            break
        time.sleep(SCAN_INTERVAL_S)
    return len(killed)


def create_network() -> int:
    """Moves this process into a new network namespace and returns an open file descriptor of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        sys.exit(f"creating a network namespace: {os.strerror(ctypes.get_errno())}")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def main() -> None:
    num_namespaces, mark = int(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the owner's end ends us
    descriptors = [create_network() for _ in range(num_namespaces)]
    networks = {os.fstat(descriptor).st_ino for descriptor in descriptors}
    print(*descriptors, flush=True)

    owner_is_done = os.read(sys.stdin.fileno(), 1) != b""
    # A killed owner may have been starting a worker that is not in its namespace yet: look again for a while.
    end_processes(
        lambda process_id: network_of(process_id) in networks or mark_of(process_id) == mark,
        quiet_s=0.0 if owner_is_done else 0.3,
    )


if __name__ == "__main__":
    main()
