"""Runs of TopK whose exchange reaches into the next forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKConfig, TopKState, topk_hook
from tests.support.devices import rank_device

CONFIG = TopKConfig(density=0.1, group_mb=0.03, dense_below_numel=40, timeout_s=20, stall_warning_s=10)


class Net(nn.Module):
    """Several groups, a tied weight, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 96)
        self.twice = nn.Linear(96, 96)
        self.norm = nn.LayerNorm(96)
        self.last = nn.Linear(96, 24)
        self.tied = nn.Linear(24, 96, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        hidden = self.norm(self.twice(torch.tanh(self.twice(hidden))))
        return self.last(hidden + self.tied(inputs))


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


class Run:
    """A training run that loops act on."""

    def __init__(
        self,
        rank: int,
        config: TopKConfig,
        make: Callable[[Any], torch.optim.Optimizer] = momentum_sgd,
        model: Callable[[], nn.Module] = Net,
        **options: Any,
    ) -> None:
        torch.manual_seed(3)
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.05, **options}
        self.ddp = DistributedDataParallel(model().to(rank_device()), **options)
        self.optimizer = make(list(self.ddp.parameters()))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.state = TopKState(self.ddp, config, optimizer=self.optimizer)
        self.ddp.register_comm_hook(self.state, topk_hook)
        self.generator = torch.Generator().manual_seed(100 + rank)
        self.seen: list[Tensor] = []  # what the loop has looked at

    def batch(self, rows: int = 3) -> Tensor:
        return torch.randn(rows, 24, generator=self.generator).to(rank_device())

    def backward(self, inputs: Tensor | None = None) -> None:
        self.ddp(self.batch() if inputs is None else inputs).square().mean().backward()

    def everything(self) -> list[Tensor]:
        """Parameters, the optimizer's state and residuals."""
        self.state.synchronize()
        values = [p.detach().clone() for p in self.ddp.parameters()]
        for _, entries in sorted(self.optimizer.state_dict()["state"].items()):
            values += [value.clone() for value in entries.values() if isinstance(value, Tensor)]
        kept = self.state.state_dict()
        values += [piece.clone() for piece in tensors_in(kept["residual"])]
        values.append(torch.tensor([kept["step"], kept["num_skipped"]]))
        return values + self.seen


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def plain(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.backward()
    run.optimizer.step()
    run.scheduler.step()


def accumulated(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    with run.ddp.no_sync():
        run.backward()
    run.backward()
    run.optimizer.step()


def two_backwards(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    run.backward()
    run.backward()
    run.optimizer.step()


def saved(run: Run, step: int) -> None:
    plain(run, step)
    if step % 3 == 1:
        run.seen += [value.clone() for value in run.ddp.state_dict().values()]
        run.seen += tensors_in(run.state.state_dict()["residual"])


def outcomes(
    rank: int, world_size: int, loop: Callable[[Run, int], None], config: TopKConfig, *arguments: Any
) -> tuple[bool, int]:
    """Return True if both pipelines end in the same bits, and the number of updates in forwards."""
    results, updates = [], 0
    for pipeline in ("backward", "forward"):
        make, model, options = arguments or (momentum_sgd, Net, {})
        run = Run(rank, replace(config, pipeline=pipeline), make, model, **options)
        if run.state._pipeline is not None:
            inner = run.state._pipeline._updates
            original = inner.run

            def counting(indices: Any, original: Callable[[Any], None] = original) -> None:
                nonlocal updates
                updates += 1
                original(indices)

            inner.run = counting  # type: ignore[method-assign]
        for step in range(7):
            loop(run, step)
        results.append(run.everything())
        run.state.close()
    same = len(results[0]) == len(results[1]) and all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return same, updates
