"""Wrapping by size: consecutive blocks of a model in one group of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_hooks.comm import mebibytes


def shard_by_size(model: nn.Module, blocks: Sequence[nn.Module], block_mb: float, **options: Any) -> nn.Module:
    """``fully_shard`` for runs of blocks of at least so many MiB together, then for the rest at the root.

    Blocks of one group are gathered and reduced together: larger groups make fewer, longer messages, smaller ones
    begin earlier and need less memory.

    Args:
        model: changed in place, and returned.
        blocks: modules inside of it, such as the layers of a transformer, in the order in which they run.
        block_mb: least size of a group, in MiB of parameters; the last one may be smaller.
        options: of ``fully_shard``.
    """
    run: list[nn.Module] = []
    for block in blocks:
        run.append(block)
        if sum(parameter.nbytes for member in run for parameter in member.parameters()) >= mebibytes(block_mb):
            fully_shard(run if len(run) > 1 else run[0], **options)
            run = []
    if run:
        fully_shard(run if len(run) > 1 else run[0], **options)
    fully_shard(model, **options)
    return model
