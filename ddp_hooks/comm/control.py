"""A channel for short messages between ranks that mostly have nothing to say.

Algorithms run one after the other on the thread that calls. In between that thread sleeps until another rank's message
comes, which begins the next algorithm, or until another thread wakes it. Nobody asks again and again, so that waiting
costs nothing, and no other thread stands between a message and who waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import torch_compat
from ddp_hooks.comm.accounting import Traffic
from ddp_hooks.comm.algorithms.bruck import num_rounds
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Round, Send
from ddp_hooks.comm.failure import FailureStore, LaneError
from ddp_hooks.comm.mesh import connect_all

logger = logging.getLogger("ddp_hooks")

_LONGEST_SLEEP_S = 3600.0
_SMALL_BYTES, _NUM_REMEMBERED = 1024, 64  # of tensors whose memory is found without asking torch


class ControlChannel:
    """See the module.

    Args:
        group: the ranks; creating the channel is collective over them, and connects each with all others.
        timeout_s: a message that is expected within an algorithm fails after so long.
        witness: who knows of ranks that failed.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, witness: FailureStore) -> None:
        self.traffic = Traffic()
        self.num_sent = 0  # messages
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)  # as messages call them
        self.witness = witness
        self._timeout_s = timeout_s
        self._doing: _Doing | None = None
        self._views: dict[int, tuple[Tensor, memoryview]] = {}  # by the tensor's id, which is its own while it is here
        key = f"{witness.prefix}/control"
        self._peers = connect_all(torch_compat.default_store(), key, self.rank, self.world_size, timeout_s, witness)
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._heard, self._wakes, self._anything = select.poll(), select.poll(), select.poll()
        for poll in (self._wakes, self._anything):
            poll.register(self._woken, select.POLLIN)
        # Who begins an algorithm is heard of by one of these: to them the first rounds' messages go.
        for neighbour in {(self.rank - (1 << index)) % self.world_size for index in range(num_rounds(self.world_size))}:
            for poll in (self._heard, self._anything):
                poll.register(self._peers[neighbour], select.POLLIN)

    @property
    def has_heard(self) -> bool:
        """Whether another rank has begun the next algorithm, or its message cannot come any more."""
        return bool(self._peers) and bool(self._heard.poll(0))

    def sleep(self, longest_s: float, knows: bool = False) -> None:
        """Until :attr:`has_heard`, unless the caller ``knows`` that already, or :meth:`wake`, or for so long."""
        if longest_s < 0.001:  # poll counts milliseconds
            time.sleep(max(0.0, longest_s))
        else:
            poll = self._wakes if knows else self._anything
            poll.poll(min(longest_s, _LONGEST_SLEEP_S) * 1e3)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def wake(self) -> None:
        """End :meth:`sleep`, on another thread, or the next one."""
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
        self._doing = None

    def describe(self) -> str:
        """Where this rank is, for messages."""
        doing = self._doing  # of another thread, mostly
        return f"rank {self.ranks[self.rank]}, control: {'idle' if doing is None else doing.text(self.ranks)}"

    def close(self) -> None:
        """End. Nothing may be expected any more."""
        for each in (*self._peers.values(), self._woken, self._waker):
            each.close()
        self._views.clear()

    def let_go(self) -> None:
        """Break the connections, after a failure that is noted: whoever waits for this rank reads the note, and ends.

        Also the thread of this rank that waits.
        """
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
                self._doing = _Doing(label, index, "to", (exchange.peer,))
                # Nothing overtakes what is left over.
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
            self._doing = _Doing(label, index, "from", (peer,))
            while data:
                data = data[self._receive(peer, data, socket.MSG_WAITALL) :]

    def _run_interleaved(
        self, unsent: Sequence[_Message], receiving: Sequence[_Message], label: str, index: int
    ) -> None:
        """More than connections hold: two ranks that only sent would wait for each other."""
        outgoing, incoming = list(unsent), list(receiving)
        while outgoing or incoming:
            ways = dict.fromkeys((peer for peer, _ in incoming), select.POLLIN)
            for peer, _ in outgoing:
                ways[peer] = ways.get(peer, 0) | select.POLLOUT
            poll = select.poll()
            for peer, way in ways.items():
                poll.register(self._peers[peer], way)
            self._doing = _Doing(label, index, "with", tuple(ways))
            numbers = {number for number, _ in poll.poll(self._timeout_s * 1e3)}
            ready = {peer for peer in ways if self._peers[peer].fileno() in numbers}
            if not ready:
                raise self._failure(TimeoutError(f"timed out after {self._timeout_s:g} s"), next(iter(ways)))
            outgoing = _moved(outgoing, ready, self._send)
            incoming = _moved(incoming, ready, lambda peer, data: self._receive(peer, data, socket.MSG_DONTWAIT))

    def _bytes_of(self, tensor: Tensor) -> memoryview:
        """Its memory; of small tensors, which algorithms use again and again, remembered."""
        known = self._views.get(id(tensor))
        if known is not None and known[0] is tensor:
            return known[1]
        array: Any = tensor.numpy()
        data = memoryview(array).cast("B") if tensor.numel() else memoryview(b"")
        if tensor.untyped_storage().nbytes() <= _SMALL_BYTES:
            if len(self._views) >= _NUM_REMEMBERED:
                self._views.clear()
            self._views[id(tensor)] = (tensor, data)
        return data

    def _send(self, peer: int, data: memoryview) -> int:
        """As many bytes as the connection takes at once."""
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
            raise self._failure(TimeoutError(f"timed out after {self._timeout_s:g} s"), peer) from error
        except OSError as error:
            raise self._failure(error, peer) from error
        if num_received == 0:
            raise self._failure(ConnectionError("connection closed by peer"), peer)
        return num_received

    def _failure(self, error: OSError, peer: int) -> LaneError:
        return self.witness.failure_of(error, self.ranks[peer], self.describe())


class _Doing(NamedTuple):
    """What a rank does; put into words only when somebody asks."""

    label: str
    round_index: int
    way: str  # "to", "from" or "with"
    peers: tuple[int, ...]

    def text(self, ranks: Sequence[int]) -> str:
        others = sorted(ranks[peer] for peer in self.peers)
        whom = f"ranks {others}" if self.way == "with" else f"rank {others[0]}"
        return f"{self.label}, round {self.round_index}, {self.way} {whom}"


_Message: TypeAlias = tuple[int, memoryview]
"""A peer, and what is still to be sent to it or received."""


def _moved(
    waiting: Sequence[_Message], ready: Collection[int], move: Callable[[int, memoryview], int]
) -> list[_Message]:
    """What is left when of each peer that is ready the first message has moved as far as it does."""
    left: list[_Message] = []
    seen: set[int] = set()
    for peer, data in waiting:
        rest = data[move(peer, data) :] if peer in ready and peer not in seen else data
        seen.add(peer)
        if rest:
            left.append((peer, rest))
    return left
