"""The cluster's network: one bridge, one shaped link per worker, or per node of several workers."""

from __future__ import annotations

import ipaddress
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.cluster.namespaces import Namespaces
from recipes.cluster.needs import ClusterUnavailable, Tools, kernel_part_missing

# A name that no real machine uses: workers see the host's /sys, where NCCL looks up what it finds by name.
INTERFACE = "cluster0"
NETWORK = ipaddress.ip_network("10.77.0.0/16")
MAX_WORKERS = 256

# Tokens that an idle link saves up, as time at full rate: what it then sends at once. Less is more faithful,
# but a busy processor wakes the shaper late and the link loses that time. Measured on two cores that also did
# other work: 0.5 ms lost 10 to 60% of 1 Gbit/s; 1 ms kept that but lost a tenth of 10 Gbit/s against 2 ms.
BURST_S = 2e-3
MIN_BURST_BYTES = 32_000
# The longest queue at each end, as time at full rate: several times any round trip here, so that one TCP
# stream fills the link, and short enough that many senders to one receiver lose packets as on a real switch.
QUEUE_S = 30e-3


@dataclass(frozen=True)
class Link:
    """What every worker's link is shaped to, in each direction.

    Attributes:
        rate_bit_s: line rate in bit/s, Ethernet headers included (a TCP stream carries 95.6% of it).
        latency_s: one-way delay between two workers in seconds, 0 for none added.
    """

    rate_bit_s: int
    latency_s: float = 0.0

    @property
    def burst_bytes(self) -> int:
        return max(MIN_BURST_BYTES, int(self.rate_bit_s / 8 * BURST_S))

    @property
    def queue_packets(self) -> int:
        """Packets under way or waiting at one end, with room to spare."""
        return max(1000, int(self.rate_bit_s / 8 * (self.latency_s + QUEUE_S) / 1500) * 2)


def parse_rate(text: str) -> int:
    """Bits per second from a rate as tc writes it.

    >>> parse_rate("2.5gbit")
    2500000000
    """
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.strip().lower())
    rate = round(float(found[1]) * units[found[2]]) if found else 0
    if not 100e3 <= rate <= 400e9:
        raise ValueError(f"rate must lie in 100kbit … 400gbit and look like 500mbit or 2.5gbit, got {text!r}")
    return rate


def parse_latency(text: str) -> float:
    """Seconds from a delay as tc writes it.

    >>> parse_latency("500us")
    0.0005
    """
    units = {"us": 1e6, "ms": 1e3, "s": 1.0}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip().lower())
    latency = float(found[1]) / units[found[2]] if found else -1.0
    if not 0 <= latency <= 2:
        raise ValueError(f"latency must lie in 0ms … 2s and look like 500us or 1.5ms, got {text!r}")
    return latency


def address(rank: int) -> str:
    """A worker's address inside the cluster."""
    return str(NETWORK[rank + 1])


def build(namespaces: Namespaces, tools: Tools, num_workers: int, link: Link) -> None:
    """Joins workers by a bridge and shapes their links.

    Args:
        namespaces: one per worker in rank order, then one for the bridge, all of them empty.

    Raises:
        ClusterUnavailable: the kernel lacks a part.
    """
    bridge = namespaces.enter(num_workers)
    workers = [namespaces.enter(rank) for rank in range(num_workers)]
    worker_paths = [namespaces.path(rank) for rank in range(num_workers)]
    ports = [f"port{rank}" for rank in range(num_workers)]

    _batch([*bridge, tools.ip], bridge_commands(ports, worker_paths), "bridge and veth")
    for rank, worker in enumerate(workers):
        _batch([*worker, tools.ip], worker_commands(rank), "bridge and veth")

    _batch([*bridge, tools.tc], [rate_command(port, link) for port in ports], "tbf")
    for worker in workers:
        _batch([*worker, tools.tc], [rate_command(INTERFACE, link)], "tbf")
        if link.latency_s:
            _batch([*worker, tools.tc], [latency_command(INTERFACE, link)], "netem")


def bridge_commands(ports: Sequence[str], worker_paths: Sequence[str]) -> list[str]:
    """For ip, in the bridge's namespace: the bridge, and a link from it to each worker's namespace."""
    commands = [
        "link set lo up",
        # No forwarding delay: the bridge must carry packets as soon as it is up.
        "link add bridge0 type bridge forward_delay 0",
        "link set bridge0 up",
    ]
    for port, path in zip(ports, worker_paths, strict=True):
        commands.append(f"link add {port} type veth peer name {INTERFACE} netns {path}")
        commands.append(f"link set {port} master bridge0 up")
    return commands


def worker_commands(rank: int) -> list[str]:
    """For ip, in a worker's namespace."""
    return [
        "link set lo up",
        f"address add {address(rank)}/{NETWORK.prefixlen} dev {INTERFACE}",
        f"link set {INTERFACE} up",
    ]


def rate_command(device: str, link: Link) -> str:
    """For tc: limits what leaves through one end of a link; both ends together shape both directions."""
    return (
        f"qdisc add dev {device} root handle 1: tbf rate {link.rate_bit_s}bit "
        f"burst {link.burst_bytes} latency {round(QUEUE_S * 1e6)}us"
    )


def latency_command(device: str, link: Link) -> str:
    """For tc: delays what leaves a worker. Only this end, so that a packet is delayed once on its way."""
    return (
        f"qdisc add dev {device} parent 1:1 handle 10: netem "
        f"delay {round(link.latency_s * 1e6)}us limit {link.queue_packets}"
    )


def _batch(program: Sequence[str], commands: Sequence[str], part: str) -> None:
    """Runs many commands of ip or tc in one process.

    Args:
        part: the part of the kernel they need.
    """
    result = subprocess.run(
        [*program, "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    if result.returncode == 0:
        return
    answer = " ".join(result.stderr.split())
    # How kernels and versions of iproute2 say that they do not know a kind of device or queue.
    if re.search(r"unknown|no such file|not supported", answer, re.IGNORECASE):
        raise kernel_part_missing(part, answer)
    lines = "\n".join(commands)
    raise ClusterUnavailable(f"setting up {part} failed: {answer}. The commands were:\n{lines}")
