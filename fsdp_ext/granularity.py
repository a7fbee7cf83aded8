"""Wrapping by size: consecutive blocks of a model in one group of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_hooks.comm import mebibytes


def shard_by_size(
    model: nn.Module, blocks: Sequence[nn.Module], block_mb: float, first_mb: float = 1.0, **options: Any
) -> nn.Module:
    """``fully_shard`` for runs of blocks of at least so many MiB together, then for the rest at the root.

    Blocks of one group are gathered and reduced together: larger groups make fewer, longer messages and take less of
    the processor, smaller ones begin earlier and need less memory. The first group is small, as nothing hides it: of
    all blocks its gradients come last, when there is nothing left to compute, and its parameters are needed first.

    Args:
        model: changed in place, and returned.
        blocks: modules inside of it, such as the layers of a transformer, in the order in which they run.
        block_mb: least size of a group, in MiB of parameters; the last one may be smaller.
        first_mb: likewise, of the first group, if that is less.
        options: of ``fully_shard``.
    """
    run: list[nn.Module] = []
    enough = min(mebibytes(first_mb), mebibytes(block_mb))
    for block in blocks:
        run.append(block)
        if sum(parameter.nbytes for member in run for parameter in member.parameters()) >= enough:
            fully_shard(run if len(run) > 1 else run[0], **options)
            run, enough = [], mebibytes(block_mb)
    if run:
        fully_shard(run if len(run) > 1 else run[0], **options)
    fully_shard(model, **options)
    return model
