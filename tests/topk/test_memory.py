"""Memory of the hook: one copy of the gradient, and little more while a selection runs.

Prevents: copies of whole vectors in selections and exchanges, and residuals that are kept twice.
"""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKConfig, TopKState, topk_hook
from recipes.benchmarks.heap import HeapWatch, used_heap_bytes
from tests.support.workers import WorkerPools

WIDTH, LAYERS = 500, 48  # 48 MB


def peak_bytes(rank: int, world_size: int, config: TopKConfig | None) -> float:
    """In use at most in the third backward, beyond the parameters."""
    gc.collect()  # DDP and its reducer refer to each other
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    before = used_heap_bytes()  # by now gloo's threads have let go of the last job's buckets
    ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=8, gradient_as_bucket_view=True)
    state = TopKState(ddp, config) if config is not None else None
    if state is not None:
        ddp.register_comm_hook(state, topk_hook)
    for step in range(3):
        inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(17 * step + rank))
        loss = ddp(inputs).square().mean()
        with HeapWatch() as watch:
            loss.backward()
    if state is not None:
        state.close()
    return watch.peak_bytes - before


@pytest.mark.slow
@pytest.mark.quick("2")
@pytest.mark.skipif(math.isnan(used_heap_bytes()), reason="bytes in use are counted by glibc 2.33 or newer")
@pytest.mark.parametrize("world_size", [2, 4])
def test_one_copy_of_the_gradient(workers: WorkerPools, world_size: int) -> None:
    parameters = LAYERS * WIDTH * WIDTH * 4
    config = TopKConfig(density=0.01, group_mb=16)  # three groups: a copy of one would show
    plain, ours = (workers(world_size).run(peak_bytes, each) for each in (None, config))
    for without, with_hook in zip(plain, ours, strict=True):
        assert 1.0 <= without / parameters < 1.2  # the gradients
        assert 0.9 < (with_hook - without) / parameters < 1.12  # the residual; selections, of two lanes at a time
