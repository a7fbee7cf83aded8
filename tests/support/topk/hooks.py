"""Loops and checks for TopK's hook beside plain DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKConfig, TopKState, topk_hook
from tests.support.dear.twins import WholeNumbers
from tests.support.devices import rank_device

# Small groups, so that a small model has several, and a threshold that some of its parameters are below.
CONFIG = TopKConfig(density=0.05, wire="exact", group_mb=0.03, timeout_s=20, stall_warning_s=10)


class Sometimes(WholeNumbers):
    """Layers that some ranks, or all of them, leave out in some steps."""

    def forward(self, seed: int) -> Tensor:
        total = torch.zeros((), device=rank_device())
        step, rank = (seed - 1) // 17, (seed - 1) % 17
        for index, layer in reversed(list(enumerate(self.layers))):
            nobody, not_me = (index + step) % 4 == 1, (index + step) % 4 == 2 and rank == 0
            if index == 0 or not (nobody or not_me):
                total = layer(total, 100 * seed + index)
        return total


def sum_and_divide(_, bucket):  # type: ignore[no-untyped-def]
    """DDP's own reduction, but for a division that is exact for whole numbers."""
    buffer = bucket.buffer()
    future = dist.all_reduce(buffer, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(dist.get_world_size()))


@dataclass
class Pair:
    """A model under the hook, and its plain twin: the sums of their gradients are to be equal."""

    rank: int
    world_size: int
    ours: DistributedDataParallel
    plain: DistributedDataParallel
    state: TopKState
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]

    @staticmethod
    def of(
        rank: int, world_size: int, config: TopKConfig, model: Callable[[int], nn.Module] = WholeNumbers, **options: Any
    ) -> Pair:
        torch.manual_seed(7)
        original = model(world_size).to(rank_device())
        options = {"bucket_cap_mb": 0.05, "gradient_as_bucket_view": True, **options}
        ours = DistributedDataParallel(copy.deepcopy(original), **options)
        plain = DistributedDataParallel(copy.deepcopy(original), **options)
        state = TopKState(ours, config)
        ours.register_comm_hook(state, topk_hook)
        plain.register_comm_hook(None, sum_and_divide)
        optimizers = torch.optim.SGD(ours.parameters(), lr=1.0), torch.optim.SGD(plain.parameters(), lr=1.0)
        return Pair(rank, world_size, ours, plain, state, optimizers)

    def sides(self) -> Any:
        return zip((self.ours, self.plain), self.optimizers, strict=True)

    def seed(self, step: int) -> int:
        return 17 * step + self.rank + 1

    def residuals(self) -> dict[str, Tensor]:
        """Their sum over the ranks."""
        total = {}
        saved = self.state.state_dict()["residual"]
        for name, parameter in self.ours.module.named_parameters():
            total[name] = saved.get(name, torch.zeros_like(parameter)).double()
            dist.all_reduce(total[name])
        return total

    def gap(self) -> float:
        """Largest part of a gradient that has neither been applied nor kept."""
        residuals, plain = self.residuals(), dict(self.plain.module.named_parameters())
        gaps = [0.0]
        for name, parameter in self.ours.module.named_parameters():
            missing = self.world_size * (parameter.double() - plain[name].double()) - residuals[name]
            gaps.append(float(missing.abs().max()) if missing.numel() else 0.0)
        return max(gaps)

    def replicas_agree(self) -> bool:
        flat = torch.cat([p.detach().flatten() for p in self.ours.module.parameters()])
        everyone = [torch.empty_like(flat) for _ in range(self.world_size)]
        dist.all_gather(everyone, flat)
        return all(torch.equal(flat, other) for other in everyone)


def plain(pair: Pair, step: int) -> None:
    for ddp, optimizer in pair.sides():
        optimizer.zero_grad()
        ddp(pair.seed(step)).backward()
        optimizer.step()


def zero_to_zeros(pair: Pair, step: int) -> None:
    for ddp, optimizer in pair.sides():
        optimizer.zero_grad(set_to_none=False)
        ddp(pair.seed(step)).backward()
        optimizer.step()


def accumulate(pair: Pair, step: int) -> None:
    for ddp, optimizer in pair.sides():
        optimizer.zero_grad()
        with ddp.no_sync():
            for part in range(step % 3):
                ddp(pair.seed(100 * step + part)).backward()
        ddp(pair.seed(step)).backward()
        optimizer.step()


def gradients_of(model: nn.Module, seed: int) -> list[Tensor]:
    model.zero_grad()
    model(seed).backward()
    return [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten().clone() for p in model.parameters()]


def conserve(
    rank: int,
    world_size: int,
    config: TopKConfig,
    loop: Callable[[Pair, int], None],
    num_steps: int,
    model: Callable[[int], nn.Module] = WholeNumbers,
    **options: Any,
) -> tuple[float, bool, float, int]:
    """Return the gap after some steps, True if replicas agree, the sum of residuals, and the number of groups."""
    pair = Pair.of(rank, world_size, config, model, **options)
    for step in range(num_steps):
        loop(pair, step)
    kept = sum(float(values.abs().sum()) for values in pair.residuals().values())
    result = pair.gap(), pair.replicas_agree(), kept, pair.state.stats().num_groups
    pair.state.close()
    return result


def check(outcomes: Any, keeps: bool = True) -> None:
    for gap, agree, kept, num_groups in outcomes:
        assert gap == 0.0, "gradients were lost, or counted twice"
        assert agree, "replicas differ"
        assert (kept > 0) == keeps, "nothing was left out, so nothing was tested"
        assert num_groups > 1


ALGORITHMS: list[dict[str, Any]] = [
    {},
    {"teams": 2, "sag": "r"},
    {"teams": 2, "sag": "b"},
    {"algorithm": "topka"},
    {"algorithm": "topkdsa"},
    {"algorithm": "gtopk"},
    {"algorithm": "oktopk"},
]
