"""All-reduces and gathers of other libraries, as rounds of the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

from ddp_hooks.comm import num_rounds
from ddp_hooks.planning.events import Slice
from ddp_hooks.planning.network import Round, Rounds, ring
from ddp_hooks.planning.simulation import Run

Schedule: TypeAlias = Literal["ring", "two-level", "two-level-log"]
"""One ring; rings on two levels; rings within nodes and ceil(log2 N) rounds between nodes, with as many bytes through a
node's link as a ring, like NCCL's trees."""


def halving(workers: int, num_bytes: float) -> Rounds:
    """Scatter `num_bytes` in ceil(log2 P) rounds, each of half of the rest."""
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


def backends_all_reduce(run: Run, num_bytes: float, schedule: Schedule) -> list[Slice]:
    """The all-reduce of a backend with this schedule, as one slice."""
    rounds = all_reduce(schedule, run.network.workers, run.network.node_size, num_bytes)
    return [Slice(rounds, slowdown=run.costs.all_reduce, byte_s=run.costs.all_reduce_byte_s)]


def gathered(workers: int, node_size: int, num_bytes: float) -> Rounds:
    """Bring `num_bytes` of every worker to all others, in a ring."""
    return ring(workers, node_size, num_bytes * workers)


def sent_bytes(rounds: Iterable[Round]) -> float:
    """The bytes that pass through a worker's link, or its node's."""
    return sum(each.times * each.between_bytes for each in rounds)
