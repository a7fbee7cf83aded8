"""The hook itself. No ``from __future__ import annotations`` here: DDP compares annotations by identity."""

import torch
import torch.distributed as dist

from ddp_hooks.comm import wrong_state
from ddp_hooks.dear.state import DearState


def dear_hook(state: DearState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start reducing ``bucket`` and return at once, so that backward does not wait (DeAR, section III-B: BackPipe).

    ``bucket.buffer()`` is changed in place until ``optimizer.step()``: this rank's ranges become means over the ranks,
    the rest means nothing.

    Usage: ``ddp.register_comm_hook(DearState(ddp, optimizer), dear_hook)``.
    """
    if not isinstance(state, DearState):
        raise wrong_state("dear_hook", "DearState(ddp, optimizer)", state)
    return state.reduce_bucket(bucket)
