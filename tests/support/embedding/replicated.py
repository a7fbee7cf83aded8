"""Tables beside DeAR with replicated updates."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, EmbeddingState, TopKConfig, TopKState, dear_hook, embedding_hook, topk_hook
from tests.support.dear.twins import CONFIG as DEAR_CONFIG
from tests.support.devices import on_device, rank_device
from tests.support.embedding.twins import Tables, batches, sum_and_divide


def train(rank: int, world_size: int, dense: str) -> tuple[list[float], int]:
    """The largest difference to plain DDP after each step, and the bytes of sparse gradients."""
    torch.manual_seed(7)
    original = Tables(world_size).to(rank_device())
    ours = DistributedDataParallel(copy.deepcopy(original), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    plain = DistributedDataParallel(copy.deepcopy(original), bucket_cap_mb=0.05)
    plain.register_comm_hook(None, sum_and_divide)
    optimizers: list[list[Any]] = []
    for ddp in (ours, plain):
        module: Any = ddp.module
        tables = [module.encoder.weight, module.decoder["words"].weight, module.narrow.weight]
        optimizers.append([torch.optim.SGD([module.dense], lr=0.5), torch.optim.SparseAdam(tables, lr=0.25)])
    state = EmbeddingState(ours, timeout_s=20)
    other: Any = None
    if dense == "dear":
        other = DearState(ours, optimizers[0][0], DEAR_CONFIG)
        state.use_for_dense(dear_hook, other)
    elif dense == "topk":
        other = TopKState(ours, TopKConfig(density=1.0, timeout_s=20))
        state.use_for_dense(topk_hook, other)
    ours.register_comm_hook(state, embedding_hook)
    gaps = []
    for batch in on_device(batches(rank, world_size, 6)):
        for ddp, steppers in zip((ours, plain), optimizers, strict=True):
            for optimizer in steppers:
                optimizer.zero_grad()
            ddp(batch).backward()
            for optimizer in steppers:
                optimizer.step()
        if dense == "dear":
            other.synchronize()
        pairs = zip(ours.module.parameters(), plain.module.parameters(), strict=True)
        gaps.append(max(float((p - q).abs().max()) for p, q in pairs))
    sent = state.traffic.sent_bytes
    if other is not None:
        other.close()
    state.close()
    return gaps, sent
