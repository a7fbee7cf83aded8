"""Time that a sparse all-reduce computes, measured with all workers in this process."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, run_on_fabric
from ddp_hooks.sparse import EntryCodec, SparseSum, Sparsity
from ddp_hooks.sparse.common import Exchange


def selection_cost(gradient: Tensor, density: float, workers: int) -> float:
    """Return the seconds that each of ``workers`` computes in a sparse all-reduce (SparDL) of a gradient.

    Args:
        gradient: (n,), floating point; every worker gets its elements in an order of its own.
        density: part of the elements to keep, in (0, 1].
        workers: how many.
    """
    numel = gradient.numel()
    sparsity = Sparsity("spardl", max(1, round(density * numel)), EntryCodec("compact", gradient.dtype))
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


def _written(exchange: Exchange, dense: Tensor) -> Algorithm:
    """Run the exchange, and write its sum as a dense vector."""
    total = yield from exchange
    dense.zero_()
    dense[total.indices.long()] = total.values.to(dense.dtype)
