"""Where torch offers no hook: instance methods that are extended or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ddp_hooks.comm import Undo


def extend_zero_grad(optimizer: torch.optim.Optimizer, also: Callable[[bool], None]) -> Undo:
    """Call ``also(set_to_none)`` before every ``optimizer.zero_grad(set_to_none)``."""
    # There is no hook for zero_grad; torch's own schedulers wrap step() on the instance in the same way.
    original = optimizer.zero_grad
    extended_before = "zero_grad" in vars(optimizer)

    def zero_grad(set_to_none: bool = True) -> None:
        also(set_to_none)
        original(set_to_none=set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def undo() -> None:
        if vars(optimizer).get("zero_grad") is not zero_grad:
            return  # somebody has extended ours meanwhile; it does no harm
        if extended_before:
            optimizer.zero_grad = original  # type: ignore[method-assign]
        else:
            del optimizer.zero_grad

    return Undo(undo)


def refuse_state_dict(*_: Any) -> None:
    """A hook for saving and loading an optimizer whose shards are no longer looked after; raises."""
    raise RuntimeError(
        "DearState was closed, and this optimizer still holds a shard of its state: save it before close(), with "
        "state.consolidate() or state.full_optimizer_state_dict()"
    )


def refuse_step(*_: Any) -> None:
    """A step hook for an optimizer whose shards are no longer reduced; raises."""
    raise RuntimeError(
        "DearState was closed, and this optimizer still holds shards: make a new optimizer over the model's parameters"
    )


def refuse_join(*_: Any, **__: Any) -> Any:
    """Stands for ``join`` and ``join_hook`` of a DDP module; raises."""
    raise RuntimeError(
        "join() cannot work with DearState: a rank that has run out of data makes no forward, in which parameters "
        "are gathered. Give every rank the same number of batches: DistributedSampler(drop_last=True), or stop with "
        "the rank that has the fewest (itertools.islice(loader, smallest), all-reduced with ReduceOp.MIN)"
    )
