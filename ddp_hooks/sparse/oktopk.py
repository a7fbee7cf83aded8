"""Ok-Topk: thresholds instead of selections, regions of equal load, a balanced all-gather (li2022oktopk).

Row 4 of SparDL's Table I. Thresholds and regions are estimated every so many steps and used in between, so the number
of entries varies; only the global threshold discards entries on the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_hooks.comm import Round, bruck_all_gather, pairwise_exchange
from ddp_hooks.sparse.baselines import direct_reduce_scatter, gather_numbers
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.common import Exchange, Plan, even_bounds
from ddp_hooks.sparse.error_feedback import ErrorFeedback
from ddp_hooks.sparse.primitives import kth_largest
from ddp_hooks.sparse.sparse_vector import SparseVector, concatenated, empty_like
from ddp_hooks.sparse.threshold import ChunkedGradient, add_and_threshold

_IMBALANCE = 4  # times the mean, from which on entries are spread evenly before the all-gather


@dataclass
class OkTopkEstimates:
    """Estimates of one working vector, used for several steps."""

    threshold_interval: int = 32  # steps between two estimates of the thresholds
    region_interval: int = 64  # steps between two estimates of the regions
    step: int = 0
    local_threshold: float = 0.0
    global_threshold: float = 0.0
    bounds: list[int] = field(default_factory=list)  # of the regions


def oktopk(
    feedback: ErrorFeedback,
    gradient: ChunkedGradient | None,
    plan: Plan,
    codec: EntryCodec,
    estimates: OkTopkEstimates,
) -> Exchange:
    """Return the entries of the sum that reach a global threshold, about ``plan.k``; changes ``estimates``.

    There is no selector: ``gradient`` is added to the residual here, or is None if the residual includes it.
    """
    anew = estimates.step % estimates.threshold_interval == 0
    mine = _reaching_local_threshold(feedback.work, plan.k, gradient, anew, estimates)
    if estimates.step % estimates.region_interval == 0 or not estimates.bounds:
        estimates.bounds = yield from _balanced_regions(mine.indices, plan)
    estimates.step += 1
    region = yield from direct_reduce_scatter(feedback.take(mine, codec), estimates.bounds, plan.rank, codec)
    region = region.shifted(estimates.bounds[plan.rank])
    if anew:
        (counts,) = yield from gather_numbers([len(region)], plan, region.values.device)
        gathered = yield from bruck_all_gather(region.values.abs(), counts, range(plan.world_size), plan.rank)
        magnitudes = torch.cat(gathered)
        keep = min(plan.k, magnitudes.numel())
        estimates.global_threshold = kth_largest(magnitudes, keep) if keep else 0.0
    reaches = ~(region.values.abs() < estimates.global_threshold)  # also NaN, which close() refuses
    feedback.discard(region.at(~reaches))
    kept = feedback.round(region.at(reaches), codec)
    return (yield from _balanced_all_gather(kept, plan, codec))


def _reaching_local_threshold(
    work: Tensor, k: int, gradient: ChunkedGradient | None, anew: bool, estimates: OkTopkEstimates
) -> SparseVector:
    if not work.numel():
        return empty_like(work)
    if anew:
        if gradient is not None:
            gradient.add_to(work)
            gradient = None
        estimates.local_threshold = kth_largest(work.abs(), min(k, work.numel()))
    return add_and_threshold(work, estimates.local_threshold, 2 * k, gradient)  # messages stay bounded


def _balanced_regions(indices: Tensor, plan: Plan) -> Generator[Round, None, list[int]]:
    """Return regions that hold about as many entries each: the mean over ranks of the cuts of each."""
    world_size, numel = plan.world_size, plan.numel
    positions = [len(indices) * part // world_size for part in range(1, world_size)]
    mine = [int(indices[position]) if len(indices) else numel for position in positions]
    everyone = yield from gather_numbers(mine, plan, indices.device)
    return [0, *(sum(cuts) // world_size for cuts in everyone), numel]


def _balanced_all_gather(vector: SparseVector, plan: Plan, codec: EntryCodec) -> Exchange:
    """Return all entries on all ranks; where one rank has very many, they are first spread evenly."""
    numel, ranks = plan.numel, range(plan.world_size)
    (counts,) = yield from gather_numbers([len(vector)], plan, vector.values.device)
    if max(counts) * len(ranks) > _IMBALANCE * sum(counts):
        vector, counts = yield from _spread(vector, counts, plan, codec)
    sizes = [codec.nbytes(numel, count) for count in counts]
    message = codec.encode(vector, numel, len(vector))
    messages = yield from bruck_all_gather(message, sizes, ranks, plan.rank)
    return concatenated([codec.decode(each, numel, count) for each, count in zip(messages, counts, strict=True)])


def _spread(
    vector: SparseVector, counts: Sequence[int], plan: Plan, codec: EntryCodec
) -> Generator[Round, None, tuple[SparseVector, tuple[int, ...]]]:
    """Give every rank an equal part of all entries, in their order: each overlap of two ranks' parts is a message."""
    rank, ranks, numel = plan.rank, range(plan.world_size), plan.numel
    have = [sum(counts[:r]) for r in range(len(ranks) + 1)]
    get = even_bounds(have[-1], len(ranks))

    def overlap(sender: int, receiver: int) -> tuple[int, int]:
        first, last = max(have[sender], get[receiver]), min(have[sender + 1], get[receiver + 1])
        return first, max(first, last)

    outgoing, incoming, lengths = [], [], []
    for peer in ranks:
        first, last = overlap(rank, peer)
        outgoing.append(codec.encode(vector.at(slice(first - have[rank], last - have[rank])), numel, last - first))
        first, last = overlap(peer, rank)
        lengths.append(last - first)
        incoming.append(outgoing[0].new_empty(codec.nbytes(numel, last - first)))
    incoming[rank] = outgoing[rank]
    yield from pairwise_exchange(outgoing, incoming, rank)
    parts = [codec.decode(message, numel, length) for message, length in zip(incoming, lengths, strict=True)]
    return concatenated(parts), tuple(end - start for start, end in itertools.pairwise(get))
