"""Rounds of a collective, and the bytes that each round sends: the load of the simulator's lanes.

All ranks of these collectives do the same at the same time, so one rank stands for all; with several workers per node,
the ranks of one node do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from ddp_hooks.comm import num_rounds

Schedule: TypeAlias = Literal["ring", "two-level", "two-level-log"]
"""All-reduces of backends: one ring; rings on two levels; rings within nodes and ceil(log2 N) rounds between nodes,
with as many bytes through a node's link as a ring, like NCCL's trees."""

Phase: TypeAlias = Literal["reduce-scatter", "all-gather"]


class Round(NamedTuple):
    """A round of a collective, done ``times`` times in a row."""

    times: int
    between_bytes: float  # through the worker's link; through the node's link where workers share one
    inside_bytes: float = 0.0  # from a worker to others of its node
    messages: int = 1  # per worker


Rounds: TypeAlias = tuple[Round, ...]


def ring(workers: int, node_size: int, num_bytes: float) -> Rounds:
    """Scatter or gather ``num_bytes`` from neighbour to neighbour, in P - 1 rounds (DeAR, Eq. 3)."""
    if workers == 1:
        return ()
    share_bytes = num_bytes / workers
    inside_bytes = share_bytes if node_size > 1 else 0.0
    return (Round(workers - 1, share_bytes if node_size < workers else 0.0, inside_bytes),)


def halving(workers: int, num_bytes: float) -> Rounds:
    """Scatter ``num_bytes`` in ceil(log2 P) rounds, each of half of the rest."""
    counts = [min(1 << i, workers - (1 << i)) for i in reversed(range(num_rounds(workers)))]
    return tuple(Round(1, count * num_bytes / workers) for count in counts)


def all_reduce(schedule: Schedule, workers: int, node_size: int, num_bytes: float) -> Rounds:
    """Reduce-scatter, then all-gather, which is its reverse."""
    scattered = _scattered(schedule, workers, node_size, num_bytes)
    return (*scattered, *reversed(scattered))


def _scattered(schedule: Schedule, workers: int, node_size: int, num_bytes: float) -> Rounds:
    if schedule == "ring":
        return ring(workers, node_size, num_bytes)
    # Within a node first; then among workers with the same local rank.
    inside = [Round(each.times, 0.0, each.between_bytes) for each in ring(node_size, 1, num_bytes)]
    nodes, share_bytes = workers // node_size, num_bytes / node_size
    between = ring(nodes, 1, share_bytes) if schedule == "two-level" else halving(nodes, share_bytes)
    return (*inside, *(Round(each.times, each.between_bytes * node_size) for each in between))


def gathered(workers: int, node_size: int, num_bytes: float) -> Rounds:
    """Bring ``num_bytes`` of every worker to all others, in a ring."""
    return ring(workers, node_size, num_bytes * workers)


def all_to_all(workers: int, node_size: int, num_bytes: float) -> Rounds:
    """Cut ``num_bytes`` into equal shares, keep one, and send one to each other worker, in one round.

    A direct reduce-scatter of ``num_bytes`` sends the same.
    """
    if workers == 1:
        return ()
    share_bytes = num_bytes / workers
    between_bytes = node_size * (workers - node_size) * share_bytes
    return (Round(1, between_bytes, (node_size - 1) * share_bytes, workers - 1),)


def sent_bytes(rounds: Iterable[Round]) -> float:
    """Return the bytes that pass through a worker's link, or its node's."""
    return sum(each.times * each.between_bytes for each in rounds)
