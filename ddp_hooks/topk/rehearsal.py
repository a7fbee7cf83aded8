"""A sparse all-reduce of all workers in this process: how long one of them computes for it."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, run_on_fabric
from ddp_hooks.topk.algorithms import SparseSum, Sparsity
from ddp_hooks.topk.wire import Wire


def compute_s(gradient: Tensor, density: float, workers: int) -> float:
    """Seconds that one of so many workers computes in a sparse all-reduce (SparDL) of gradients like this one.

    Args:
        gradient: (n,), floating point; every worker gets its elements in an order of its own.
        density: part of the elements that is kept, in (0, 1].
        workers: how many.
    """
    numel = gradient.numel()
    wire = Wire("compact", gradient.dtype)
    sparsity = Sparsity("spardl", max(1, round(density * numel)), wire)
    gradients = [gradient.roll(rank * numel // workers) for rank in range(workers)]
    residuals = [torch.zeros_like(gradient) for _ in range(workers)]
    sums = [SparseSum(sparsity, numel, rank, workers) for rank in range(workers)]
    dense = torch.empty_like(gradient)
    if gradient.is_cuda:
        torch.cuda.synchronize(gradient.device)
    start_s = time.perf_counter()
    run_on_fabric([_written(sums[r].run(residuals[r], gradients[r]), dense) for r in range(workers)])
    if gradient.is_cuda:
        torch.cuda.synchronize(gradient.device)
    return (time.perf_counter() - start_s) / workers


def _written(exchange: Generator[Any, None, Any], dense: Tensor) -> Algorithm:
    """The exchange, and its sum written as a dense vector."""
    total = yield from exchange
    dense.zero_()
    dense[total.indices.long()] = total.values.to(dense.dtype)
