"""TCP connections between all ranks of a group, one for each pair, arranged through the rendezvous store.

For messages of a few bytes: on two cores an AND over eight ranks takes gloo 4 to 6 ms, and plain sockets less than half
a millisecond, as no other thread stands between the socket and who waits for it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ddp_hooks.comm.advice import see
from ddp_hooks.comm.failure import FailureStore, LaneError, LaneTimeout

logger = logging.getLogger("ddp_hooks")

_SIOCGIFADDR = 0x8915
_TRY_S = 5.0  # for one address of a rank
_PAUSE_S = 0.005  # between two looks for another rank's address
_LOOK_S = 1.0  # how often it is seen whether another rank has given up
_TOKEN_BYTES = 16
_RANK = struct.Struct("<I")
_WELCOME = b"\x01"


def connect_all(
    store: Any, key: str, rank: int, world_size: int, timeout_s: float, witness: FailureStore | None = None
) -> dict[int, socket.socket]:
    """A connected socket for every other rank; collective.

    Every rank connects to those below it, at the addresses that they have left in the store, and accepts the others.
    Who does not know what is written there is turned away.

    Args:
        store: where ranks find each other.
        key: of this group alone.
        rank, world_size: within the group.
        timeout_s: for everything, and for every later message.
        witness: who knows of ranks that could not connect.

    Raises:
        LaneTimeout: a rank did not come.
        LaneError: none of a rank's addresses can be reached.
    """
    if world_size == 1:
        return {}
    deadline_s = time.monotonic() + timeout_s
    token = secrets.token_bytes(_TOKEN_BYTES)
    peers: dict[int, socket.socket] = {}
    with _listener(world_size) as listener:
        place = {"addresses": own_addresses(), "port": listener.getsockname()[1], "token": token.hex()}
        store.set(f"{key}/{rank}", json.dumps(place))
        try:
            for peer in range(rank):
                place = _place_of(store, f"{key}/{peer}", peer, deadline_s, witness)
                peers[peer] = _connect(place, rank, peer, deadline_s)
            _accept(listener, token, range(rank + 1, world_size), peers, deadline_s, witness)
        except BaseException:
            for each in peers.values():
                each.close()
            raise
    with contextlib.suppress(Exception):  # everybody has read it; a store that cannot forget keeps it
        store.delete_key(f"{key}/{rank}")
    for each in peers.values():
        _prepare(each, timeout_s)
    return peers


def own_addresses() -> list[str]:
    """Where this process may be reached, the most likely first: as gloo has it, by name of interface or of the host."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    found = [address for name in interfaces if (address := _address_of(name)) is not None]
    if not found:
        found = [*_on_the_way_to(os.environ.get("MASTER_ADDR", "")), *_addresses_of(socket.gethostname()), "127.0.0.1"]
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
    """This host's address on its way to another one; nothing is sent."""
    found = []
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else ():
            with contextlib.suppress(OSError), socket.socket(family, kind) as any_socket:
                any_socket.connect(address)
                found.append(str(any_socket.getsockname()[0]))
    return found


def _addresses_of(host: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    return []


@contextlib.contextmanager
def _listener(backlog: int) -> Iterator[socket.socket]:
    """For IPv4 and, where there is any, IPv6."""
    try:
        made = socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    except (OSError, ValueError):
        made = socket.create_server(("", 0), backlog=backlog)
    with made:
        yield made


def _place_of(store: Any, key: str, peer: int, deadline_s: float, witness: FailureStore | None) -> dict[str, Any]:
    try:
        look_s = time.monotonic() + _LOOK_S
        while not store.check([key]):
            if time.monotonic() >= look_s:
                look_s += _LOOK_S
                _refuse_failure(witness)
            if time.monotonic() >= deadline_s:
                raise LaneTimeout(f"rank {peer} of the group did not come to connect{see('a-wait-timed-out')}")
            time.sleep(_PAUSE_S)
        found: dict[str, Any] = json.loads(store.get(key))
    except LaneError:
        raise
    except Exception as error:  # the kind differs by store
        _refuse_failure(witness)
        raise LaneError(f"the rendezvous store does not answer ({error}){see('a-rank-died')}") from error
    return found


def _refuse_failure(witness: FailureStore | None) -> None:
    """Raise if it is known that a rank died."""
    failure = None if witness is None else witness.check_peers()
    if failure is not None:
        raise LaneError(f"ranks cannot connect: {failure}{see('a-rank-died', quoted=failure)}")


def _connect(place: dict[str, Any], rank: int, peer: int, deadline_s: float) -> socket.socket:
    """Try all addresses; the one that welcomes this rank is right, whoever else may have such an address."""
    errors = []
    for address in place["addresses"]:
        try:
            found = socket.create_connection((address, place["port"]), timeout=_TRY_S)
        except OSError as error:
            errors.append(f"{address}: {error}")
            continue
        try:
            found.sendall(bytes.fromhex(place["token"]) + _RANK.pack(rank))
            found.settimeout(max(0.001, deadline_s - time.monotonic()))
            if found.recv(1) == _WELCOME:
                return found
            errors.append(f"{address}: another process answers")
        except OSError as error:
            errors.append(f"{address}: {error}")
        found.close()
    raise LaneError(
        f"rank {rank} of the group cannot reach rank {peer}, port {place['port']} ({'; '.join(errors)}): name the "
        f"interface that joins your machines, as GLOO_SOCKET_IFNAME=eth0{see('a-wait-timed-out')}"
    )


def _accept(
    listener: socket.socket,
    token: bytes,
    expected: Sequence[int],
    peers: dict[int, socket.socket],
    deadline_s: float,
    witness: FailureStore | None,
) -> None:
    missing = set(expected)
    while missing:
        listener.settimeout(min(_LOOK_S, max(0.001, deadline_s - time.monotonic())))
        try:
            found, _ = listener.accept()
        except TimeoutError as error:
            _refuse_failure(witness)
            if time.monotonic() < deadline_s:
                continue
            raise LaneTimeout(
                f"ranks {sorted(missing)} of the group did not connect in time{see('a-wait-timed-out')}"
            ) from error
        found.settimeout(_TRY_S)
        try:
            hello = _read(found, _TOKEN_BYTES + _RANK.size)
            (peer,) = _RANK.unpack(hello[_TOKEN_BYTES:])
            if not secrets.compare_digest(hello[:_TOKEN_BYTES], token) or peer not in missing:
                raise ConnectionError("a stranger")
            found.sendall(_WELCOME)
        except OSError as error:
            logger.debug("turned away: %s", error)
            found.close()
            continue
        missing.remove(peer)
        peers[peer] = found


def _read(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise ConnectionError("connection closed by peer")
        data += more
    return data


def _prepare(connection: socket.socket, timeout_s: float) -> None:
    """Short messages leave at once; a message that is waited for too long fails, and one that ended unseen does."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, max(0 if whole else 1, int((seconds - whole) * 1e6)))
