"""In-process fabric: runs an algorithm for P ranks in one process, for tests of any P and, with a clock, to predict.

The ranks advance in turn, each as far as its messages allow. The fabric raises if no peer will ever complete a round
(deadlock), if two sides of a message differ in size or dtype, and if an algorithm changes memory while a lane might
still send it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Round, Send


class FabricError(RuntimeError):
    """The ranks of an algorithm do not fit together: a deadlock, two sides of a message that differ, changed memory."""


@dataclass(frozen=True)
class AlphaBeta:
    """The alpha-beta cost model (DeAR, section III-A): a message of n bytes takes ``alpha_s + n * beta_s_per_byte``."""

    alpha_s: float = 0.0
    beta_s_per_byte: float = 0.0


@dataclass
class RankTraffic:
    """Clock in seconds, bytes sent and received, and rounds of one rank."""

    clock_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    rounds: int = 0


@dataclass
class _Message:
    payload: Tensor
    arrival_s: float


@dataclass
class _Participant:
    rank: int
    algorithm: Algorithm
    traffic: RankTraffic
    round: Round | None = None
    waiting: deque[Recv] = field(default_factory=deque)
    round_end_s: float = 0.0
    sent: list[tuple[Send, Tensor]] = field(default_factory=list)  # with what each message held when it was sent


def run_on_fabric(
    algorithms: Sequence[Algorithm], cost: AlphaBeta | None = None, handling_s: float = 0.0
) -> list[RankTraffic]:
    """Run ``algorithms[r]`` as rank r, all in this process, until every one has ended.

    Args:
        algorithms: one generator per rank; their tensors are changed as the algorithms say.
        cost: the price of a message; links are full duplex, and a rank's messages in one direction follow each other.
        handling_s: seconds that a rank takes for each message that it receives, one after the other.

    Returns:
        The traffic of every rank, with its clock at the end.

    Raises:
        FabricError: the ranks wait for messages that nobody sends, a message's two sides differ in size or dtype, or
            what was sent had changed when the algorithm ended.
    """
    cost = cost or AlphaBeta()
    participants = [_Participant(rank, algorithm, RankTraffic()) for rank, algorithm in enumerate(algorithms)]
    mailboxes: dict[tuple[int, int], deque[_Message]] = defaultdict(deque)
    running = deque(participants)
    idle_turns = 0
    while running:
        participant = running.popleft()
        progressed, ended = _advance(participant, mailboxes, cost, handling_s)
        idle_turns = 0 if progressed else idle_turns + 1
        if not ended:
            running.append(participant)
        if idle_turns > len(running):
            raise FabricError(_describe_deadlock(running))
    left_over = {route: len(box) for route, box in mailboxes.items() if box}
    if left_over:
        raise FabricError(f"messages were sent that nobody received, as (from, to): count: {left_over}")
    return [participant.traffic for participant in participants]


def _advance(
    participant: _Participant,
    mailboxes: dict[tuple[int, int], deque[_Message]],
    cost: AlphaBeta,
    handling_s: float,
) -> tuple[bool, bool]:
    """Move one rank as far as it goes; returns whether it moved and whether it has ended."""
    progressed = False
    while True:
        if participant.round is None:
            participant.round = next(participant.algorithm, None)
            if participant.round is None:
                _refuse_changes(participant)
                return True, True
            progressed = True
            _post(participant, mailboxes, cost)
        while participant.waiting and mailboxes[participant.waiting[0].peer, participant.rank]:
            _receive(participant, participant.waiting.popleft(), mailboxes, handling_s)
            progressed = True
        if participant.waiting:
            return progressed, False
        participant.traffic.clock_s = participant.round_end_s
        participant.traffic.rounds += 1
        participant.round = None


def _post(
    participant: _Participant, mailboxes: dict[tuple[int, int], deque[_Message]], cost: AlphaBeta
) -> None:
    traffic, now_s = participant.traffic, participant.traffic.clock_s
    link_free_s = now_s
    assert participant.round is not None
    for exchange in participant.round:
        if isinstance(exchange, Send):
            nbytes = exchange.tensor.numel() * exchange.tensor.element_size()
            link_free_s += nbytes * cost.beta_s_per_byte
            message = _Message(exchange.tensor.clone(), link_free_s + cost.alpha_s)
            mailboxes[participant.rank, exchange.peer].append(message)
            participant.sent.append((exchange, message.payload))
            traffic.sent_bytes += nbytes
    participant.waiting = deque(exchange for exchange in participant.round if isinstance(exchange, Recv))
    participant.round_end_s = link_free_s


def _refuse_changes(participant: _Participant) -> None:
    for (peer, tensor), payload in participant.sent:
        if not torch.equal(tensor.contiguous().view(torch.uint8), payload.contiguous().view(torch.uint8)):
            raise FabricError(
                f"rank {participant.rank} changed what it had sent to rank {peer} before its algorithm ended: a lane "
                f"might still have been reading that memory"
            )


def _receive(
    participant: _Participant,
    receive: Recv,
    mailboxes: dict[tuple[int, int], deque[_Message]],
    handling_s: float,
) -> None:
    message = mailboxes[receive.peer, participant.rank].popleft()
    if message.payload.shape != receive.tensor.shape or message.payload.dtype != receive.tensor.dtype:
        raise FabricError(
            f"rank {receive.peer} sent {tuple(message.payload.shape)} {message.payload.dtype} to rank "
            f"{participant.rank}, which expected {tuple(receive.tensor.shape)} {receive.tensor.dtype}"
        )
    receive.tensor.copy_(message.payload)
    participant.traffic.received_bytes += message.payload.numel() * message.payload.element_size()
    participant.round_end_s = max(participant.round_end_s, message.arrival_s) + handling_s


def _describe_deadlock(blocked: Sequence[_Participant] | deque[_Participant]) -> str:
    waits = "; ".join(f"rank {p.rank} waits for a message from {p.waiting[0].peer}" for p in blocked if p.waiting)
    return f"deadlock: {waits}"
