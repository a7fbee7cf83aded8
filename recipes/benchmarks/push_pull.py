"""Tables whose rows are partitioned, as a sharded parameter server (Parallax) has them: the baseline of that name.

Every rank serves a range of rows: it answers pulls with vectors, adds up what is pushed, and updates. With as many
servers as workers each sends and receives what Table 2 of the EmbRace paper says in its row "PS". Nothing is scheduled:
a pull waits for its vectors, and pushes are complete before the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class PushPullTable(nn.Module):
    """An embedding of which this rank holds some rows; SGD.

    Args:
        num_rows, dim: of the whole table.
        lr: of the updates.
    """

    def __init__(self, num_rows: int, dim: int, lr: float) -> None:
        super().__init__()
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.bounds = [num_rows * rank // self.world_size for rank in range(self.world_size + 1)]
        # No parameter: DDP is to leave it alone.
        self.rows = torch.zeros(self.bounds[self.rank + 1] - self.bounds[self.rank], dim)
        self.dim, self.lr = dim, lr
        self.anchor = torch.zeros(0, requires_grad=True)
        self.group: Any = dist.new_group()  # beside DDP's

    def forward(self, ids: Tensor) -> Tensor:
        """(n, dim) vectors of (n,) ids."""
        wanted, inverse = np.unique(ids.numpy(), return_inverse=True)
        mine = [int(n) for n in np.diff(np.searchsorted(wanted, self.bounds))]
        theirs = self._exchange_counts(mine)
        asked = self._exchange(torch.from_numpy(wanted.astype(np.int32)), mine, theirs) - self.bounds[self.rank]
        vectors = self._exchange(self.rows.index_select(0, asked), theirs, mine)
        pull = _Pull(self, asked, mine, theirs, len(wanted))
        result: Tensor = _Push.apply(self.anchor, vectors, torch.from_numpy(inverse), pull)
        return result

    def push(self, gradient: Tensor, pull: _Pull) -> None:
        """Send (rows of this rank, dim) to their owners, which update."""
        pushed = self._exchange(gradient, pull.mine, pull.theirs)
        self.rows.index_add_(0, pull.asked, pushed, alpha=-self.lr / self.world_size)

    def _exchange_counts(self, mine: list[int]) -> list[int]:
        received = torch.empty(self.world_size, dtype=torch.int64)
        dist.all_to_all_single(received, torch.tensor(mine), group=self.group)
        return received.tolist()

    def _exchange(self, values: Tensor, mine: list[int], theirs: list[int]) -> Tensor:
        received = values.new_empty(sum(theirs), *values.shape[1:])
        dist.all_to_all_single(received, values, theirs, mine, group=self.group)
        return received


class _Pull:
    def __init__(self, table: PushPullTable, asked: Tensor, mine: list[int], theirs: list[int], count: int) -> None:
        self.table, self.asked, self.mine, self.theirs, self.count = table, asked, mine, theirs, count


class _Push(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, vectors: Tensor, inverse: Tensor, pull: _Pull) -> Tensor:
        ctx.inverse, ctx.pull = inverse, pull
        return vectors.index_select(0, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        pull: _Pull = ctx.pull
        rows = gradient.new_zeros(pull.count, pull.table.dim).index_add_(0, ctx.inverse, gradient)
        pull.table.push(rows, pull)
        return None, None, None, None
