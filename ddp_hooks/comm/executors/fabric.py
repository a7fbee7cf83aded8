"""In-process fabric: runs an algorithm for P ranks in one process, for tests of any P and, with a clock, to predict.

The ranks advance in turn, each as far as its messages allow. The fabric raises if no peer will ever complete a round
(deadlock), if two sides of a message differ in size or dtype, and if an algorithm changes memory while a lane might
still send it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm.accounting import Traffic
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Round, Send


class FabricError(RuntimeError):
    """The ranks of an algorithm do not fit together: a deadlock, two sides of a message that differ, changed memory."""


@dataclass(frozen=True)
class AlphaBeta:
    """The alpha-beta cost model (DeAR, section III-A): a message of n bytes takes ``alpha_s + n * beta_s_per_byte``."""

    alpha_s: float = 0.0
    beta_s_per_byte: float = 0.0


@dataclass
class RankTraffic(Traffic):
    """Bytes sent and received, and rounds of one rank, and its clock in seconds."""

    clock_s: float = 0.0


_Mailboxes: TypeAlias = dict[tuple[int, int], deque[tuple[Tensor, float]]]
"""Messages and when they arrive, by sender and receiver."""


def run_on_fabric(
    algorithms: Sequence[Algorithm], cost: AlphaBeta | None = None, handling_s: float = 0.0
) -> list[RankTraffic]:
    """Run ``algorithms[r]`` as rank r, all in this process, until every one has ended; return each rank's traffic.

    ``cost`` is the price of a message. Links are full duplex, and a rank's messages in one direction follow each other.
    ``handling_s`` is what a rank takes for each message that it receives, one after the other.

    Raises:
        FabricError: the ranks wait for messages that nobody sends, a message's two sides differ in size or dtype, or
            what was sent had changed when the algorithm ended.
    """
    mailboxes: _Mailboxes = defaultdict(deque)
    ranks = [_Rank(rank, each, mailboxes, cost or AlphaBeta(), handling_s) for rank, each in enumerate(algorithms)]
    running = deque((rank, rank.run()) for rank in ranks)
    idle_turns = 0
    while running:
        rank, turns = running.popleft()
        moved = next(turns, None)
        idle_turns = idle_turns + 1 if moved is False else 0
        if moved is not None:
            running.append((rank, turns))
        if idle_turns > len(running):
            waits = [f"rank {each.rank} waits for a message from {each.waiting[0].peer}" for each, _ in running]
            raise FabricError(f"deadlock: {'; '.join(waits)}")
    left_over = {route: len(box) for route, box in mailboxes.items() if box}
    if left_over:
        raise FabricError(f"messages were sent that nobody received, as (from, to): count: {left_over}")
    return [rank.traffic for rank in ranks]


@dataclass
class _Rank:
    rank: int
    algorithm: Algorithm
    mailboxes: _Mailboxes
    cost: AlphaBeta
    handling_s: float
    traffic: RankTraffic = field(default_factory=RankTraffic)
    waiting: deque[Recv] = field(default_factory=deque)  # in this round
    sent: list[tuple[Send, Tensor]] = field(default_factory=list)  # with what each message held when it was sent
    round_end_s: float = 0.0

    def run(self) -> Iterator[bool]:
        """Go as far as messages allow, then yield: True if this rank has moved since it yielded last."""
        for next_round in self.algorithm:
            moved = True
            self._post(next_round)
            while self.waiting:
                if self.mailboxes[self.waiting[0].peer, self.rank]:
                    self._receive(self.waiting.popleft())
                    moved = True
                else:
                    yield moved
                    moved = False
            self.traffic.clock_s = self.round_end_s
            self.traffic.rounds += 1
        self._refuse_changes()

    def _post(self, exchanges: Round) -> None:
        self.round_end_s = self.traffic.clock_s
        for exchange in exchanges:
            if isinstance(exchange, Recv):
                self.waiting.append(exchange)
                continue
            self.traffic.count(exchange)
            self.round_end_s += exchange.tensor.nbytes * self.cost.beta_s_per_byte
            payload = exchange.tensor.clone()
            self.mailboxes[self.rank, exchange.peer].append((payload, self.round_end_s + self.cost.alpha_s))
            self.sent.append((exchange, payload))

    def _receive(self, receive: Recv) -> None:
        payload, arrival_s = self.mailboxes[receive.peer, self.rank].popleft()
        if payload.shape != receive.tensor.shape or payload.dtype != receive.tensor.dtype:
            raise FabricError(
                f"rank {receive.peer} sent {tuple(payload.shape)} {payload.dtype} to rank {self.rank}, "
                f"which expected {tuple(receive.tensor.shape)} {receive.tensor.dtype}"
            )
        receive.tensor.copy_(payload)
        self.traffic.count(receive)
        self.round_end_s = max(self.round_end_s, arrival_s) + self.handling_s

    def _refuse_changes(self) -> None:
        for (peer, tensor), payload in self.sent:
            if not torch.equal(tensor.contiguous().view(torch.uint8), payload.contiguous().view(torch.uint8)):
                raise FabricError(
                    f"rank {self.rank} changed what it had sent to rank {peer} before its algorithm ended: a lane "
                    f"might still have been reading that memory"
                )
