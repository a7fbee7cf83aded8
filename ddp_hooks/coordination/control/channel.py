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

from ddp_hooks.comm import Algorithm, LaneError, Recv, Round, Send, Traffic, num_rounds
from ddp_hooks.comm.failure import FailureStore
from ddp_hooks.comm.torch_compat.distributed import default_store
from ddp_hooks.coordination.control.mesh import connect_all

_LONGEST_SLEEP_S = 3600.0
_SMALL_BYTES, _MAX_VIEWS = 1024, 64  # tensors whose memory is found without asking torch

_Message: TypeAlias = tuple[int, memoryview]
"""A peer, and the rest of what is sent to it or received."""


class ControlChannel:
    """Connections of this rank to all others; creating them is collective.

    Args:
        group: the ranks.
        timeout_s: longest wait for a message within an algorithm.
        failures: knows of ranks that failed.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, failures: FailureStore) -> None:
        self.traffic = Traffic()
        self.num_sent = 0  # messages
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)  # as messages call them
        self.failures = failures
        self._timeout_s = timeout_s
        self._state: tuple[str, int, str, tuple[int, ...]] | None = None  # label, round, direction, peers
        self._views: dict[int, tuple[Tensor, memoryview]] = {}  # by id of the tensor, which is kept alive
        key = f"{failures.prefix}/control"
        self._peers = connect_all(default_store(), key, self.rank, self.world_size, timeout_s, failures)
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
        """Run ``algorithm`` to its end; its tensors are contiguous, on CPUs.

        Raises:
            LaneError: another rank died.
            LaneTimeout: a message did not come in time.
        """
        for index, next_round in enumerate(algorithm):
            self._run_round(next_round, label, index)
        self._state = None

    def describe(self) -> str:
        """Return the state of this rank, for messages; on any thread."""
        text, state = "idle", self._state
        if state is not None:
            label, round_index, direction, peers = state
            others = sorted(self.ranks[peer] for peer in peers)
            whom = f"ranks {others}" if direction == "with" else f"rank {others[0]}"
            text = f"{label}, round {round_index}, {direction} {whom}"
        return f"rank {self.ranks[self.rank]}, control: {text}"

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

    def _run_round(self, exchanges: Round, label: str, index: int) -> None:
        unsent: list[_Message] = []
        receiving: list[_Message] = []
        for exchange in exchanges:
            data = self._bytes_of(exchange.tensor)
            if isinstance(exchange, Recv):
                if data:
                    receiving.append((exchange.peer, data))
                self.traffic.received_bytes += len(data)
            elif isinstance(exchange, Send):
                self._state = label, index, "to", (exchange.peer,)
                # Nothing overtakes a message that is left over.
                is_full = bool(unsent) and any(peer == exchange.peer for peer, _ in unsent)
                num_sent = 0 if is_full else self._send(exchange.peer, data)
                self.num_sent += 1
                self.traffic.sent_bytes += len(data)
                if num_sent < len(data):
                    unsent.append((exchange.peer, data[num_sent:]))
        self.traffic.rounds += 1
        if unsent:
            self._run_interleaved(unsent, receiving, label, index)
            return
        for peer, data in receiving:
            self._state = label, index, "from", (peer,)
            while data:
                data = data[self._receive(peer, data, socket.MSG_WAITALL) :]

    def _run_interleaved(
        self, outgoing: Sequence[_Message], incoming: Sequence[_Message], label: str, index: int
    ) -> None:
        """Send and receive at once more than connections hold: two ranks that only send would wait for each other."""
        while outgoing or incoming:
            ways = dict.fromkeys((peer for peer, _ in incoming), select.POLLIN)
            for peer, _ in outgoing:
                ways[peer] = ways.get(peer, 0) | select.POLLOUT
            poll = select.poll()
            for peer, way in ways.items():
                poll.register(self._peers[peer], way)
            self._state = label, index, "with", tuple(ways)
            numbers = {number for number, _ in poll.poll(self._timeout_s * 1e3)}
            ready = {peer for peer in ways if self._peers[peer].fileno() in numbers}
            if not ready:
                raise self._failure(self._timeout(), next(iter(ways)))
            outgoing = _move(outgoing, ready, self._send)
            incoming = _move(incoming, ready, lambda peer, data: self._receive(peer, data, socket.MSG_DONTWAIT))

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
        try:
            return self._peers[peer].send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._failure(error, peer) from error

    def _receive(self, peer: int, data: memoryview, flags: int) -> int:
        try:
            num_received = self._peers[peer].recv_into(data, len(data), flags)
        except BlockingIOError as error:
            if flags & socket.MSG_DONTWAIT:
                return 0
            raise self._failure(self._timeout(), peer) from error
        except OSError as error:
            raise self._failure(error, peer) from error
        if num_received == 0:
            raise self._failure(ConnectionError("connection closed by peer"), peer)
        return num_received

    def _timeout(self) -> TimeoutError:
        return TimeoutError(f"timed out after {self._timeout_s:g} s")

    def _failure(self, error: OSError, peer: int) -> LaneError:
        return self.failures.failure_of(error, self.ranks[peer], self.describe())


def _move(
    messages: Sequence[_Message], ready: Collection[int], move: Callable[[int, memoryview], int]
) -> list[_Message]:
    """Move the first message of each ready peer as far as it goes; return the rest of all messages."""
    left: list[_Message] = []
    seen: set[int] = set()
    for peer, data in messages:
        rest = data[move(peer, data) :] if peer in ready and peer not in seen else data
        seen.add(peer)
        if rest:
            left.append((peer, rest))
    return left
