"""The hook itself. No ``from __future__ import annotations`` here: DDP compares annotations by identity."""

import torch
import torch.distributed as dist

from ddp_hooks.comm import wrong_state
from ddp_hooks.quantized.state import QuantizedState


def quantized_hook(state: QuantizedState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Start the all-reduce of ``bucket`` in fewer bits; backward goes on meanwhile.

    ``bucket.buffer()`` is changed in place: it becomes the mean over ranks, rounded, the same bits on every rank.

    Usage: ``ddp.register_comm_hook(QuantizedState(ddp, QuantizedConfig(bits=8)), quantized_hook)``.

    Raises:
        TypeError: if ``state`` is no QuantizedState; otherwise the errors of :meth:`QuantizedState.reduce_bucket`.
    """
    if not isinstance(state, QuantizedState):
        raise wrong_state("quantized_hook", "QuantizedState(ddp, QuantizedConfig(bits=8))", state)
    return state.reduce_bucket(bucket)
