"""Work of one worker of the benchmark of conditional networks."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.coordination import coordinate
from recipes.benchmarks.conditional import ConditionalJob
from recipes.benchmarks.emulation import SleepClock
from recipes.benchmarks.harness.worker import processor_s, slowest, take_turns, total

BACKWARD_PART = 2 / 3  # of the computing time


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, clock: SleepClock, seconds: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.clock, ctx.seconds = clock, seconds
        clock.sleep(seconds * (1 - BACKWARD_PART))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        ctx.clock.sleep(ctx.seconds * BACKWARD_PART)
        return gradient, None, None


class Part(nn.Module):
    """Four layers for a single sample, and the computing time of many."""

    def __init__(self, hidden: int, compute_s: float, clock: SleepClock) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(4))
        self.compute_s, self.clock = compute_s, clock

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _Sleep.apply(torch.tanh(layer(x)), self.clock, self.compute_s / 4)
        return x


class Conditional(nn.Module):
    """A trunk, and the sum of the branches that are used."""

    def __init__(self, job: ConditionalJob) -> None:
        super().__init__()
        clock = SleepClock()
        make = partial(Part, job.hidden, job.compute_s, clock)
        self.trunk = make()
        self.branches = nn.ModuleList(make() for _ in range(job.num_branches))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        shared = self.trunk(x)
        return sum((self.branches[index](shared).square().mean() for index in used), torch.zeros(()))


def train_in_turns(job: ConditionalJob) -> dict[str, Any]:
    """Train with all variants in turns."""
    windows = take_turns(job.variants, job.rounds, lambda name: train(job, name))
    return {"windows": windows, "parameter_bytes": sum(p.nbytes for p in Conditional(job).parameters())}


def train(job: ConditionalJob, name: str) -> dict[str, Any]:
    """Time one window, and take a digest of the weights at its end."""
    torch.manual_seed(0)
    model = Conditional(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call, close, sent_bytes = _wrapped(model, optimizer, name)
    draws = random.Random(dist.get_rank() if job.choice == "rank" else 0)
    inputs = torch.Generator().manual_seed(dist.get_rank())
    begun: list[tuple[float, float, int]] = []
    for step in range(job.warmup + job.steps):
        if step == job.warmup:
            dist.barrier()
            begun.append((time.perf_counter(), processor_s(), sent_bytes()))
        optimizer.zero_grad()
        used = sorted(draws.sample(range(job.num_branches), job.num_used))
        call(torch.randn(job.hidden, generator=inputs), used).backward()
        optimizer.step()
    ((start_s, start_cpu_s, start_bytes),) = begun
    step_s, own_cpu_s = (time.perf_counter() - start_s) / job.steps, (processor_s() - start_cpu_s) / job.steps
    (slowest_s,), (cpu_s,) = slowest(step_s), total(own_cpu_s)
    sent_mb = (sent_bytes() - start_bytes) / job.steps / 1e6
    dist.barrier()
    close()
    with torch.no_grad():
        rounded = torch.cat([parameter.view(-1) for parameter in model.parameters()]).mul(1e4).round_()
    digest = hashlib.sha256(rounded.numpy().tobytes()).hexdigest()[:8]
    return {"step_s": slowest_s, "cpu_s": cpu_s, "sent_mb": sent_mb, "digest": digest}


def _wrapped(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str
) -> tuple[Callable[..., Tensor], Callable[[], None], Callable[[], int]]:
    """Return a function to call in place of the model, one that ends it, and one that counts the bytes sent."""
    if name == "coordinated":
        coordinated = coordinate(model, optimizer)
        return model, coordinated.close, lambda: coordinated.stats().sent_bytes
    bucket_mb = float(name.removeprefix("ddp-").removesuffix("mb"))
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=bucket_mb, find_unused_parameters=True, gradient_as_bucket_view=True
    )
    return ddp, lambda: None, lambda: 0
