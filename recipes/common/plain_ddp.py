"""Hook for plain DDP with sparse gradients. No ``from __future__ import annotations``: DDP compares them."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def all_reduce_apart(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce as DDP itself does, but complete the all-reduce of a sparse gradient before the next one begins.

    In torch 2.14.1 gloo damages memory otherwise: see docs/tables.md, "Tables that stay whole".
    """
    gradient = bucket.buffer()
    if not gradient.is_sparse:
        return allreduce_hook(group, bucket)
    mean = gradient / dist.get_world_size(group)
    dist.all_reduce(mean, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(mean)
    return future
