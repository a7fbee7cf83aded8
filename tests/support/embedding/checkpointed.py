"""A table under activation checkpointing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """Forwards of tables are repeated in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=True)
        self.factor = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        def part(factor: Tensor) -> Tensor:
            return (self.table(ids) * factor).pow(2).sum()

        first: Tensor = checkpoint(part, self.factor, use_reentrant=self.reentrant)
        second: Tensor = checkpoint(part, self.factor, use_reentrant=self.reentrant)
        return first + second
