"""What every hook asks of a bucket of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import see


def indices_of(bucket: dist.GradBucket, index_of: Callable[[Any], int | None], state: str) -> tuple[int, ...]:
    """Return the numbers of a bucket's parameters; raise RuntimeError if one has none in ``state``, a class's name."""
    indices = [index_of(parameter) for parameter in bucket.parameters()]
    known = tuple(index for index in indices if index is not None)
    if len(known) < len(indices):
        raise RuntimeError(
            f"DDP reduces a parameter that was frozen, or not there, when {state} was created: change the model before "
            f"wrapping it{see('set-up-changed-later')}"
        )
    return known


def future_of(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Return a future for what a hook makes of a bucket's memory."""
    devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type != "cpu" else []
    return torch.futures.Future(devices=devices)
