"""Do all ranks hold the same parameters? A check for debugging."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import compare, in_storage_order, see
from ddp_hooks.dear.config import DearConfig


def refuse_parted_replicas(
    parameters: Sequence[Tensor], names: Sequence[str], step: int, group: dist.ProcessGroup, config: DearConfig
) -> None:
    """Raise RuntimeError, on every rank, if a parameter differs between ranks in any bit; collective."""
    digests = {f"the hash of {name}": _digest(p) for name, p in zip(names, parameters, strict=True)}
    difference = compare(digests, None, group, f"the model after step {step}", config).difference
    if difference is not None:
        raise RuntimeError(
            f"{difference}. Look for what only some ranks do: writing parameters, seeding, skipping a step or a "
            f"backward{see('replicas-differ')}"
        )


def _digest(parameter: Tensor) -> str:
    content = in_storage_order(parameter.detach()).cpu().view(torch.uint8).numpy()
    return hashlib.blake2b(content.data, digest_size=6).hexdigest()
