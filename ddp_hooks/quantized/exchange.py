"""All-reduce of one run of gradients in fewer bits: encoded to their owners, and encoded back.

Rank r owns the r-th of P ranges. Each rank sends every range straight to its owner, so gradients are rounded once. The
owner adds in float32, in the order of ranks, divides, and sends the mean, rounded again, to all; also the owner takes
the rounded mean, so that replicas stay equal. Both roundings have a residual (error feedback), and one memory is enough
for both, because an owner does not send its own range::

    residual of rank r = what rounding took from r's gradients, in the ranges of other owners,
                         P * what rounding took from the mean, in r's own range

So P * (means that were applied) + (residuals of all ranks) = (gradients of all ranks), wherever ranges lie.

With nodes of several ranks, ranges of equal local ranks are summed exactly within a node first. In place of P ranks,
equal local ranks of the nodes exchange their sums. Encoded means go around in the node. A residual of a range
belongs to the node, and lies on the local rank that encodes the range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    Nodes,
    Partition,
    aligned_bounds,
    among,
    pairwise_exchange,
    ring_all_gather,
    sum_within_node,
)
from ddp_hooks.comm.algorithms.collectives import all_gather_among
from ddp_hooks.comm.algorithms.encoded import add_encoded, encode_for_peers, sum_bytes
from ddp_hooks.comm.algorithms.scratch import Scratch
from ddp_hooks.comm.wire.codecs import Codec, relative_error

_GRAIN_NUMEL = 256  # ranges begin at multiples of it, so that few blocks are cut


@dataclass
class Exchange:
    """All-reduce of ``flat``, in slices; both tensors belong to a lane until its work is complete."""

    name: str  # for messages
    flat: Tensor  # (numel,): gradients, which become means
    residual: Tensor  # (numel,), float32 or wider, in the scale of ``flat``
    codec: Codec
    nodes: Nodes
    is_new: bool  # ranges were others in the backward before
    measures: bool  # relative errors
    relative_error: float = 0.0  # the largest of the first slices of all ranges, if it is measured

    def slices(self, numel: int) -> list[Callable[[], Algorithm]]:
        """Return the functions that start slices of at most ``numel``, a multiple of a block, of every range."""
        bounds = aligned_bounds(self.flat.numel(), self.nodes.world_size, 1, _GRAIN_NUMEL)
        ranges, kept = Partition(self.flat, bounds).ranges, Partition(self.residual, bounds).ranges
        longest = max(each.numel() for each in ranges)
        starts: list[Callable[[], Algorithm]] = []
        for first in range(0, longest, numel):
            where = slice(first, first + numel)
            chunks, residuals = [each[where] for each in ranges], [each[where] for each in kept]
            starts.append(partial(self._reduce, chunks, residuals, self.measures and first == 0))
        return starts

    def _reduce(self, gradients: list[Tensor], residuals: list[Tensor], measures: bool) -> Algorithm:
        """Make the mean of every rank's ``gradients``, one tensor per owner, in place."""
        nodes, codec = self.nodes, self.codec
        chunks = gradients
        if nodes.size > 1 or self.flat.dtype != self.residual.dtype:
            # Within nodes chunks travel as they are, and may do so until the end, when gradients are written.
            chunks = [each.to(self.residual.dtype, copy=True) for each in gradients]
        if measures:
            self.relative_error = max(relative_error(codec, each) for each in chunks)
        if nodes.size > 1:
            if self.is_new:
                self._hand_over(chunks, residuals)
            yield from sum_within_node(nodes.by_local_rank(chunks), nodes)
        means = [chunk.new_empty(codec.nbytes(chunk.numel()), dtype=torch.uint8) for chunk in chunks]
        between = [[each[peer] for peer in nodes.peers] for each in (chunks, residuals, means)]
        yield from among(nodes.peers, self._reduce_encoded(*between))
        if nodes.size > 1:
            yield from all_gather_among(nodes.members, nodes.local_rank, nodes.by_local_rank(means))
        for payload, gradient in zip(means, gradients, strict=True):
            codec.decode(payload, gradient)

    def _hand_over(self, chunks: list[Tensor], residuals: list[Tensor]) -> None:
        """Leave residuals to the local ranks that will encode their ranges, as part of the node's sums."""
        for owner, (chunk, residual) in enumerate(zip(chunks, residuals, strict=True)):
            if owner not in self.nodes.peers:
                chunk.add_(residual)
                residual.zero_()

    def _reduce_encoded(self, chunks: list[Tensor], residuals: list[Tensor], means: list[Tensor]) -> Algorithm:
        """Write encoded means of ``chunks`` of equal local ranks, one tensor per node, to ``means``."""
        node, codec, world_size = self.nodes.node, self.codec, self.nodes.world_size
        own, residual = chunks[node], residuals[node]
        payloads = [torch.empty_like(mean) for mean in means]
        incoming = [torch.empty_like(means[node]) for _ in means]
        encode_for_peers(chunks, node, codec, payloads, residuals)
        yield from pairwise_exchange(payloads, incoming, node)
        space = Scratch(own.new_empty(sum_bytes(own), dtype=torch.uint8))
        add_encoded(own, node, incoming, codec, None, space, world_size)
        residual.mul_(1 / world_size)  # the unit of means, and back to that of sums
        codec.encode_with_residual(own, residual, means[node])
        residual.div_(1 / world_size)
        yield from ring_all_gather(means, node)
