"""Collectives in ceil(log2 P) rounds and on two levels, on the in-process fabric, against the sum of everything."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    Partition,
    log_all_gather,
    log_reduce_scatter,
    run_on_fabric,
    two_level_all_gather,
    two_level_reduce_scatter,
)
from ddp_hooks.comm.logarithmic import scratch_numel

Sizes = list[int]
sizes_of_ranges = st.integers(1, 33).flatmap(lambda p: st.lists(st.integers(0, 9), min_size=p, max_size=p))


def divisors_of(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


nodes = sizes_of_ranges.flatmap(lambda sizes: st.tuples(st.just(sizes), st.sampled_from(divisors_of(len(sizes)))))


def partitions_of(sizes: Sizes) -> list[Partition]:
    """One vector of whole numbers per rank."""
    bounds = (0, *itertools.accumulate(sizes))
    generator = torch.Generator().manual_seed(sum(sizes))
    return [Partition(torch.randint(-99, 100, (bounds[-1],), generator=generator).float(), bounds) for _ in sizes]


def range_of(partition: Partition, rank: int) -> Tensor:
    return partition.flat[partition.bounds[rank] : partition.bounds[rank + 1]]


def check_scatter(sizes: Sizes, divisor: int, make: Callable[[Partition, int], Algorithm], rounds: int) -> None:
    partitions = partitions_of(sizes)
    expected = torch.stack([partition.flat for partition in partitions]).sum(0) / divisor
    traffic = run_on_fabric([make(partition, rank) for rank, partition in enumerate(partitions)])
    for rank, partition in enumerate(partitions):
        assert torch.equal(range_of(partition, rank), range_of(Partition(expected, partition.bounds), rank))
        assert traffic[rank].sent_bytes <= 4 * sum(sizes), "no block is sent twice"
        assert traffic[rank].rounds == rounds


def check_gather(sizes: Sizes, make: Callable[[Partition, int], Algorithm], rounds: int) -> None:
    partitions = partitions_of(sizes)
    expected = torch.cat([range_of(partition, rank) for rank, partition in enumerate(partitions)])
    for rank, partition in enumerate(partitions):
        own = range_of(partition, rank).clone()
        partition.flat.fill_(float("nan"))
        range_of(partition, rank).copy_(own)
    traffic = run_on_fabric([make(partition, rank) for rank, partition in enumerate(partitions)])
    for rank, partition in enumerate(partitions):
        assert torch.equal(partition.flat, expected)
        assert traffic[rank].received_bytes == 4 * (sum(sizes) - sizes[rank]), "nothing comes twice"
        assert traffic[rank].rounds == rounds


@given(sizes_of_ranges, st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_logarithmic(sizes: Sizes, divisor: int) -> None:
    rounds = math.ceil(math.log2(len(sizes)))

    def scatter(partition: Partition, rank: int) -> Algorithm:
        scratch = torch.full((scratch_numel(partition, rank),), float("nan"))
        return log_reduce_scatter(partition, rank, scratch, divisor)

    check_scatter(sizes, divisor, scatter, rounds)
    check_gather(sizes, log_all_gather, rounds)


@given(nodes, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_two_levels(layout: tuple[Sizes, int], divisor: int) -> None:
    sizes, node_size = layout
    rounds = node_size - 1 + len(sizes) // node_size - 1

    def scatter(partition: Partition, rank: int) -> Algorithm:
        scratch = torch.full((partition.flat.numel(),), float("nan"))
        return two_level_reduce_scatter(partition.ranges, rank, node_size, scratch, divisor)

    check_scatter(sizes, divisor, scatter, rounds)
    check_gather(sizes, lambda partition, rank: two_level_all_gather(partition.ranges, rank, node_size), rounds)


def test_nodes_must_be_equal() -> None:
    partition = Partition(torch.zeros(6), tuple(range(7)))
    with pytest.raises(ValueError, match="node_size must divide 6 ranks, got 4"):
        next(two_level_all_gather(partition.ranges, 0, 4))
