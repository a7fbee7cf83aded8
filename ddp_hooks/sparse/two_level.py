"""Sparse sums on two levels: exact and dense within nodes, whose links are fast, sparse between them.

A vector has one range per local rank.

1. Within each node: local rank l gets the node's sum of range l (:func:`~ddp_hooks.comm.sum_within_node`).
2. Between nodes: equal local ranks form the sparse sum of their range. Its residual is the node's.
3. Within each node: every rank gets the entries of all ranges.

So a local rank selects from its range alone, and keeps no other residual.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from ddp_hooks.comm import Nodes, Round, among, bruck_all_gather
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.common import Exchange
from ddp_hooks.sparse.error_feedback import ErrorFeedback, refuse_nonfinite
from ddp_hooks.sparse.sparse_sum import SparseSum
from ddp_hooks.sparse.sparse_vector import SparseVector, concatenated, empty_like
from ddp_hooks.sparse.threshold import ChunkedGradient


def range_counts(k: int, bounds: Sequence[int]) -> tuple[int, ...]:
    """Share ``k`` entries of a vector among its ranges by length, at least one of each that has elements."""
    numel = max(1, bounds[-1])
    return tuple(
        max(min(1, end - start), k * end // numel - k * start // numel) for start, end in itertools.pairwise(bounds)
    )


def sum_between_nodes(
    summation: SparseSum,
    residual: Tensor,
    gradient: Tensor | ChunkedGradient | None,
    bounds: Sequence[int],
    nodes: Nodes,
) -> Generator[Round, None, tuple[SparseVector, SparseVector]]:
    """Do steps 2 and 3: add the node's ``gradient`` to ``residual``, and return the sum over all ranks.

    ``summation`` is of this local rank's range, with nodes as its ranks; ``residual`` and ``gradient`` are those of
    :meth:`SparseSum.run`. ``bounds`` are those of the ranges. Returns the entries of this range, whose indices count
    from its beginning, and the entries of the whole vector. With one rank per node both are the same.

    Raises:
        RuntimeError: on every rank, if sums are infinite or NaN; see :meth:`ErrorFeedback.close`.
    """
    feedback = ErrorFeedback(residual, summation.sparsity.collection)
    own = empty_like(residual)
    if residual.numel():
        own = yield from among(nodes.peers, summation.exchange(feedback, gradient))
    everything = yield from _gather_within_node(own, bounds, nodes)
    refuse_nonfinite(everything)  # also on ranks whose own range is finite
    feedback.close(own)
    return own, everything


def _gather_within_node(own: SparseVector, bounds: Sequence[int], nodes: Nodes) -> Exchange:
    """Return the entries of all ranges; they travel as they are."""
    if nodes.size == 1:
        return own
    codec, place = EntryCodec("exact", own.values.dtype), (nodes.members, nodes.local_rank)
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    number = torch.tensor([len(own)], device=own.indices.device)
    numbers = yield from bruck_all_gather(number, [1] * nodes.size, *place)
    counts = [int(each) for each in numbers]
    message = codec.encode(own, lengths[nodes.local_rank], len(own))
    sizes = [codec.nbytes(length, count) for length, count in zip(lengths, counts, strict=True)]
    messages = yield from bruck_all_gather(message, sizes, *place)
    parts = zip(messages, lengths, counts, bounds, strict=False)
    return concatenated([codec.decode(each, length, count).shifted(start) for each, length, count, start in parts])
