"""Rounds of a collective, and the bytes that each sends: what the simulator's lanes carry.

All ranks of these collectives do the same at the same time, so one rank shows the whole; with several workers per node
those of one node do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from ddp_hooks.comm import num_rounds

Schedule: TypeAlias = Literal["ring", "two-level", "two-level-log"]
"""All-reduces of backends: in one ring; in rings on two levels; in rings within nodes and ceil(log2 N) rounds between
nodes, which is as many bytes through a node's link, in few rounds, as in NCCL's trees."""

Phase: TypeAlias = Literal["reduce-scatter", "all-gather"]


class Hop(NamedTuple):
    """Equal rounds that follow one another.

    Args:
        times: how many.
        between_bytes: what a worker's link carries in each; where workers share one, what all of its node send to
            other nodes.
        inside_bytes: what a worker sends within its node.
        messages: of a worker, in each.
    """

    times: int
    between_bytes: float
    inside_bytes: float = 0.0
    messages: int = 1


Pattern: TypeAlias = tuple[Hop, ...]


def ring(workers: int, node_size: int, num_bytes: float) -> Pattern:
    """The P - 1 rounds in which ``num_bytes`` are scattered or gathered from neighbour to neighbour (DeAR, Eq. 3)."""
    if workers == 1:
        return ()
    share_bytes = num_bytes / workers
    inside_bytes = share_bytes if node_size > 1 else 0.0
    return (Hop(workers - 1, share_bytes if node_size < workers else 0.0, inside_bytes),)


def halving(workers: int, num_bytes: float) -> Pattern:
    """The ceil(log2 P) rounds in which ``num_bytes`` are scattered, each of half of what is left."""
    counts = [min(1 << i, workers - (1 << i)) for i in reversed(range(num_rounds(workers)))]
    return tuple(Hop(1, count * num_bytes / workers) for count in counts)


def all_reduce(schedule: Schedule, workers: int, node_size: int, num_bytes: float) -> Pattern:
    """A reduce-scatter, and the all-gather behind it, which is its reverse."""
    scattered = _scattered(schedule, workers, node_size, num_bytes)
    return (*scattered, *reversed(scattered))


def _scattered(schedule: Schedule, workers: int, node_size: int, num_bytes: float) -> Pattern:
    if schedule == "ring":
        return ring(workers, node_size, num_bytes)
    # Within a node first: what a worker then holds is summed with those at its place in other nodes.
    inside = [Hop(hop.times, 0.0, hop.between_bytes) for hop in ring(node_size, 1, num_bytes)]
    nodes, share_bytes = workers // node_size, num_bytes / node_size
    rounds = ring(nodes, 1, share_bytes) if schedule == "two-level" else halving(nodes, share_bytes)
    return (*inside, *(Hop(hop.times, hop.between_bytes * node_size) for hop in rounds))


def gathered(workers: int, node_size: int, num_bytes: float) -> Pattern:
    """The rounds in which ``num_bytes`` of every worker reach all others, in a ring."""
    return ring(workers, node_size, num_bytes * workers)


def all_to_all(workers: int, node_size: int, num_bytes: float) -> Pattern:
    """The round in which every worker cuts ``num_bytes`` into equal shares, keeps one, and sends each other one its.

    Also a direct reduce-scatter of ``num_bytes``.
    """
    if workers == 1:
        return ()
    share_bytes = num_bytes / workers
    between_bytes = node_size * (workers - node_size) * share_bytes
    return (Hop(1, between_bytes, (node_size - 1) * share_bytes, workers - 1),)


def sent_bytes(pattern: Iterable[Hop]) -> float:
    """What goes through a worker's link, or its node's."""
    return sum(hop.times * hop.between_bytes for hop in pattern)
