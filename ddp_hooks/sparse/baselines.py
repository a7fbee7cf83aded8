"""TopkA, TopkDSA (renggli2019sparcml) and gTopk (shi2019gtopk): rows 1 to 3 of SparDL's Table I.

Their selectors have the vector as one block.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch

from ddp_hooks.comm import Recv, Round, Send, bruck_all_gather, num_rounds, pairwise_exchange, round_of
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.common import Exchange, Plan, even_bounds
from ddp_hooks.sparse.error_feedback import ErrorFeedback
from ddp_hooks.sparse.selector import BlockSelector
from ddp_hooks.sparse.sparse_vector import SparseVector, add, concatenated, split_largest, total


def topka(feedback: ErrorFeedback, selector: BlockSelector, plan: Plan, codec: EntryCodec) -> Exchange:
    """Return the sum of all workers' ``k`` largest entries, up to ``P k`` of them; nothing is discarded on the way.

    The paper's table counts recursive doubling, which is Bruck's all-gather where P is a power of two: as many rounds
    and words.
    """
    message = codec.encode(feedback.take(selector.select(0), codec, in_result=True), plan.numel, plan.k)
    sizes, ranks = [message.numel()] * plan.world_size, range(plan.world_size)
    messages = yield from bruck_all_gather(message, sizes, ranks, plan.rank)
    return total([codec.decode(message, plan.numel, plan.k) for message in messages])


def topkdsa(feedback: ErrorFeedback, selector: BlockSelector, plan: Plan, codec: EntryCodec) -> Exchange:
    """Return the sum of all workers' largest entries: split, sum, gather; densely where that is shorter.

    Nothing is discarded on the way, so messages grow.
    """
    rank, ranks, bounds = plan.rank, range(plan.world_size), even_bounds(plan.numel, plan.world_size)
    lengths = [bounds[r + 1] - bounds[r] for r in ranks]
    region = yield from direct_reduce_scatter(feedback.take(selector.select(0), codec), bounds, rank, codec)
    region = feedback.round(region.shifted(bounds[rank]), codec).shifted(-bounds[rank])
    (counts,) = yield from gather_numbers([len(region)], plan, region.values.device)
    codec = replace(codec, may_be_dense=True)
    sizes = [codec.nbytes(length, count) for length, count in zip(lengths, counts, strict=True)]
    message = codec.encode(region, lengths[rank], counts[rank])
    messages = yield from bruck_all_gather(message, sizes, ranks, rank)
    parts = [codec.decode(messages[r], lengths[r], counts[r]) for r in ranks]
    return concatenated([part.shifted(bounds[r]) for r, part in enumerate(parts)])


def gtopk(feedback: ErrorFeedback, selector: BlockSelector, plan: Plan, codec: EntryCodec) -> Exchange:
    """Return about the ``k`` largest entries of the sum: reduced up a binomial tree, and sent back down.

    A branch keeps the ``k`` largest entries; the worker that discards the others has them in its residual.
    """
    numel, k, rank, world_size = plan.numel, plan.k, plan.rank, plan.world_size
    held = feedback.take(selector.select(0), codec)
    message = codec.encode(held, numel, k)
    height = next((t for t in range(num_rounds(world_size)) if rank >> t & 1), num_rounds(world_size))
    children = [rank + (1 << t) for t in range(height) if rank + (1 << t) < world_size]

    for child in children:
        arriving = message.new_empty(message.numel())
        yield round_of(Recv(child, arriving))
        held, dropped = split_largest(add(held, codec.decode(arriving, numel, k)), k)
        feedback.discard(dropped)
        held = feedback.round(held, codec)
    message = codec.encode(held, numel, k)
    if rank:
        parent = rank - (1 << height)
        yield round_of(Send(parent, message))
        message = message.new_empty(message.numel())
        yield round_of(Recv(parent, message))
    for child in reversed(children):
        yield round_of(Send(child, message))
    return codec.decode(message, numel, k)


def direct_reduce_scatter(
    vector: SparseVector, bounds: Sequence[int], rank: int, codec: EntryCodec
) -> Generator[Round, None, SparseVector]:
    """Return the sum, in the order of the ranks, of this rank's region of a vector of rounded values.

    ``bounds`` are those of the ranks' regions; indices of the result count from the region's beginning. P rounds, the
    first one for lengths.
    """
    world_size = len(bounds) - 1
    cuts = torch.searchsorted(vector.indices, torch.tensor(bounds, device=vector.indices.device))
    parts = [vector.at(slice(int(cuts[r]), int(cuts[r + 1]))).shifted(-bounds[r]) for r in range(world_size)]
    counts = [torch.tensor([len(part)], dtype=torch.int32, device=vector.indices.device) for part in parts]
    theirs = [torch.zeros_like(count) for count in counts]
    yield from pairwise_exchange(counts, theirs, rank)

    mine = bounds[rank + 1] - bounds[rank]
    received = {rank: parts[rank]}
    for shift in range(1, world_size):
        target, source = (rank + shift) % world_size, (rank - shift) % world_size
        message = codec.encode(parts[target], bounds[target + 1] - bounds[target], len(parts[target]))
        count = int(theirs[source])
        arriving = message.new_empty(codec.nbytes(mine, count))
        yield round_of(Recv(source, arriving), Send(target, message))
        received[source] = codec.decode(arriving, mine, count)
    return total([received[r] for r in range(world_size)])


def gather_numbers(
    numbers: Sequence[int], plan: Plan, device: torch.device
) -> Generator[Round, None, list[tuple[int, ...]]]:
    """Return the integers of every rank, first ones first; they travel in memory of ``device``."""
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    ranks = range(plan.world_size)
    gathered = yield from bruck_all_gather(mine, [mine.numel()] * len(ranks), ranks, plan.rank)
    return list(zip(*(part.tolist() for part in gathered), strict=True))
