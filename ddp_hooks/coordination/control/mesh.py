"""TCP connections between all ranks of a group, one for each pair.

They carry messages of a few bytes. An AND over eight ranks on two cores takes 4 to 6 ms with gloo, and less than 0.5 ms
with plain sockets, because no other thread stands between a socket and the thread that waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ddp_hooks.comm import LaneError, LaneTimeout, see
from ddp_hooks.comm.failure import FailureStore

logger = logging.getLogger("ddp_hooks")

_SIOCGIFADDR = 0x8915
_CONNECT_S = 5.0  # for one address of a rank
_CHECK_S = 1.0  # between two questions whether another rank has given up
_TOKEN_BYTES = 16
_RANK_BYTES = 4
_WELCOME = b"\x01"


class Place(NamedTuple):
    """Where a rank listens, and the token that it asks for."""

    addresses: list[str]
    port: int
    token: bytes


def connect_all(
    exchange: Callable[[Place], Sequence[Place]], rank: int, world_size: int, timeout_s: float, failures: FailureStore
) -> dict[int, socket.socket]:
    """Return a connected socket for every other rank; collective.

    A rank connects to all lower ranks, and accepts all higher ranks, if they send its token. ``exchange`` returns the
    places of all ranks; ``timeout_s`` is for all connections together, and for every later message.
    """
    if world_size == 1:
        return {}
    token = secrets.token_bytes(_TOKEN_BYTES)
    peers: dict[int, socket.socket] = {}
    with _listener(world_size) as listener:
        places = exchange(Place(own_addresses(), listener.getsockname()[1], token))
        deadline_s = time.monotonic() + timeout_s
        try:
            for peer in range(rank):
                peers[peer] = _connect(places[peer], rank, peer, deadline_s)
            _accept(listener, token, set(range(rank + 1, world_size)), peers, deadline_s, failures)
        except BaseException:
            for each in peers.values():
                each.close()
            raise
    seconds, microseconds = divmod(max(1, int(timeout_s * 1e6)), 1_000_000)
    for each in peers.values():
        each.settimeout(None)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send short messages at once
        each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notice a peer that is gone
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, microseconds))
    return peers


def own_addresses() -> list[str]:
    """Return the addresses of this process, the likeliest first; as gloo, by name of the interface or of the host."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    found = [address for name in interfaces if (address := _address_of(name)) is not None]
    if not found:
        hosts = (os.environ.get("MASTER_ADDR", ""), socket.gethostname())
        found = [*(address for host in hosts for address in _on_the_way_to(host)), "127.0.0.1"]
    return list(dict.fromkeys(found))


def _address_of(interface: str) -> str | None:
    import fcntl  # not everywhere

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:  # there is none, or it has no IPv4 address
            logger.warning("GLOO_SOCKET_IFNAME: interface %s has no IPv4 address (%s)", interface, error)
            return None
    return socket.inet_ntoa(answer[20:24])


def _on_the_way_to(host: str) -> list[str]:
    """Return this host's addresses on the way to another host; nothing is sent."""
    found = []
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ():
            with contextlib.suppress(OSError), socket.socket(family, kind) as any_socket:
                any_socket.connect(address)
                found.append(str(any_socket.getsockname()[0]))
    return found


def _listener(backlog: int) -> socket.socket:
    try:
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    except (OSError, ValueError):
        return socket.create_server(("", 0), backlog=backlog)


def _connect(place: Place, rank: int, peer: int, deadline_s: float) -> socket.socket:
    """Return a connection to the first address that knows the token; another process may have such an address, too."""
    errors = []
    for address in place.addresses:
        try:
            return _greet((address, place.port), place.token + rank.to_bytes(_RANK_BYTES, "little"), deadline_s)
        except OSError as error:
            errors.append(f"{address}: {error}")
    raise LaneError(
        f"rank {rank} of the group cannot reach rank {peer}, port {place.port} ({'; '.join(errors)}): name the "
        f"interface that joins your machines, as GLOO_SOCKET_IFNAME=eth0{see('a-wait-timed-out')}"
    )


def _greet(address: tuple[str, int], hello: bytes, deadline_s: float) -> socket.socket:
    found = socket.create_connection(address, timeout=_CONNECT_S)
    try:
        found.sendall(hello)
        found.settimeout(_left_s(deadline_s))
        if found.recv(1) != _WELCOME:
            raise ConnectionError("another process answers")
    except OSError:
        found.close()
        raise
    return found


def _accept(
    listener: socket.socket,
    token: bytes,
    missing: set[int],
    peers: dict[int, socket.socket],
    deadline_s: float,
    failures: FailureStore,
) -> None:
    """Add connections of the ``missing`` ranks to ``peers``."""
    while missing:
        listener.settimeout(min(_CHECK_S, _left_s(deadline_s)))
        try:
            found, _ = listener.accept()
        except TimeoutError as error:
            if (failure := failures.check_peers()) is not None:
                raise LaneError(f"ranks cannot connect: {failure}{see('a-rank-died', quoted=failure)}") from error
            if time.monotonic() < deadline_s:
                continue
            raise LaneTimeout(
                f"ranks {sorted(missing)} of the group did not connect in time{see('a-wait-timed-out')}"
            ) from error
        found.settimeout(_CONNECT_S)
        try:
            with found.makefile("rb") as stream:
                hello = stream.read(_TOKEN_BYTES + _RANK_BYTES)
            peer = int.from_bytes(hello[_TOKEN_BYTES:], "little")
            if not secrets.compare_digest(hello[:_TOKEN_BYTES], token) or peer not in missing:
                raise ConnectionError("a stranger")
            found.sendall(_WELCOME)
        except OSError as error:
            logger.debug("turned away: %s", error)
            found.close()
            continue
        missing.remove(peer)
        peers[peer] = found


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
