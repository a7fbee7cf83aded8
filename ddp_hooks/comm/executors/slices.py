"""Slices of collectives: a lane adds one while others travel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.collectives import Partition, direct_reduce_scatter, ring_all_gather
from ddp_hooks.comm.algorithms.encoded import (
    encoded_all_gather,
    encoded_gather_bytes,
    encoded_reduce_scatter,
    encoded_scatter_bytes,
    two_level_encoded_reduce_scatter,
    two_level_encoded_scatter_bytes,
)
from ddp_hooks.comm.algorithms.exact import exact_reduce_scatter, exact_scratch_bytes
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.comm.algorithms.narrow import narrow_all_gather, narrow_scratch_bytes
from ddp_hooks.comm.algorithms.two_level import two_level_all_gather, two_level_reduce_scatter, two_level_scratch_numel
from ddp_hooks.comm.wire.codecs import Codec
from ddp_hooks.comm.wire.exact import ExactWire
from ddp_hooks.comm.wire.narrow import NarrowGather
from ddp_hooks.comm.wire.rounded import DifferenceWire, RoundedWire

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
        message_bytes = scatter_message_bytes(slice_bytes, copies)
        if isinstance(partition.wire, RoundedWire):
            yield from _rounded_sums(partition, partition.wire, rank, message_bytes, divisor, node_size)
            continue
        for index, ranges in enumerate(_sliced_ranges(partition, message_bytes)):
            chunks = [partition.flat[each] for each in ranges]
            if isinstance(partition.wire, ExactWire):
                start = partial(exact_reduce_scatter, chunks, rank, partition.wire, index, divisor=divisor)
                yield Slice(start, exact_scratch_bytes(chunks, rank), torch.uint8)
            elif node_size > 1:
                start = partial(two_level_reduce_scatter, chunks, rank, node_size, divisor=divisor)
                yield Slice(start, two_level_scratch_numel(chunks, rank, node_size), partition.flat.dtype)
            else:
                start = partial(direct_reduce_scatter, chunks, rank, divisor=divisor)
                yield Slice(start, (world_size - 1) * chunks[rank].numel(), partition.flat.dtype)


def all_gather_slices(
    partitions: Sequence[Partition], rank: int, slice_bytes: int, node_size: int = 1
) -> Iterator[Slice]:
    """Cut all-gathers over ``partitions`` into slices with messages of at most ``slice_bytes``.

    With a wire, about :func:`coded_message_bytes`.
    """
    for partition in partitions:
        coded_bytes = coded_message_bytes(slice_bytes, len(partition.bounds) - 1)
        if isinstance(partition.wire, NarrowGather):
            yield from _narrow_slices(partition, partition.wire, rank, coded_bytes, node_size)
        elif isinstance(partition.wire, (RoundedWire, DifferenceWire)):
            yield from _encoded_gathers(partition, partition.wire, rank, coded_bytes, node_size)
        else:
            for ranges in _sliced_ranges(partition, slice_bytes):
                chunks = [partition.flat[each] for each in ranges]
                yield Slice(partial(_gather, chunks, rank, node_size), 0, partition.flat.dtype)


def scatter_message_bytes(slice_bytes: int, copies: int) -> int:
    """Return the largest message of a reduce-scatter, >= 1; a slice receives ``copies`` of them at a time."""
    return max(1, min(slice_bytes // _SMALLER, _MOST_RECEIVED * slice_bytes // WINDOW // max(1, copies)))


def coded_message_bytes(slice_bytes: int, world_size: int) -> int:
    """Return the largest message of an all-gather with a wire; all ``world_size`` of a slice lie in scratch memory."""
    return max(1, min(slice_bytes, _MOST_RECEIVED * slice_bytes // WINDOW // world_size))


def _rounded_sums(
    partition: Partition, wire: RoundedWire, rank: int, message_bytes: int, divisor: int, node_size: int
) -> Iterator[Slice]:
    """Yield slices that are summed as they are within a node, and in fewer bits between nodes."""
    element_size = None if node_size == 1 else partition.flat.element_size()
    codec = wire.codec
    for ranges in _block_ranges(partition, codec, message_bytes, element_size):
        chunks = [partition.flat[each] for each in ranges]
        residuals = None if wire.residual is None else [wire.residual[each] for each in ranges]
        if node_size > 1:
            sums = two_level_encoded_reduce_scatter
            start = partial(
                sums, chunks, rank, node_size, codec, residuals, divisor=divisor, hands_over=wire.is_new
            )
            yield Slice(start, two_level_encoded_scatter_bytes(chunks, rank, node_size, codec), torch.uint8)
        else:
            members = range(len(chunks))
            start = partial(encoded_reduce_scatter, members, rank, chunks, codec, residuals, divisor=divisor)
            yield Slice(start, encoded_scatter_bytes(chunks, rank, codec), torch.uint8)


def _encoded_gathers(
    partition: Partition, wire: RoundedWire | DifferenceWire, rank: int, coded_bytes: int, node_size: int
) -> Iterator[Slice]:
    first = partition.bounds[rank]
    for ranges in _block_ranges(partition, wire.codec, coded_bytes):
        chunks = [partition.flat[each] for each in ranges]
        own = slice(ranges[rank].start - first, ranges[rank].stop - first)
        part = wire.part(own) if isinstance(wire, DifferenceWire) else wire
        start = partial(encoded_all_gather, chunks, rank, part, node_size=node_size)
        yield Slice(start, encoded_gather_bytes(chunks, part), torch.uint8)


def _narrow_slices(
    partition: Partition, wire: NarrowGather, rank: int, coded_bytes: int, node_size: int
) -> Iterator[Slice]:
    gather = partial(_gather, rank=rank, node_size=node_size)
    for ranges in _sliced_ranges(partition, coded_bytes * partition.flat.nbytes // max(1, partition.nbytes)):
        cuts = [(each.start, each.stop) for each in ranges]
        start = partial(narrow_all_gather, partition.flat, cuts, rank, wire, gather)
        yield Slice(start, narrow_scratch_bytes(cuts, wire), torch.uint8)


def _gather(chunks: Sequence[Tensor], rank: int, node_size: int, scratch: Tensor | None = None) -> Algorithm:
    return two_level_all_gather(chunks, rank, node_size) if node_size > 1 else ring_all_gather(chunks, rank)


def _sliced_ranges(partition: Partition, range_bytes: int) -> Iterator[list[slice]]:
    """Yield the same number of slices on every rank, each with at most ``range_bytes`` of every range."""
    ranges = list(itertools.pairwise(partition.bounds))
    longest = max(end - start for start, end in ranges)
    num_slices = -(-longest // max(1, range_bytes // partition.flat.element_size()))
    for i in range(num_slices):
        yield [
            slice(start + (end - start) * i // num_slices, start + (end - start) * (i + 1) // num_slices)
            for start, end in ranges
        ]


def _block_ranges(
    partition: Partition, codec: Codec, message_bytes: int, element_size: int | None = None
) -> Iterator[list[slice]]:
    """Yield slices of whole blocks of every range, so that numbers do not depend on where ranges are cut.

    Messages have at most ``message_bytes``, or a block. They are encoded, or have elements of ``element_size``.
    """
    block_bytes = codec.nbytes(codec.block) if element_size is None else element_size * codec.block
    numel = max(1, message_bytes // block_bytes) * codec.block
    ranges = list(itertools.pairwise(partition.bounds))
    for first in range(0, max(end - start for start, end in ranges), numel):
        yield [slice(min(start + first, end), min(start + first + numel, end)) for start, end in ranges]
