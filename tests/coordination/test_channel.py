"""Connections between ranks for short messages, and the channel that uses them.

Prevents: strangers that are taken for ranks, two ranks that both only send, waits that nobody can end, and errors that
do not say who is missing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Algorithm, LaneError, LaneTimeout, Recv, Send
from ddp_hooks.comm.failure import FailureStore
from ddp_hooks.comm.torch_compat.distributed import default_store
from ddp_hooks.coordination.control import mesh
from ddp_hooks.coordination.control.channel import ControlChannel
from tests.support.workers import WorkerPools

# -- connections ------------------------------------------------------------------------------------------------------


class Meeting:
    """Ranks that are threads, and learn each other's places."""

    def __init__(self, world_size: int) -> None:
        self.places: dict[int, mesh.Place] = {}
        self._world_size = world_size

    def connect(self, rank: int) -> dict[int, socket.socket]:
        failures: Any = SimpleNamespace(check_peers=lambda: None)

        def exchange(place: mesh.Place) -> list[mesh.Place]:
            self.places[rank] = place
            while len(self.places.keys() & set(range(rank))) < rank:
                time.sleep(0.01)
            return [self.places[peer] for peer in range(rank)]  # it connects to these

        return mesh.connect_all(exchange, rank, self._world_size, 20.0, failures)


def connected(world_size: int) -> list[dict[int, socket.socket]]:
    """Of each rank its connections."""
    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(Meeting(world_size).connect, range(world_size)))


def check(peers: list[dict[int, socket.socket]]) -> None:
    for rank, own in enumerate(peers):
        assert sorted(own) == [peer for peer in range(len(peers)) if peer != rank]
        for peer, connection in own.items():
            connection.sendall(bytes([rank, peer]))
    for rank, own in enumerate(peers):
        assert {peer: connection.recv(2) for peer, connection in own.items()} == {p: bytes([p, rank]) for p in own}
    for own in peers:
        for connection in own.values():
            connection.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_pair_is_connected(world_size: int) -> None:
    check(connected(world_size))


def test_strangers_are_turned_away() -> None:
    """One that says nothing right, one that claims to be a rank, and one that goes at once."""
    meeting, found = Meeting(2), list[bytes]()

    def disturb() -> None:
        while 0 not in meeting.places:
            time.sleep(0.01)
        port = meeting.places[0].port
        for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 16 + (1).to_bytes(4, "little"), b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(greeting)
                stranger.shutdown(socket.SHUT_WR)
                found.append(stranger.recv(1))

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(meeting.connect, 0)
        threads.submit(disturb).result()
        second = threads.submit(meeting.connect, 1)
        check([first.result(), second.result()])
    assert found == [b"", b"", b""]


def test_the_address_that_answers_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:  # of a stranger, who has an address of the same text
        other_port = other.getsockname()[1]
        threading.Thread(target=lambda: other.accept()[0].close(), daemon=True).start()
        place = mesh.Place(["127.0.0.1"], other_port, bytes(16))
        with pytest.raises(LaneError, match=r"rank 1 of the group cannot reach rank 0, port \d+ \(127.0.0.1: "):
            mesh._connect(place, 1, 0, time.monotonic() + 5)
    monkeypatch.setattr(mesh, "own_addresses", lambda: ["127.0.0.7.not.an.address", "127.0.0.1"])
    check(connected(2))


def test_who_does_not_come_is_named() -> None:
    no_failures: Any = SimpleNamespace(check_peers=lambda: None)
    with pytest.raises(LaneTimeout, match=r"ranks \[1, 2\] of the group did not connect in time"):
        mesh.connect_all(lambda place: [place] * 3, 0, 3, 0.3, no_failures)


def test_who_gave_up_is_named() -> None:
    failures: Any = SimpleNamespace(check_peers=lambda: "rank 1 ended first, with no way to rank 0")
    start_s = time.monotonic()
    with pytest.raises(LaneError, match="ranks cannot connect: rank 1 ended first, with no way to rank 0"):
        mesh.connect_all(lambda place: [place] * 2, 0, 2, 60.0, failures)
    assert time.monotonic() - start_s < 30


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert mesh.own_addresses() == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0,lo")
    assert mesh.own_addresses() == ["127.0.0.1"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert mesh.own_addresses()[0] == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    assert mesh.own_addresses()[-1] == "127.0.0.1"


# -- the channel ------------------------------------------------------------------------------------------------------


def channel(timeout_s: float = 20.0) -> ControlChannel:
    group = dist.new_group(list(range(dist.get_world_size())))
    assert isinstance(group, dist.ProcessGroup)
    ranks = dist.get_process_group_ranks(group)
    failures = FailureStore(default_store(), f"test {group.group_name}", dist.get_rank(), ranks)
    return ControlChannel(group, timeout_s, failures)


def to_all_others(rank: int, world_size: int, numel: int, received: list[Tensor]) -> Algorithm:
    """Everybody sends first, more than connections hold; two messages to each and one of nothing, then a short one."""
    others = [peer for peer in range(world_size) if peer != rank]
    sends = [Send(peer, torch.full((numel,), 10 * rank + part)) for peer in others for part in range(2)]
    receives = [Recv(peer, torch.empty(numel, dtype=torch.int64)) for peer in others for _ in range(2)]
    nothing = torch.empty(0)
    yield [*sends, *(each(peer, nothing) for peer in others for each in (Send, Recv)), *receives]
    short = [Recv(peer, torch.empty(1, dtype=torch.int64)) for peer in others]
    yield [*(Send(peer, torch.tensor([rank])) for peer in others), *short]
    received += [each.tensor for each in (*receives, *short)]


def exchange(rank: int, world_size: int, numel: int) -> bool:
    made, received = channel(), list[Tensor]()
    made.run(to_all_others(rank, world_size, numel, received), "everything")
    others = [peer for peer in range(world_size) if peer != rank]
    expected = [torch.full((numel,), 10 * peer + part) for peer in others for part in range(2)]
    expected += [torch.tensor([peer]) for peer in others]
    nbytes = (2 * numel + 1) * 8 * len(others)
    assert (made.traffic.sent_bytes, made.traffic.received_bytes) == (nbytes, nbytes)
    assert made.num_sent == 4 * len(others)
    made.close()
    return all(torch.equal(a, b) for a, b in zip(received, expected, strict=True))


@pytest.mark.quick("*-3")
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("numel", [0, 1, 3_000_000])
def test_messages_of_any_size(workers: WorkerPools, world_size: int, numel: int) -> None:
    assert all(workers(world_size).run(exchange, numel))


def again(rank: int, world_size: int) -> int:
    """The same tensors with other contents, among many that are used once; how many of those are remembered."""
    made = channel()
    sent, received = torch.zeros(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    part_of_more = torch.zeros(5000, dtype=torch.uint8)[:3]
    for number in range(100):
        sent.fill_(number)
        once = torch.tensor([number, rank])
        arrived = torch.empty_like(once)
        round_trip = [Recv(1 - rank, received), Send(1 - rank, sent), Recv(1 - rank, arrived), Send(1 - rank, once)]
        made.run(iter([round_trip, [Recv(1 - rank, part_of_more), Send(1 - rank, sent)]]), "again")  # type: ignore[arg-type]
        assert received.tolist() == part_of_more.tolist() == [number] * 3
        assert arrived.tolist() == [number, 1 - rank]
        assert all(tensor is not part_of_more for tensor, _ in made._views.values()), "it would keep more than it is"
    remembered = len(made._views)
    made.close()
    assert not made._views
    return remembered


def test_memory_of_tensors_is_remembered(workers: WorkerPools) -> None:
    assert all(2 < each <= 64 for each in workers(2).run(again))


def wake_up(rank: int, world_size: int) -> dict[str, Any]:
    """How sleeps end: by another thread, before or while it sleeps, by another rank's message, or by themselves."""
    made = channel()
    seconds: dict[str, float] = {}

    def sleep(name: str, longest_s: float) -> None:
        start_s = time.monotonic()
        made.sleep(longest_s)
        seconds[name] = time.monotonic() - start_s

    made.wake()
    sleep("woken before", 30)
    threading.Timer(0.2, made.wake).start()
    sleep("woken meanwhile", 30)
    sleep("for itself", 0.05)
    dist.barrier()
    heard = made.peer_has_begun
    dist.barrier()
    token = torch.zeros(1)
    if rank == 0:
        made.run(iter([[Send(1, token)]]), "a message")  # type: ignore[arg-type]
    else:
        sleep("a message", 30)
        assert made.peer_has_begun
        sleep("the same message again", 30)  # it may have come after the caller has looked
        start_s = time.monotonic()
        made.sleep(0.1, ignore_peers=True)
        assert time.monotonic() - start_s > 0.05
        made.run(iter([[Recv(0, token)]]), "a message")  # type: ignore[arg-type]
        assert not made.peer_has_begun
    dist.barrier()
    made.close()
    made.wake()
    return {"heard": heard, "slept": [name for name, each in seconds.items() if each > 20]}


def test_how_sleep_ends(workers: WorkerPools) -> None:
    assert workers(2).run(wake_up) == [{"heard": False, "slept": []}] * 2


def fails(rank: int, world_size: int, way: str) -> str:
    """Rank 1 does not send what rank 0 waits for: it has let go, ended, or does something else."""
    made = channel(1.0 if way == "nothing" else 20.0)
    try:
        if rank == 1:
            made.abort() if way == "abort" else made.close() if way == "close" else time.sleep(2.0)
            return ""
        made.run(iter([[Recv(1, torch.zeros(1))]]), "a message")  # type: ignore[arg-type]
        return "nothing was raised"
    except LaneError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()
        made.close()


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("abort", "LaneError: rank 0, control: a message, round 0, from rank 1 failed (connection closed by peer)"),
        ("close", "LaneError: rank 0, control: a message, round 0, from rank 1 failed (connection closed by peer)"),
        ("nothing", "LaneTimeout: rank 0, control: a message, round 0, from rank 1 timed out waiting for rank 1"),
    ],
)
def test_what_does_not_come_is_named(workers: WorkerPools, way: str, expected: str) -> None:
    message = workers(2).run(fails, way)[0]
    assert message.startswith(expected) and "docs/troubleshooting.md#" in message


def let_go_while_waiting(rank: int, world_size: int) -> str:
    """Another thread of this rank ends its wait."""
    made, threads = channel(), ThreadPoolExecutor(1)
    waiting: Callable[[], None] = lambda: made.run(iter([[Recv(1 - rank, torch.zeros(1))]]), "x")  # type: ignore[arg-type] # noqa: E731
    future = threads.submit(waiting)
    while "round 0" not in made.describe():
        time.sleep(0.01)
    dist.barrier()
    made.abort()
    error = future.exception(20)
    dist.barrier()
    made.close()
    return type(error).__name__


def test_a_wait_can_be_ended(workers: WorkerPools) -> None:
    assert workers(2).run(let_go_while_waiting) == ["LaneError", "LaneError"]
