"""A model of matrices, with an optimizer that needs whole ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(6)), nn.Linear(24, 3, bias=False))

    def forward(self, values: Tensor) -> Tensor:
        return (self.layers(values) - 1).square().mean()


def matrices(world_size: int) -> nn.Module:
    return Matrices().double()


def wide_rows(rank: int, world_size: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (torch.randn(4, 24, generator=generator, dtype=torch.float64),)
