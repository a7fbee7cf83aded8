"""Parts that TopkDSA and Ok-Topk share: entries go straight to the owner of their region, and lengths vary."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from ddp_hooks.comm import Recv, Round, Send, bruck_all_gather, pairwise_exchange, round_of
from ddp_hooks.topk.sparse import SparseVector, total
from ddp_hooks.topk.wire import Wire


def direct_reduce_scatter(
    vector: SparseVector, bounds: Sequence[int], rank: int, wire: Wire
) -> Generator[Round, None, SparseVector]:
    """The sum over all ranks of this rank's region of a sparse vector: P rounds, the first one for lengths.

    Args:
        vector: values as :meth:`~ddp_hooks.topk.wire.Wire.round` has them.
        bounds: where the regions of ranks begin and end, the same on every rank.
        rank: this worker's.
        wire: how entries travel.

    Returns:
        The region's sum, with indices that begin at 0 where it begins; formed in the order of the ranks.
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
        message = wire.encode(parts[target], bounds[target + 1] - bounds[target], len(parts[target]))
        count = int(theirs[source])
        arriving = message.new_empty(wire.nbytes(mine, count) if count else 0)
        yield round_of(Recv(source, arriving), Send(target, message if len(parts[target]) else message[:0]))
        received[source] = wire.decode(arriving, mine, count) if count else parts[rank].at(slice(0, 0))
    return total([received[r] for r in range(world_size)])


def gather_numbers(
    numbers: Sequence[int], rank: int, world_size: int, device: torch.device
) -> Generator[Round, None, list[list[int]]]:
    """Some integers of every rank, on every rank; they travel from and to memory of ``device``."""
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    gathered = yield from bruck_all_gather(mine, [mine.numel()] * world_size, range(world_size), rank)
    return [part.tolist() for part in gathered]
