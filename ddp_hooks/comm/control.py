"""A channel for short messages between ranks that mostly have nothing to say.

Algorithms run one after the other on the thread that calls. In between a rank listens for its left neighbour's next
message: whoever begins an algorithm sends to its right neighbour, which hears it, begins too, and so on around. Nobody
asks again and again, so that waiting costs nothing.
"""

from __future__ import annotations

import datetime
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import compat
from ddp_hooks.comm.accounting import Traffic
from ddp_hooks.comm.advice import see
from ddp_hooks.comm.exchange import Algorithm, Recv
from ddp_hooks.comm.failure import LaneError, LaneTimeout, Witness

logger = logging.getLogger("ddp_hooks")

_LISTENING = datetime.timedelta(days=365)  # who listens has no reason to give up
_IDLE = "idle"
_TAG = 0
_TAG_OF_NOTHING = 1  # of messages that nobody sends


class _Heard(NamedTuple):
    """A message that is listened for."""

    buffer: Tensor
    handle: Any
    arrived: threading.Event
    errors: list[RuntimeError]


class ControlChannel:
    """See the module.

    Args:
        group: the ranks; creating the channel is collective over them, and makes a group of its own, on CPUs.
        timeout_s: a message that is expected within an algorithm fails after so long.
        witness: who knows of ranks that failed.
        wake: called on another thread when there is something to hear.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, witness: Witness, wake: Callable[[], None]) -> None:
        self.traffic = Traffic()
        self.num_sent = 0  # messages
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)  # as messages call them
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._wake = wake
        self._doing = _IDLE
        self._heard: _Heard | None = None  # what is listened for
        self._to_hear: queue.SimpleQueue[_Heard | None] = queue.SimpleQueue()
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        if self.world_size > 1:
            self._group = compat.new_group_like(group, "gloo", timeout_s, "ddp_hooks control")
            self._thread = threading.Thread(target=self._listen, name="ddp_hooks control listener", daemon=True)
            self._thread.start()
        self.witness = witness

    def listen(self, nbytes: int) -> None:
        """Expect the left neighbour's first message of the next algorithm, of so many bytes; see :attr:`has_heard`."""
        if self._group is None:
            return
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        try:
            handle = self._group.recv([buffer], self._left, _TAG)
        except RuntimeError as error:
            raise self._failure(error, self._left) from error
        self._heard = _Heard(buffer, handle, threading.Event(), [])
        self._to_hear.put(self._heard)

    @property
    def has_heard(self) -> bool:
        """Whether the message that is listened for has come, or cannot come any more."""
        return self._heard is not None and self._heard.arrived.is_set()

    @torch.no_grad()
    def run(self, algorithm: Algorithm, label: str) -> None:
        """Run ``algorithm`` to its end.

        Raises:
            LaneError: another rank died.
            LaneTimeout: a message did not come in time.
        """
        sent: list[tuple[int, Tensor, Any]] = []
        for index, next_round in enumerate(algorithm):
            receiving = []
            for exchange in next_round:
                assert self._group is not None, "one rank has nobody to talk to"
                self._doing = f"{label}, round {index}, with rank {self.ranks[exchange.peer]}"
                try:
                    if isinstance(exchange, Recv):
                        heard, self._heard = self._take_heard(exchange)
                        handle = None if heard else self._group.recv([exchange.tensor], exchange.peer, _TAG)
                        receiving.append((exchange, handle, heard))
                    else:
                        handle = self._group.send([exchange.tensor], exchange.peer, _TAG)
                        sent.append((exchange.peer, exchange.tensor, handle))
                except RuntimeError as error:
                    raise self._failure(error, exchange.peer) from error
            for exchange, handle, heard in receiving:
                self._doing = f"{label}, round {index}, from rank {self.ranks[exchange.peer]}"
                if heard is not None:
                    self._hear(heard, exchange)
                else:
                    self._complete(handle, exchange.peer)
                self.traffic.received_bytes += exchange.tensor.nbytes
            self.traffic.rounds += 1
        for peer, tensor, handle in sent:
            self._doing = f"{label}, to rank {self.ranks[peer]}"
            self._complete(handle, peer)
            self.traffic.sent_bytes += tensor.nbytes
            self.num_sent += 1
        self._doing = _IDLE

    def describe(self) -> str:
        """Where this rank is, for messages."""
        return f"rank {self.ranks[self.rank]}, control: {self._doing}"

    def close(self, farewell_s: float) -> bool:
        """End; whether the thread that listens has ended, too. Nothing may be expected any more."""
        if self._heard is not None and not self._heard.arrived.is_set():
            self._heard.errors.append(RuntimeError(f"the channel was closed{see('the-state-was-closed')}"))
            self.let_go()
        self._to_hear.put(None)
        if self._thread is not None:
            self._thread.join(farewell_s)
            if self._thread.is_alive():
                return False
        if self._group is not None:
            compat.destroy_group(self._group)
            self._group = None
        return True

    def let_go(self) -> None:
        """Break the connections, after a failure that is noted: whoever waits for this rank reads the note, and ends.

        Also the threads of this rank that wait. gloo has no other way to wake them, and none to close connections, but
        that it closes those of a group in which any wait takes too long.
        """
        for peer in range(self.world_size):
            if self._group is not None and peer != self.rank:
                try:  # where the connection is broken already, this raises at once and closes no others
                    nothing = self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _TAG_OF_NOTHING)
                    nothing.wait(datetime.timedelta(milliseconds=1))
                except RuntimeError as error:
                    logger.debug("%s let go of rank %d: %s", self.describe(), self.ranks[peer], error)

    @property
    def stuck(self) -> bool:
        """Whether the thread that listens still waits in the backend after the end."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def _left(self) -> int:
        return (self.rank - 1) % self.world_size

    def _take_heard(self, exchange: Recv) -> tuple[_Heard | None, _Heard | None]:
        """What was listened for if this is that, and what then is still listened for."""
        heard = self._heard
        if heard is not None and exchange.peer == self._left:
            return heard, None
        return None, heard

    def _hear(self, heard: _Heard, exchange: Recv) -> None:
        if not heard.arrived.wait(self._timeout.total_seconds()):
            hint = self.witness.report_wait(self.describe())
            peer = self.ranks[exchange.peer]
            raise LaneTimeout(f"{self.describe()} timed out waiting for rank {peer}. {hint}{see('a-wait-timed-out')}")
        if heard.errors:
            raise self._failure(heard.errors[0], exchange.peer) from heard.errors[0]
        exchange.tensor.copy_(heard.buffer)

    def _complete(self, handle: Any, peer: int) -> None:
        try:
            handle.wait(self._timeout)
        except RuntimeError as error:
            raise self._failure(error, peer) from error

    def _failure(self, error: RuntimeError, peer: int) -> LaneError:
        return self.witness.failure_of(error, self.ranks[peer], self.describe())

    def _listen(self) -> None:
        while (heard := self._to_hear.get()) is not None:
            try:
                heard.handle.wait(_LISTENING)
            except RuntimeError as error:
                heard.errors.append(error)
            heard.arrived.set()
            self._wake()
