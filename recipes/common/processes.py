"""Ranks and their devices."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm


def pick_device(kind: str) -> torch.device:
    """Return the CPU, or the GPU that belongs to this local rank."""
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise SystemExit(
            f"error: --device cuda expects a GPU for every rank of a machine, found {torch.cuda.device_count()} "
            f"for local rank {local_rank}; start fewer ranks or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the ranks that the launcher started; without a launcher, be the only one."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # a model in reference cycles would keep its group alive, and with it threads that torch ends
        dist.destroy_process_group()


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def clock_s(device: torch.device) -> float:
    """Return the seconds of a monotonic clock, after all work given to the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def log_loss(step: int, loss: Tensor) -> None:
    """Print the mean of a loss over ranks, on the first rank; collective."""
    mean = mean_over_ranks(loss)
    if dist.get_rank() == 0:
        tqdm.write(f"step {step:5d}   loss {mean:.4f}")
