"""Whole tables: scattered by columns at the start, gathered to save or read them."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Recv, Round, Send, pairwise_exchange, round_of
from ddp_hooks.embedding.table import Table

_CHUNK_BYTES = 32 << 20  # of whole rows in one round, which bounds the memory of messages


def scatter_columns(table: Table, full: Tensor, rank: int, world_size: int) -> Algorithm:
    """Fill ``table.weight`` on every rank with its columns of the first rank's ``full``, (num_rows, dim)."""
    with torch.no_grad():
        if rank == 0:
            table.weight.copy_(table.cut(full, 0))
        for start, stop in _chunks(table):
            if rank == 0:
                parts = [(peer, table.cut(full[start:stop], peer)) for peer in range(1, world_size)]
                yield round_of(*(Send(peer, part.contiguous().view(-1)) for peer, part in parts))
            else:
                yield round_of(Recv(0, table.weight.detach()[start:stop].view(-1)))


def gather_columns(
    table: Table, columns: Tensor, rank: int, world_size: int, to: int | None
) -> Generator[Round, None, Tensor | None]:
    """Gather a table, or an entry of its optimizer state, from (num_rows, own columns) of all ranks.

    Returns:
        (num_rows, dim) on rank ``to``, or on all ranks if ``to`` is None; otherwise None.
    """
    receives = to is None or to == rank
    full = columns.new_empty(table.shape) if receives else None
    for start, stop in _chunks(table):
        mine = columns[start:stop].reshape(-1)
        outgoing = [mine if to is None or peer == to else mine[:0] for peer in range(world_size)]
        sizes = [(stop - start) * table.num_columns(peer) if receives else 0 for peer in range(world_size)]
        incoming = [mine if peer == rank else mine.new_empty(size) for peer, size in enumerate(sizes)]
        yield from pairwise_exchange(outgoing, incoming, rank)
        for peer, part in enumerate(incoming) if full is not None else ():
            assert full is not None
            table.cut(full[start:stop], peer).copy_(part.view(stop - start, table.num_columns(peer)))
    return full


def _chunks(table: Table) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_BYTES // max(1, table.dim * table.weight.element_size()))
    return [(start, min(start + step, table.num_rows)) for start in range(0, table.num_rows, step)]
