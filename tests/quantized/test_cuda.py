"""The all-reduce in fewer bits on NCCL.

Prevents: gradients that are read before a stream has written them, and memory that another stream still reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.quantized.twins import CONFIG, Side, agree, noise
from tests.support.workers import WorkerPools


def lost(rank: int, world_size: int, changes: dict[str, Any]) -> float:
    """Return the largest number that was neither applied nor kept in some steps."""
    side = Side(replace(CONFIG, **changes))
    parameters = list(side.model.parameters())
    missing = [torch.zeros_like(p) for p in parameters]
    for step in range(4):
        side.ddp.zero_grad()
        side.ddp(10 * step + rank).backward()
        for i, gradient in enumerate(side.gradients()):
            given: list[Tensor] = [noise(10 * step + other, i, parameters[i]) for other in range(world_size)]
            missing[i] += torch.stack(given).sum(0).to(gradient.device) - world_size * gradient
        assert agree(side.gradients())
    kept = side.state.state_dict()["residual"]
    largest = [0.0]
    for i, each in enumerate(missing):
        dist.all_reduce(kept[f"values.{i}"])
        largest += (each - kept[f"values.{i}"]).abs().flatten().tolist()
    assert any(each.any() for each in kept.values())
    side.state.close()
    return max(largest)


@pytest.mark.parametrize(("world_size", "changes"), [
    (2, {}), (3, {"bits": 4}), (2, {"bits": 16, "block_numel": None}), (4, {"node_size": 2}),
])  # fmt: skip
def test_nothing_is_lost(gpu_workers: WorkerPools, world_size: int, changes: dict[str, Any]) -> None:
    assert max(gpu_workers(world_size).run(lost, changes)) < 1e-5
