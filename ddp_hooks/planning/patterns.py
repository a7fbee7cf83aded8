"""What a collective sends, round by round: read off the very generators that run it.

All ranks of these collectives do the same at the same time, so one rank shows the whole; with several workers per node
those of one node do. The generators run on tensors without memory, once for each number of workers; bytes are in
proportion to the size of what travels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import torch

from ddp_hooks.comm import (
    Algorithm,
    Partition,
    Recv,
    Send,
    log_all_gather,
    log_reduce_scatter,
    pairwise_exchange,
    ring_all_gather,
    ring_reduce_scatter,
    two_level_all_gather,
    two_level_reduce_scatter,
)

Schedule: TypeAlias = Literal["ring", "log", "two-level", "two-level-log"]
"""In one ring; in ceil(log2 P) rounds; in rings on two levels; in rings within nodes and ceil(log2 N) rounds between
nodes, which is as many bytes through a node's link, in few rounds, as in NCCL's trees."""

Phase: TypeAlias = Literal["reduce-scatter", "all-gather"]


class Hop(NamedTuple):
    """Equal rounds that follow one another.

    Args:
        times: how many.
        between_bytes: what a worker's link carries in each; where workers share one, what all of its node send to
            other nodes.
        inside_bytes: what a worker sends within its node.
    """

    times: int
    between_bytes: float
    inside_bytes: float = 0.0


Pattern: TypeAlias = tuple[Hop, ...]


def pattern_of(phase: Phase, schedule: Schedule, workers: int, node_size: int, num_bytes: float) -> Pattern:
    """The rounds in which ``num_bytes`` are scattered or gathered."""
    if schedule == "two-level-log":
        return _few_rounds_between_nodes(phase, workers, node_size, num_bytes)
    return scaled(_unit_pattern(phase, schedule, workers, node_size), num_bytes / workers)


def _few_rounds_between_nodes(phase: Phase, workers: int, node_size: int, num_bytes: float) -> Pattern:
    """A ring within every node; what a worker then holds it sums, or gathers, with those at its place elsewhere."""
    ring = pattern_of(phase, "ring", node_size, 1, num_bytes)
    rounds = pattern_of(phase, "log", workers // node_size, 1, num_bytes / node_size)
    inside = tuple(Hop(hop.times, 0.0, hop.between_bytes) for hop in ring)
    between = tuple(Hop(hop.times, hop.between_bytes * node_size) for hop in rounds)
    return (*inside, *between) if phase == "reduce-scatter" else (*between, *inside)


def all_reduce(schedule: Schedule, workers: int, node_size: int, num_bytes: float) -> Pattern:
    """A reduce-scatter and the all-gather behind it."""
    return (
        *pattern_of("reduce-scatter", schedule, workers, node_size, num_bytes),
        *pattern_of("all-gather", schedule, workers, node_size, num_bytes),
    )


def gathered(workers: int, node_size: int, num_bytes: float) -> Pattern:
    """The rounds in which ``num_bytes`` of every worker reach all others, in a ring."""
    return pattern_of("all-gather", "ring", workers, node_size, num_bytes * workers)


def all_to_all(workers: int, node_size: int, num_bytes: float) -> Pattern:
    """The round in which every worker cuts ``num_bytes`` into equal shares, keeps one, and sends each other one its."""
    return scaled(_unit_exchange(workers, node_size), num_bytes / workers)


def scaled(pattern: Pattern, factor: float) -> Pattern:
    """The same rounds with ``factor`` times the bytes."""
    return tuple(Hop(hop.times, hop.between_bytes * factor, hop.inside_bytes * factor) for hop in pattern)


def sent_bytes(pattern: Pattern) -> float:
    """What goes through a worker's link, or its node's."""
    return sum(hop.times * hop.between_bytes for hop in pattern)


@lru_cache
def _unit_pattern(phase: Phase, schedule: Schedule, workers: int, node_size: int) -> Pattern:
    """The rounds for one byte per worker."""
    flat = torch.empty(workers, dtype=torch.int8, device="meta")
    partition = Partition(flat, tuple(range(workers + 1)))
    make = _generators(phase, schedule, partition, node_size)
    return read_off([make(rank) for rank in range(node_size)])


@lru_cache
def _unit_exchange(workers: int, node_size: int) -> Pattern:
    """The round for shares of one byte."""
    shares = [torch.empty(1, dtype=torch.int8, device="meta")] * workers
    return read_off([pairwise_exchange(shares, shares, rank) for rank in range(node_size)])


def _generators(
    phase: Phase, schedule: Schedule, partition: Partition, node_size: int
) -> Callable[[int], Algorithm]:
    flat = partition.flat
    scratch = torch.empty_like(flat)
    scatters = phase == "reduce-scatter"
    if schedule == "ring":
        chunks = list(flat.split(1))
        if scatters:
            return lambda rank: ring_reduce_scatter(chunks, rank, scratch)
        return lambda rank: ring_all_gather(chunks, rank)
    if schedule == "log":
        if scatters:
            return lambda rank: log_reduce_scatter(partition, rank, scratch)
        return lambda rank: log_all_gather(partition, rank)
    if scatters:
        return lambda rank: two_level_reduce_scatter(partition.ranges, rank, node_size, scratch)
    return lambda rank: two_level_all_gather(partition.ranges, rank, node_size)


def read_off(algorithms: Sequence[Algorithm]) -> Pattern:
    """What the ranks of the first node send in each round; nothing is received.

    Args:
        algorithms: of ranks 0, 1, … of that node. They must not look at what they receive.
    """
    node_size = len(algorithms)
    rounds = itertools.zip_longest(*algorithms, fillvalue=())
    return merged(_hop(together, node_size) for together in rounds)


def _hop(together: Iterable[Sequence[Send | Recv]], node_size: int) -> Hop:
    between = inside = 0
    for of_rank in together:
        sends = [exchange for exchange in of_rank if isinstance(exchange, Send)]
        between += sum(send.tensor.nbytes for send in sends if send.peer >= node_size)
        inside = max(inside, sum(send.tensor.nbytes for send in sends if send.peer < node_size))
    return Hop(1, between, inside)


def merged(hops: Iterable[Hop]) -> Pattern:
    """Equal neighbours as one."""
    return tuple(
        Hop(sum(hop.times for hop in run), *key) for key, run in itertools.groupby(hops, key=lambda hop: hop[1:])
    )
