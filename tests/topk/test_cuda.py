"""Selections and exchanges of vectors on a GPU: exactly what they are on the processor.

Prevents: operations whose result depends on the device, such as ties that go to whichever thread is first.
"""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch

from ddp_hooks.comm import run_on_fabric
from ddp_hooks.topk.algorithms import Name, SparseSum, Sparsity
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.selection import BlockSelector
from ddp_hooks.topk.sparse import SparseVector
from ddp_hooks.topk.wire import Wire
from tests.topk.test_spardl import returning

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

GPU = torch.device("cuda")


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["normal", "few values", "zeros"])
def test_selections(density: float, kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    residual, gradient = torch.randn(300_007, generator=generator), torch.randn(300_007, generator=generator)
    if kind != "normal":
        residual, gradient = residual.round(), gradient.round()
    if kind == "zeros":
        present = torch.rand(300_007, generator=generator) < density / 3
        residual, gradient = residual * present, gradient * present
    bounds, chosen = (0, 100_000, 300_007), []
    counts = tuple(round(density * (end - start)) for start, end in itertools.pairwise(bounds))
    for device in (torch.device("cpu"), GPU):
        selector = BlockSelector(residual.to(device).clone(), bounds, counts, Scattered((gradient.to(device),)))
        chosen.append([selector.select(block) for block in range(2)])
    for ours, theirs in zip(*chosen, strict=True):
        assert torch.equal(ours.indices, theirs.indices.cpu()) and torch.equal(ours.values, theirs.values.cpu())


@pytest.mark.parametrize("teams", [(1, "r"), (2, "r"), (2, "b")])
@pytest.mark.parametrize("format", ["exact", "compact"])
@pytest.mark.parametrize("name", get_args(Name))
def test_exchanges(name: Any, format: Any, teams: Any) -> None:
    outcomes = []
    for device in (torch.device("cpu"), GPU):
        sparsity = Sparsity(name, 400, Wire(format, torch.float32), *teams)
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
