"""The hook itself. No ``from __future__ import annotations`` here: DDP compares annotations by identity."""

import torch
import torch.distributed as dist

from ddp_hooks.comm import wrong_state
from ddp_hooks.topk.state import TopKState


def topk_hook(state: TopKState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start the sparse all-reduce of the groups that are ready with ``bucket``; backward goes on meanwhile.

    ``bucket.buffer()`` is changed in place: it becomes the mean over ranks of the kept gradients.

    Usage: ``ddp.register_comm_hook(TopKState(ddp, TopKConfig(density=0.01)), topk_hook)``.

    Raises:
        TypeError: if ``state`` is no TopKState; otherwise the errors of :meth:`TopKState.reduce_bucket`.
    """
    if not isinstance(state, TopKState):
        raise wrong_state("topk_hook", "TopKState(ddp, TopKConfig(density=0.01))", state)
    return state.reduce_bucket(bucket)
