"""Slices of collectives: a lane adds one while others travel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.collectives import Partition, direct_reduce_scatter, ring_all_gather
from ddp_hooks.comm.algorithms.exact import exact_reduce_scatter, exact_scratch_bytes
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.comm.algorithms.two_level import two_level_all_gather, two_level_reduce_scatter, two_level_scratch_numel

WINDOW = 2  # slices under way per lane; with more, messages of several ranks pile up at one and wait for each other
_SMALLER = 3  # messages of a reduce-scatter, of which P - 1 arrive at once, are smaller than slice_bytes by this factor
_MOST_RECEIVED = 4  # receive memory of a lane and dtype is at most this many times slice_bytes, for any P


class Slice(NamedTuple):
    """One slice of a collective, ready to start."""

    start: Callable[[Tensor], Algorithm]  # scratch memory -> algorithm; called when the slice's turn comes
    scratch_numel: int
    dtype: torch.dtype
    tag: int | None = None  # of its messages; None: the next one in order


def reduce_scatter_slices(
    partitions: Sequence[Partition], rank: int, slice_bytes: int, divisor: int = 1, node_size: int = 1
) -> Iterator[Slice]:
    """Cut reduce-scatters over ``partitions`` into slices, with messages of :func:`scatter_message_bytes`."""
    for partition in partitions:
        world_size = len(partition.bounds) - 1
        copies = world_size - 1 if node_size == 1 else (node_size - 1) * (world_size // node_size)
        for index, chunks in enumerate(_sliced_chunks(partition, scatter_message_bytes(slice_bytes, copies))):
            if partition.wire is not None:
                start = partial(exact_reduce_scatter, chunks, rank, partition.wire, index, divisor=divisor)
                yield Slice(start, exact_scratch_bytes(chunks, rank), torch.uint8)
                continue
            start = partial(direct_reduce_scatter, chunks, rank, divisor=divisor)
            if node_size > 1:
                start = partial(two_level_reduce_scatter, chunks, rank, node_size, divisor=divisor)
            yield Slice(start, two_level_scratch_numel(chunks, rank, node_size), partition.flat.dtype)


def all_gather_slices(
    partitions: Sequence[Partition], rank: int, slice_bytes: int, node_size: int = 1
) -> Iterator[Slice]:
    """Cut all-gathers over ``partitions`` into slices with messages of at most ``slice_bytes``."""
    for partition in partitions:
        for chunks in _sliced_chunks(partition, slice_bytes):
            yield Slice(partial(_gather, chunks, rank, node_size), 0, partition.flat.dtype)


def scatter_message_bytes(slice_bytes: int, copies: int) -> int:
    """Return the largest message of a reduce-scatter, >= 1; a slice receives ``copies`` of them at a time."""
    return max(1, min(slice_bytes // _SMALLER, _MOST_RECEIVED * slice_bytes // WINDOW // max(1, copies)))


def _gather(chunks: Sequence[Tensor], rank: int, node_size: int, scratch: Tensor) -> Algorithm:
    return two_level_all_gather(chunks, rank, node_size) if node_size > 1 else ring_all_gather(chunks, rank)


def _sliced_chunks(partition: Partition, range_bytes: int) -> Iterator[list[Tensor]]:
    """Yield the same number of slices on every rank, each with at most ``range_bytes`` of every range."""
    ranges = partition.ranges
    longest = max(each.numel() for each in ranges)
    num_slices = -(-longest // max(1, range_bytes // partition.flat.element_size()))
    for i in range(num_slices):
        yield [each[each.numel() * i // num_slices : each.numel() * (i + 1) // num_slices] for each in ranges]
