"""Columns of tables: cut from a whole table and put together again, in several runs of rows, on the fabric.

Prevents: rows of a later run in the place of earlier ones; columns of another rank.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from ddp_hooks.comm import Algorithm, run_on_fabric
from ddp_hooks.embedding import table as table_module
from ddp_hooks.embedding.table import Table, column_bounds, gather_columns, scatter_columns


@pytest.mark.parametrize("to", [None, 1])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_table_is_cut_and_put_together(world_size: int, to: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    num_rows, dim = 23, 7
    monkeypatch.setattr(table_module, "_CHUNK_BYTES", 5 * dim * 4)  # five runs of rows
    full, bounds = torch.arange(float(num_rows * dim)).view(num_rows, dim), column_bounds(dim, world_size)
    tables = [
        Table(0, "words", (), num_rows, dim, bounds, rank, nn.Parameter(torch.zeros(num_rows, stop - start)), None)
        for rank, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    run_on_fabric([scatter_columns(table, full) for table in tables])
    for rank, table in enumerate(tables):
        assert torch.equal(table.weight, full[:, bounds[rank] : bounds[rank + 1]])
    gathered: list[Tensor | None] = [None] * world_size

    def gather(rank: int) -> Algorithm:
        weight = tables[rank].weight.detach()
        gathered[rank] = yield from gather_columns(tables[rank], weight, to)

    run_on_fabric([gather(rank) for rank in range(world_size)])
    for rank, found in enumerate(gathered):
        if to in (None, rank):
            assert found is not None and torch.equal(found, full)
        else:
            assert found is None
