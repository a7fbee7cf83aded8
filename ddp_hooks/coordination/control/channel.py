"""Channel for short messages between ranks that mostly have nothing to say.

One thread runs algorithms, one after the other. In between it sleeps until another rank's message begins the next
algorithm, or until another thread wakes it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import Algorithm, LaneError, Patience, Recv, Round, Traffic, gather_objects, num_rounds
from ddp_hooks.comm.failure import FailureStore
from ddp_hooks.coordination.control.mesh import connect_all

_LONGEST_SLEEP_S = 3600.0
_SMALL_BYTES, _MAX_VIEWS = 1024, 64  # tensors whose memory is found without asking torch

_Message: TypeAlias = tuple[int, memoryview]  # a peer, and the rest of what is sent to it or received


class ControlChannel:
    """Connections of this rank to all others; creating them is collective."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, failures: FailureStore) -> None:
        self.traffic = Traffic()
        self.num_sent = 0  # messages
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)  # as messages call them
        self.failures = failures
        self._timeout_s = timeout_s  # of a wait for a message within an algorithm
        self._round: str | None = None  # in which this rank is
        self._waits_for = ""  # direction and peers
        self._views: dict[int, tuple[Tensor, memoryview]] = {}  # by id of the tensor, which is kept alive
        self._peers = connect_all(
            lambda place: gather_objects(place, group, "the set-up of Coordinator", Patience(timeout_s)),
            self.rank, self.world_size, timeout_s, failures,
        )  # fmt: skip
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poll_peers, self._poll_wakes, self._poll_both = select.poll(), select.poll(), select.poll()
        for poll in (self._poll_wakes, self._poll_both):
            poll.register(self._woken, select.POLLIN)
        # A rank that begins an algorithm sends the messages of its first rounds to these neighbours.
        for neighbour in {(self.rank - (1 << index)) % self.world_size for index in range(num_rounds(self.world_size))}:
            for poll in (self._poll_peers, self._poll_both):
                poll.register(self._peers[neighbour], select.POLLIN)

    @property
    def peer_has_begun(self) -> bool:
        """True if another rank has begun the next algorithm, or its connection is broken."""
        return bool(self._peers) and bool(self._poll_peers.poll(0))

    def sleep(self, longest_s: float, ignore_peers: bool = False) -> None:
        """Sleep until :meth:`wake`, a message of another rank (unless ``ignore_peers``), or ``longest_s`` seconds."""
        if longest_s < 0.001:  # poll counts milliseconds
            time.sleep(max(0.0, longest_s))
        else:
            poll = self._poll_wakes if ignore_peers else self._poll_both
            poll.poll(min(longest_s, _LONGEST_SLEEP_S) * 1e3)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def wake(self) -> None:
        """End :meth:`sleep` of another thread, or its next one."""
        with contextlib.suppress(OSError):  # it is full, so that sleep ends anyway; or closed
            self._waker.send(b"\0")

    @torch.no_grad()
    def run(self, algorithm: Algorithm, label: str) -> None:
        """Run ``algorithm`` to its end; its tensors are contiguous, on CPUs."""
        for index, exchanges in enumerate(algorithm):
            self._round = f"{label}, round {index}"
            self._run_round(exchanges)
        self._round = None

    def describe(self) -> str:
        """Return the state of this rank, for messages; on any thread."""
        current = self._round
        return f"rank {self.ranks[self.rank]}, control: {f'{current}, {self._waits_for}' if current else 'idle'}"

    def close(self) -> None:
        """Close all connections; no message may be under way."""
        for each in (*self._peers.values(), self._woken, self._waker):
            each.close()
        self._views.clear()

    def abort(self) -> None:
        """Break all connections and wake the thread that waits, after the failure is noted: peers read the note."""
        for each in self._peers.values():
            with contextlib.suppress(OSError):  # the other side has ended it
                each.shutdown(socket.SHUT_RDWR)
        self.wake()

    def _run_round(self, exchanges: Round) -> None:
        outgoing: list[_Message] = []
        incoming: list[_Message] = []
        for exchange in exchanges:
            data = self._bytes_of(exchange.tensor)
            if isinstance(exchange, Recv):
                incoming += [(exchange.peer, data)] if data else []
                self.traffic.received_bytes += len(data)
            else:
                outgoing.append((exchange.peer, data))
                self.traffic.sent_bytes += len(data)
                self.num_sent += 1
        self.traffic.rounds += 1
        outgoing = _move(outgoing, self._peers, self._send)
        while outgoing:  # connections are full: two ranks that only send would wait for each other
            ready = self._wait_for_any(outgoing, incoming)
            outgoing = _move(outgoing, ready, self._send)
            incoming = _move(incoming, ready, lambda peer, data: self._receive(peer, data, socket.MSG_DONTWAIT))
        for peer, data in incoming:
            while data:
                data = data[self._receive(peer, data, socket.MSG_WAITALL) :]

    def _wait_for_any(self, outgoing: Sequence[_Message], incoming: Sequence[_Message]) -> Collection[int]:
        """Return the peers that can take or give bytes, when there are some."""
        ways = dict.fromkeys((peer for peer, _ in incoming), select.POLLIN)
        for peer, _ in outgoing:
            ways[peer] = ways.get(peer, 0) | select.POLLOUT
        poll = select.poll()
        for peer, way in ways.items():
            poll.register(self._peers[peer], way)
        self._waits_for = f"with ranks {sorted(self.ranks[peer] for peer in ways)}"
        numbers = {number for number, _ in poll.poll(self._timeout_s * 1e3)}
        if not numbers:
            raise self._failure(next(iter(ways)))
        return {peer for peer in ways if self._peers[peer].fileno() in numbers}

    def _bytes_of(self, tensor: Tensor) -> memoryview:
        """Return the memory of ``tensor``; remember it for small tensors, which algorithms use again and again."""
        known = self._views.get(id(tensor))
        if known is not None and known[0] is tensor:
            return known[1]
        array: Any = tensor.numpy()
        data = memoryview(array).cast("B") if tensor.numel() else memoryview(b"")
        if tensor.untyped_storage().nbytes() <= _SMALL_BYTES:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[id(tensor)] = (tensor, data)
        return data

    def _send(self, peer: int, data: memoryview) -> int:
        """Send as many bytes as the connection takes at once; return their number."""
        self._waits_for = f"to rank {self.ranks[peer]}"
        try:
            return self._peers[peer].send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._failure(peer, error) from error

    def _receive(self, peer: int, data: memoryview, flags: int) -> int:
        self._waits_for = f"from rank {self.ranks[peer]}"
        try:
            num_received = self._peers[peer].recv_into(data, len(data), flags)
        except BlockingIOError as error:
            if flags & socket.MSG_DONTWAIT:
                return 0
            raise self._failure(peer) from error
        except OSError as error:
            raise self._failure(peer, error) from error
        if num_received == 0:
            raise self._failure(peer, ConnectionError("connection closed by peer"))
        return num_received

    def _failure(self, peer: int, error: OSError | None = None) -> LaneError:
        error = error if error is not None else TimeoutError(f"timed out after {self._timeout_s:g} s")
        return self.failures.failure_of(error, self.ranks[peer], self.describe())


def _move(
    messages: Sequence[_Message], ready: Collection[int], move: Callable[[int, memoryview], int]
) -> list[_Message]:
    """Move messages of ready peers as far as they go; return the rest of all messages, which nothing overtakes."""
    left: list[_Message] = []
    stopped: set[int] = set()
    for peer, data in messages:
        rest = data[move(peer, data) :] if peer in ready and peer not in stopped else data
        if rest:
            stopped.add(peer)
            left.append((peer, rest))
    return left
