"""Selections and exchanges of vectors on a GPU: exactly what they are on the processor; and the hook on NCCL.

Prevents: operations whose result depends on the device, such as ties that go to whichever thread is first; gradients
that are read before a stream has written them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from ddp_hooks.comm import run_on_fabric
from ddp_hooks.sparse import BlockSelector, ChunkedGradient, Name, SparseSum, SparseVector, Sparsity
from ddp_hooks.sparse.codec import EntryCodec
from tests.support.topk import forward, hooks
from tests.support.topk.algorithms import returning
from tests.support.workers import WorkerPools

GPU = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@needs_gpu
@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["normal", "few values", "zeros", "equal"])
def test_selections(density: float, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    residual, gradient = torch.randn(300_007, generator=generator), torch.randn(300_007, generator=generator)
    if kind != "normal":
        residual, gradient = residual.round(), gradient.round()
    if kind == "equal":
        residual, gradient = residual.sign(), torch.zeros_like(gradient)
    elif kind == "zeros":
        present = torch.rand(300_007, generator=generator) < density / 3
        residual, gradient = residual * present, gradient * present
    bounds, chosen = (0, 100_000, 300_007), []
    counts = tuple(round(density * (end - start)) for start, end in itertools.pairwise(bounds))
    for device in (torch.device("cpu"), GPU):
        selector = BlockSelector(residual.to(device).clone(), bounds, counts, ChunkedGradient((gradient.to(device),)))
        chosen.append([selector.select(block) for block in range(2)])
    for ours, theirs in zip(*chosen, strict=True):
        assert torch.equal(ours.indices, theirs.indices.cpu()) and torch.equal(ours.values, theirs.values.cpu())


@needs_gpu
@pytest.mark.parametrize("teams", [(1, "r"), (2, "r"), (2, "b")])
@pytest.mark.parametrize("format", ["exact", "compact"])
@pytest.mark.parametrize("name", get_args(Name))
def test_exchanges(name: Any, format: Any, teams: Any) -> None:
    outcomes = []
    for device in (torch.device("cpu"), GPU):
        sparsity = Sparsity(name, 400, EntryCodec(format, torch.float32), *teams)
        results: dict[int, SparseVector] = {}
        exchanges, residuals = [], []
        for rank in range(4):
            generator = torch.Generator().manual_seed(rank)
            residual, gradient = (torch.randint(-99, 100, (20_000,), generator=generator).float() for _ in range(2))
            residuals.append(residual.to(device))
            algorithm = SparseSum(sparsity, 20_000, rank, 4).run(residuals[-1], gradient.to(device))
            exchanges.append(returning(algorithm, results, rank))
        run_on_fabric(exchanges)
        outcomes.append([tensor.cpu() for r in range(4) for tensor in (results[r].indices, results[r].values)])
        outcomes[-1] += [residual.cpu() for residual in residuals]
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


ALGORITHMS = [{"teams": 1}, {"teams": 2, "sag": "r"}, {"teams": 2, "sag": "b"}, *hooks.ALGORITHMS[3:]]


@pytest.mark.parametrize("changes", ALGORITHMS, ids=lambda changes: "-".join(map(str, changes.values())))
@pytest.mark.parametrize("world_size", [2, 4])
def test_nothing_is_lost(gpu_workers: WorkerPools, world_size: int, changes: dict[str, Any]) -> None:
    config = replace(hooks.CONFIG, **changes)
    hooks.check(gpu_workers(world_size).run(hooks.conserve, config, hooks.plain, 5))


@pytest.mark.parametrize("changes", [{}, {"teams": 2, "sag": "b"}, {"dense_below_numel": 200}, {"algorithm": "oktopk"}])
def test_nothing_is_lost_on_two_levels(gpu_workers: WorkerPools, changes: dict[str, Any]) -> None:
    config = replace(hooks.CONFIG, node_size=2, **changes)
    hooks.check(gpu_workers(4).run(hooks.conserve, config, hooks.plain, 5))


@pytest.mark.parametrize("changes", [{"wire": "compact"}, {"dense_below_numel": 200}, {"warmup_steps": 3}], ids=str)
@pytest.mark.parametrize("loop", [hooks.zero_to_zeros, hooks.accumulate], ids=lambda loop: loop.__name__)
def test_loops(gpu_workers: WorkerPools, loop: Any, changes: dict[str, Any]) -> None:
    config = replace(hooks.CONFIG, teams=1, **changes)
    hooks.check(gpu_workers(3).run(hooks.conserve, config, loop, 5))


@pytest.mark.parametrize(
    "loop",
    [forward.plain, forward.accumulated, forward.two_backwards, forward.saved],
    ids=lambda loop: loop.__name__,
)
def test_in_the_next_forward(gpu_workers: WorkerPools, loop: Any) -> None:
    config = replace(forward.CONFIG, teams=1)
    for same, updates in gpu_workers(2).run(forward.outcomes, loop, config):
        assert same and updates > 0
