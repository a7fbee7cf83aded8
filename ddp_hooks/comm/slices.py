"""What a lane runs: collectives in slices, so that some travel while one is added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_hooks.comm.choice import CollectiveRule
from ddp_hooks.comm.collectives import Partition, ring_all_gather, ring_reduce_scatter
from ddp_hooks.comm.exchange import Algorithm
from ddp_hooks.comm.logarithmic import log_all_gather, log_reduce_scatter, scratch_numel
from ddp_hooks.comm.two_level import two_level_all_gather, two_level_reduce_scatter


class Slice(NamedTuple):
    """One slice of a collective, ready to start: a generator to make, and the scratch memory that it needs."""

    start: Callable[[Tensor], Algorithm]  # scratch -> algorithm
    scratch_numel: int
    dtype: torch.dtype
    tag: int | None = None  # of its messages; None: the next one in order


def reduce_scatter_slices(
    partitions: Sequence[Partition], rank: int, slice_bytes: int, divisor: int = 1, rule: CollectiveRule | None = None
) -> Iterator[Slice]:
    """The slices of reduce-scatters over ``partitions``; see :func:`all_gather_slices`."""
    rule = rule or CollectiveRule()
    for partition in partitions:
        collective, dtype = rule.collective_of(partition.flat.numel()), partition.flat.dtype
        if collective == "log":
            yield Slice(_log_scatter(partition, rank, divisor), scratch_numel(partition, rank), dtype)
            continue
        node_size = rule.node_size if collective == "two-level" else 1
        for chunks in _sliced_chunks(partition, slice_bytes):
            longest = max(sum(chunk.numel() for chunk in chunks[place::node_size]) for place in range(node_size))
            if node_size == 1:
                longest = max(chunk.numel() for chunk in chunks)
            yield Slice(_scatter(chunks, rank, divisor, node_size), longest, dtype)


def all_gather_slices(
    partitions: Sequence[Partition], rank: int, slice_bytes: int, rule: CollectiveRule | None = None
) -> Iterator[Slice]:
    """The slices of all-gathers over ``partitions``.

    Args:
        partitions: each moves by itself.
        rank: the rank that runs them.
        slice_bytes: a range is cut so that its parts are no longer. What moves in ceil(log2 P) rounds is not cut, since
            its messages are of several ranges that lie beside each other.
        rule: which collective moves which partition; None: rings.
    """
    rule = rule or CollectiveRule()
    for partition in partitions:
        collective, dtype = rule.collective_of(partition.flat.numel()), partition.flat.dtype
        if collective == "log":
            yield Slice(_log_gather(partition, rank), 0, dtype)
            continue
        node_size = rule.node_size if collective == "two-level" else 1
        for chunks in _sliced_chunks(partition, slice_bytes):
            yield Slice(_gather(chunks, rank, node_size), 0, dtype)


# Generators are made when their turn comes: functions of these arguments, not of a loop's variables.


def _scatter(chunks: Sequence[Tensor], rank: int, divisor: int, node_size: int) -> Callable[[Tensor], Algorithm]:
    if node_size > 1:
        return lambda scratch: two_level_reduce_scatter(chunks, rank, node_size, scratch, divisor)
    return lambda scratch: ring_reduce_scatter(chunks, rank, scratch, divisor)


def _gather(chunks: Sequence[Tensor], rank: int, node_size: int) -> Callable[[Tensor], Algorithm]:
    if node_size > 1:
        return lambda scratch: two_level_all_gather(chunks, rank, node_size)
    return lambda scratch: ring_all_gather(chunks, rank)


def _log_scatter(partition: Partition, rank: int, divisor: int) -> Callable[[Tensor], Algorithm]:
    return lambda scratch: log_reduce_scatter(partition, rank, scratch, divisor)


def _log_gather(partition: Partition, rank: int) -> Callable[[Tensor], Algorithm]:
    return lambda scratch: log_all_gather(partition, rank)


def _sliced_chunks(partition: Partition, slice_bytes: int) -> Iterator[list[Tensor]]:
    ranges = partition.ranges
    longest = max(each.numel() for each in ranges)
    num_slices = -(-longest * partition.flat.element_size() // slice_bytes)
    for i in range(num_slices):
        yield [each[each.numel() * i // num_slices : each.numel() * (i + 1) // num_slices] for each in ranges]
