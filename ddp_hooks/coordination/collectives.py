"""The collectives that are coordinated, as generators, beside those of :mod:`ddp_hooks.comm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    Partition,
    Recv,
    Send,
    aligned_bounds,
    pairwise_exchange,
    ring_all_gather,
    round_of,
)


def broadcast(tensor: Tensor, rank: int, world_size: int, root: int) -> Algorithm:
    """Copy the contiguous ``tensor`` from rank ``root`` to all others, in place: a scatter, then an all-gather.

    The root sends (P - 1) / P of it twice, however many ranks there are.
    """
    flat = tensor.view(-1)
    chunks = Partition(flat, aligned_bounds(flat.numel(), world_size, flat.element_size())).ranges
    if rank == root:
        yield round_of(*(Send(peer, chunk) for peer, chunk in enumerate(chunks) if peer != root))
    else:
        yield round_of(Recv(root, chunks[rank]))
    yield from ring_all_gather(chunks, rank)


def all_gather_rows(rows: Tensor, rank: int, world_size: int, finish: Callable[[Tensor], None]) -> Algorithm:
    """Everybody's rows, one below the other in the order of ranks; ranks may have different numbers of them.

    Args:
        rows: (n, …), of this rank, contiguous; n may differ.
        rank, world_size: of which this is one.
        finish: is given the result, (sum of n, …).
    """
    counts = torch.zeros(world_size, dtype=torch.int64)
    counts[rank] = rows.shape[0]
    yield from ring_all_gather(list(counts.split(1)), rank)
    result = rows.new_empty(int(counts.sum()), *rows.shape[1:])
    parts = list(result.split(counts.tolist()))
    parts[rank].copy_(rows)
    yield from ring_all_gather([part.view(-1) for part in parts], rank)
    finish(result)


def all_to_all_rows(
    rows: Tensor, splits: Sequence[int], rank: int, world_size: int, finish: Callable[[Tensor, list[int]], None]
) -> Algorithm:
    """Send every rank its rows, and receive those for this one, in the order of ranks.

    Args:
        rows: (sum of splits, …), contiguous: first those for rank 0, and so on.
        splits: numbers of rows, by rank.
        rank, world_size: of which this is one.
        finish: is given the result, and how many rows of it came from each rank.
    """
    outgoing_counts = list(torch.tensor(splits, dtype=torch.int64).split(1))
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    counts[rank].copy_(outgoing_counts[rank])
    yield from pairwise_exchange(outgoing_counts, counts, rank)
    received = [int(number) for number in counts]
    result = rows.new_empty(sum(received), *rows.shape[1:])
    outgoing, incoming = rows.split(list(splits)), result.split(received)
    incoming[rank].copy_(outgoing[rank])
    yield from pairwise_exchange([part.view(-1) for part in outgoing], [part.view(-1) for part in incoming], rank)
    finish(result, received)
