"""Rounds of a collective, and the bytes that each round sends: the load of the simulator's lanes.

All ranks of these collectives do the same at the same time, so one rank stands for all; with several workers per node,
the ranks of one node do.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

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


def all_to_all(workers: int, node_size: int, num_bytes: float) -> Rounds:
    """Cut ``num_bytes`` into equal shares, keep one, and send one to each other worker, in one round.

    A direct reduce-scatter of ``num_bytes`` sends the same.
    """
    if workers == 1:
        return ()
    share_bytes = num_bytes / workers
    between_bytes = node_size * (workers - node_size) * share_bytes
    return (Round(1, between_bytes, (node_size - 1) * share_bytes, workers - 1),)
