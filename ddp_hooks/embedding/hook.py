"""The hook itself. No ``from __future__ import annotations`` here: DDP compares annotations by identity."""

import torch
import torch.distributed as dist

from ddp_hooks.comm import wrong_state
from ddp_hooks.embedding.replicated import EmbeddingState


def embedding_hook(state: EmbeddingState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a sparse gradient by partition and exchange, a dense one as ``state`` says.

    Usage: ``ddp.register_comm_hook(EmbeddingState(ddp), embedding_hook)``.
    """
    if not isinstance(state, EmbeddingState):
        raise wrong_state("embedding_hook", "EmbeddingState(ddp)", state)
    return state.reduce_bucket(bucket)
