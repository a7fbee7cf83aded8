"""Where ranks of tests have their tensors, so that the same test runs on processors and on GPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree


def rank_device() -> torch.device:
    """This rank's GPU in a pool of NCCL ranks, else the processor."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_device(values: Any) -> Any:
    """The same with its tensors on this rank's device."""
    device = rank_device()
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), values)
