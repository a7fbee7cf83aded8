"""What is refused, and with which advice."""

from __future__ import annotations

from typing import Any

import torch

from ddp_hooks.comm import see, torch_compat


def refuse_state_dict(*_: Any) -> None:
    """A hook for saving and loading an optimizer whose shards are no longer looked after; raises."""
    raise RuntimeError(
        "DearState was closed, and this optimizer still holds a shard of its state: save it before close(), with "
        f"state.consolidate() or state.full_optimizer_state_dict(){see('the-state-was-closed')}"
    )


def refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A step hook for an optimizer whose shards are no longer reduced; raises."""
    torch_compat.undo_making_state(optimizer)
    raise RuntimeError(
        "DearState was closed, and this optimizer still holds shards: make a new optimizer over the model's parameters"
        f"{see('the-state-was-closed')}"
    )


def refuse_join(*_: Any, **__: Any) -> Any:
    """Stands for ``join`` and ``join_hook`` of a DDP module; raises."""
    raise RuntimeError(
        "join() cannot work with DearState: a rank that has run out of data makes no forward, in which parameters "
        "are gathered. Give every rank the same number of batches: DistributedSampler(drop_last=True), or stop with "
        "the rank that has the fewest (itertools.islice(loader, smallest), all-reduced with ReduceOp.MIN)"
        f"{see('uneven-batches')}"
    )
