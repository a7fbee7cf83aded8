"""Bruck's all-gather of messages whose lengths every worker knows: any number of workers, ceil(log2 P) rounds."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.exchange import Recv, Round, Send, round_of


class Step(NamedTuple):
    """One round of a worker: what it sends to whom, and what it receives from whom."""

    target: int
    outgoing: tuple[int, ...]  # whose messages, or which blocks
    source: int
    incoming: tuple[int, ...]


def num_rounds(size: int) -> int:
    """Return ceil(log2(size)): rounds in which each of ``size`` workers can hear of every other."""
    return (size - 1).bit_length()


@lru_cache(maxsize=1024)
def all_gather_steps(worker: int, size: int) -> tuple[Step, ...]:
    """Return the rounds (zhao2024spardl, Fig. 3b): a worker sends all that it holds and its partner misses."""
    steps = []
    for i in range(num_rounds(size)):
        distance = 1 << i
        count = min(distance, size - distance)
        source = (worker + distance) % size
        outgoing = tuple((worker + x) % size for x in range(count))
        incoming = tuple((source + x) % size for x in range(count))
        steps.append(Step((worker - distance) % size, outgoing, source, incoming))
    return tuple(steps)


@lru_cache(maxsize=1024)
def reduce_scatter_steps(worker: int, size: int) -> tuple[Step, ...]:
    """Return the rounds of Spar-Reduce-Scatter: those of the all-gather backwards (zhao2024spardl, section III-B2).

    Workers and blocks of one team are numbered from 0 on a circle (the paper counts from 1). Sending bag i of a worker
    holds ``2^(i - 1)`` blocks, beginning ``2^(i - 1)`` after its own; the last bag, which goes first, holds the rest
    (Example 1 and Fig. 5). In every round the worker still holds the blocks that it receives (Theorem 1).
    """
    gathers = reversed(all_gather_steps(worker, size))
    return tuple(Step(gather.source, gather.incoming, gather.target, gather.outgoing) for gather in gathers)


def bruck_all_gather(
    mine: Tensor, sizes: Sequence[int], members: Sequence[int], position: int
) -> Generator[Round, None, list[Tensor]]:
    """Gather every member's message on every member (zhao2024spardl, Fig. 3b).

    The rank ``members[position]`` runs this generator, with ``mine``, of ``sizes[position]`` elements. Returns the
    messages in the order of the members: views of memory that belongs to the caller.
    """
    held: dict[int, Tensor] = {position: mine}
    for target, outgoing, source, incoming in all_gather_steps(position, len(members)):
        message = held[position] if len(outgoing) == 1 else torch.cat([held[member] for member in outgoing])
        arriving = mine.new_empty(sum(sizes[member] for member in incoming))
        yield round_of(Recv(members[source], arriving), Send(members[target], message))
        held.update(zip(incoming, arriving.split([sizes[member] for member in incoming]), strict=True))
    return [held[member] for member in range(len(members))]
