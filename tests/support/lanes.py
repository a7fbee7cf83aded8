"""Partitions for tests of lanes."""

from __future__ import annotations

import torch


def whole(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-9, 10, (numel,), generator=torch.Generator().manual_seed(seed)).to(dtype)
