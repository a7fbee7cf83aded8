"""Collectives on two levels, on the in-process fabric, against sums of nodes' sums."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hooks.comm import Partition, run_on_fabric
from ddp_hooks.comm.algorithms.encoded import two_level_encoded_reduce_scatter, two_level_encoded_scatter_bytes
from ddp_hooks.comm.algorithms.two_level import (
    two_level_all_gather,
    two_level_reduce_scatter,
    two_level_scratch_numel,
)
from ddp_hooks.comm.wire.codecs import IntBlocks

Sizes = list[int]
sizes_of_ranges = st.integers(1, 33).flatmap(lambda p: st.lists(st.integers(0, 9), min_size=p, max_size=p))
nodes = sizes_of_ranges.flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.sampled_from([d for d in range(1, 34) if len(sizes) % d == 0]))
)


@given(nodes, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_nodes_are_summed_first(layout: tuple[Sizes, int], divisor: int) -> None:
    sizes, node_size = layout
    world_size, num_nodes, bounds = len(sizes), len(sizes) // node_size, (0, *itertools.accumulate(sizes))
    generator = torch.Generator().manual_seed(sum(sizes))
    partitions = [Partition(torch.randn(bounds[-1], generator=generator), bounds) for _ in sizes]

    expected = torch.zeros(bounds[-1])
    for first in range(0, world_size, node_size):
        of_node = partitions[first].flat.clone()
        for neighbour in partitions[first + 1 : first + node_size]:
            of_node += neighbour.flat
        expected = of_node if first == 0 else expected + of_node
    expected /= divisor

    algorithms = []
    for rank, partition in enumerate(partitions):
        scratch = torch.empty(two_level_scratch_numel(partition.ranges, rank, node_size))
        algorithms.append(two_level_reduce_scatter(partition.ranges, rank, node_size, scratch, divisor))
    scattered = run_on_fabric(algorithms)
    for rank, partition in enumerate(partitions):
        assert torch.equal(partition.ranges[rank], torch.split(expected, sizes)[rank])
        assert scattered[rank].rounds == (node_size > 1) + (num_nodes > 1)
        assert scattered[rank].sent_bytes <= 4 * sum(sizes), "nothing is sent twice"
        for other in set(range(world_size)) - {rank}:
            partition.ranges[other].fill_(float("nan"))

    gathered = run_on_fabric(
        [two_level_all_gather(partition.ranges, rank, node_size) for rank, partition in enumerate(partitions)]
    )
    for rank, partition in enumerate(partitions):
        assert torch.equal(partition.flat, expected)
        assert gathered[rank].rounds == node_size - 1 + num_nodes - 1
        assert gathered[rank].received_bytes == 4 * (sum(sizes) - sizes[rank]), "nothing comes twice"


def test_nodes_must_be_equal() -> None:
    partition = Partition(torch.zeros(6), tuple(range(7)))
    with pytest.raises(ValueError, match="node_size must divide 6 ranks, got 4"):
        next(two_level_all_gather(partition.ranges, 0, 4))


@pytest.mark.parametrize("hands_over", [False, True])
def test_residuals_of_another_partition_are_handed_over(hands_over: bool) -> None:
    """What a rank owes to ranges that it does not encode goes into its node's sums, or stays."""
    world_size, node_size, codec = 6, 2, IntBlocks(8, 256)
    generator = torch.Generator().manual_seed(0)
    gradients, residuals = (
        [[torch.randn(300, generator=generator) for _ in range(world_size)] for _ in range(world_size)] for _ in "gr"
    )
    given = sum(torch.stack(each).double().sum(0) for each in zip(*gradients, *residuals, strict=True))
    scratch = [
        torch.empty(two_level_encoded_scatter_bytes(chunks, rank, node_size, codec), dtype=torch.uint8)
        for rank, chunks in enumerate(gradients)
    ]
    run_on_fabric([
        two_level_encoded_reduce_scatter(
            gradients[rank], rank, node_size, codec, residuals[rank], scratch[rank], hands_over=hands_over
        )
        for rank in range(world_size)
    ])
    left = [residuals[rank][owner] for rank in range(world_size) for owner in range(world_size) if (owner - rank) % 2]
    assert all(not residual.any() for residual in left) == hands_over
    arrived = sum(gradients[rank][rank].double() for rank in range(world_size))
    kept = sum(torch.stack(each).double().sum(0) for each in zip(*residuals, strict=True))
    torch.testing.assert_close(arrived + kept, given, rtol=0, atol=1e-3)
