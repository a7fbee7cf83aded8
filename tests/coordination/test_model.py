"""Models that change, coordinated, against DDP with find_unused_parameters=True, bit for bit.

Prevents: parameters that nobody used and that change; gradients of some ranks that count twice, or not at all.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_hooks.coordination import CoordinatorConfig, coordinate
from ddp_hooks.coordination.grouping import branch_of
from tests.support.workers import WorkerPools

CONFIG = CoordinatorConfig(lanes=2, slice_mb=0.002, timeout_s=20, stall_warning_s=10, cycle_ms=0.2)


class Branch(nn.Module):
    """Parameters whose gradients are whole multiples of the number of ranks."""

    def __init__(self, numel: int, world_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-8, 9, (numel,)).float())
        self.bias = nn.Parameter(torch.randint(-8, 9, (3,)).float())
        self.world_size = world_size

    def forward(self, total: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        for parameter in (self.weight, self.bias):
            factor = torch.randint(-2, 3, parameter.shape, generator=generator) * float(self.world_size)
            total = total + (parameter * factor).sum()
        return total


class Branches(nn.Module):
    """A trunk, of whose branches each rank uses some; one is never used, one buffer counts forwards."""

    NUM_BRANCHES = 6

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.trunk = Branch(700, world_size)
        self.branches = nn.ModuleList(Branch(50 + 333 * index, world_size) for index in range(self.NUM_BRANCHES))
        self.register_buffer("count", torch.zeros(1))
        self.count: Tensor

    def forward(self, seed: int, used: list[int]) -> Tensor:
        self.count += 1 + seed
        total = self.trunk(torch.zeros(()), seed)
        for index in used:
            total = self.branches[index](total, seed + index)
        return total


@dataclass
class Trainee:
    """A model as a loop sees it."""

    call: nn.Module
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], Any]
    rank: int

    def loss(self, step: int) -> Tensor:
        used = [i for i in range(Branches.NUM_BRANCHES - 1) if (i * 7 + step * 3 + self.rank * 5) % 4 == 0]
        loss: Tensor = self.call(step * 10 + self.rank, used)
        return loss


def plain(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    twin.optimizer.step()


def zeros(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad(set_to_none=False)
    twin.loss(step).backward()
    twin.optimizer.step()


def accumulate(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    with twin.no_sync():
        twin.loss(step + 100).backward()
        twin.loss(step + 200).backward()
    twin.loss(step).backward()
    twin.optimizer.step()


def twice(twin: Trainee, step: int) -> None:
    """Gradients that were reduced are added to, and reduced again."""
    twin.optimizer.zero_grad()
    twin.loss(step + 300).backward()
    twin.loss(step).backward()
    twin.optimizer.step()


def clip_and_evaluate(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    nn.utils.clip_grad_norm_(twin.call.parameters(), 16.0)
    twin.optimizer.step()
    if step % 3 == twin.rank:  # one rank alone
        twin.call.eval()
        with torch.no_grad():
            getattr(twin.call, "module", twin.call)(step, [1])
        twin.call.train()


def sums_then_divides(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the types
    """As coordinated models do; DDP itself divides first."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0].div_(state))


def compare(
    rank: int, world_size: int, loop: Callable[[Trainee, int], None], options: dict[str, Any], num_steps: int
) -> dict[str, Any]:
    """Names of what differs after training both twins, and what travelled."""
    torch.manual_seed(7)
    original = Branches(world_size)
    ours, theirs = copy.deepcopy(original), copy.deepcopy(original)
    if rank > 0:
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.zero_()  # rank 0's count
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    ddp.register_comm_hook(world_size, sums_then_divides)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.25)

    optimizer = sgd(ours)
    coordinated = coordinate(ours, optimizer, config=CONFIG, **options)
    twins = [Trainee(ours, optimizer, coordinated.no_sync, rank), Trainee(ddp, sgd(ddp), ddp.no_sync, rank)]
    different = []
    for step in range(num_steps):
        for twin in twins:
            loop(twin, step)
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            same_grad = (a.grad is None) == (b.grad is None) and (
                a.grad is None or b.grad is None or torch.equal(a.grad, b.grad)
            )
            if not (torch.equal(a, b) and same_grad):
                different.append(f"step {step}: {name}")
    if loop is plain and not torch.equal(ours.count, theirs.count):
        different.append("count")
    stats = coordinated.stats()
    groups = len(coordinated._groups)
    coordinated.close()
    moved = not torch.equal(ours.trunk.weight, original.trunk.weight)
    return {"different": different, "moved": moved, "requests": stats.requests, "groups": groups}


@pytest.mark.quick("*-2", "twice-3")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("loop", [plain, zeros, accumulate, twice, clip_and_evaluate])
def test_as_ddp(workers: WorkerPools, world_size: int, loop: Callable[[Trainee, int], None]) -> None:
    for found in workers(world_size).run(compare, loop, {}, 8):
        assert found["different"] == [] and found["moved"]
        assert found["requests"] > 0


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"num_groups": 3}, 3),
        ({"num_groups": 1}, 1),
        ({"groups": [["trunk.bias", "branches.0.bias"], ["branches.1.weight", "branches.2.weight"]]}, 12),
        ({"group_mb": 0.001}, 13),
        ({"broadcast_buffers": True}, 7),
    ],
    ids=str,
)
def test_groups(workers: WorkerPools, options: dict[str, Any], groups: int) -> None:
    for found in workers(2).run(compare, plain, options, 6):
        assert found["different"] == [] and found["moved"] and found["groups"] == groups


class Views(nn.Module):
    """Gradients that are views of memory which autograd goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.shift = nn.Parameter(torch.zeros(4))
        self.halves = nn.ParameterList([torch.ones(2, 2), torch.ones(4)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        slow = _Slow.apply(y)
        return y + slow + self.shift.unsqueeze(0) + self.halves[0].view(-1) + self.halves[1]


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.2)  # in which what is on its way arrives
        return gradient * 2


def views(rank: int, world_size: int) -> bool:
    torch.manual_seed(0)
    ours, theirs = Views(), Views()
    theirs.load_state_dict(ours.state_dict())
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    coordinated = coordinate(ours, config=CONFIG, group_mb=1e-6)
    x = torch.ones(1, 4) * (rank + 1)
    for model in (ours, ddp):
        (model(x).square().sum() * (1 + rank)).backward()
    coordinated.close()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.allclose(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def test_gradients_that_share_memory_with_what_autograd_goes_on_with(workers: WorkerPools) -> None:
    assert workers(2).run(views) == [True, True]


def skipped(rank: int, world_size: int) -> tuple[int, int]:
    """Requests of a step in which one of six branches is used, and of one in which all are."""
    model = Branches(world_size)
    coordinated = coordinate(model, config=CONFIG, broadcast_buffers=False)
    counts = [coordinated.stats().requests]
    for used in ([2], [0, 1, 2, 3, 4, 5]):
        model(3, used).backward()
        counts.append(coordinated.stats().requests)
    coordinated.close()
    return counts[1] - counts[0], counts[2] - counts[1]


def test_what_nobody_uses_does_not_travel(workers: WorkerPools) -> None:
    assert workers(2).run(skipped) == [(2, 7)] * 2  # the trunk and one branch; all of them


def begin_alike(rank: int, world_size: int) -> tuple[bool, int]:
    """Whether everything has the first rank's values, and in how many messages they came."""

    def make(value: int) -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
        model.register_buffer("flag", torch.tensor([value == 0, True]))
        for each in (*model.parameters(), *model.buffers()):
            each.data.copy_(torch.arange(each.numel()).view(each.shape) * (value + 1) % 7)
        return model

    model, first = make(rank), make(0)
    strides = model[0].weight.stride()  # type: ignore[index]
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        coordinated = coordinate(model, config=CONFIG)
    coordinated.close()
    pairs = zip(model.state_dict().values(), first.state_dict().values(), strict=True)
    same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    return same and model[0].weight.stride() == strides, broadcast.call_count  # type: ignore[index]


def test_ranks_begin_alike_in_few_messages(workers: WorkerPools) -> None:
    assert workers(3).run(begin_alike) == [(True, 1)] * 3


def refused(rank: int, world_size: int) -> list[str]:
    messages = []

    def expect(kind: type[Exception], make: Callable[[], Any]) -> None:
        with pytest.raises(kind) as error:
            make()
        messages.append(str(error.value))

    model = Branches(world_size)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    expect(ValueError, lambda: coordinate(model, other))
    expect(ValueError, lambda: coordinate(nn.Sequential(nn.Embedding(3, 4, sparse=True))))
    expect(ValueError, lambda: coordinate(DistributedDataParallel(model)))
    expect(ValueError, lambda: coordinate(model, num_groups=2, groups=[["trunk.bias"]]))
    expect(ValueError, lambda: coordinate(model, num_groups=2, group_mb=1.0))
    expect(ValueError, lambda: coordinate(model, num_groups=1.5))  # type: ignore[arg-type]
    expect(ValueError, lambda: coordinate(model, group_mb=0))
    expect(ValueError, lambda: coordinate(model, groups=[["trunk.nothing"]]))
    expect(ValueError, lambda: coordinate(Branches(world_size + rank) if rank == 0 else nn.Linear(2, 3)))
    formats = (torch.contiguous_format, torch.channels_last)
    expect(ValueError, lambda: coordinate(nn.Conv2d(3, 4, 3).to(memory_format=formats[rank])))
    coordinated = coordinate(model, config=CONFIG)
    expect(ValueError, lambda: coordinate(model))

    def inside_of_another() -> None:
        x = torch.zeros((), requires_grad=True)
        loss: Any = checkpoint(model.trunk, x, 1, use_reentrant=True)
        loss.backward()

    def failing() -> None:
        x = torch.zeros((), requires_grad=True)
        y = x * 1
        y.register_hook(lambda _: 1 / 0)
        model.trunk(y, 1).backward()

    expect(RuntimeError, inside_of_another)
    expect(ZeroDivisionError, failing)
    expect(RuntimeError, lambda: model(1, []))
    coordinated.close()
    return messages


def test_what_cannot_work_is_refused(workers: WorkerPools) -> None:
    expected = (
        "updates 1 parameters that are not the model's",
        "0 makes sparse gradients",
        "pass the model itself, ddp.module",
        "pass num_groups or groups, not both",
        "group_mb=1.0 has no effect with num_groups: leave it out",
        "num_groups must be None, or a whole number >= 1, got 1.5",
        "group_mb must be None, or > 0 and finite, got 0",
        "group 0 has 'trunk.nothing'",
        "the set-up of coordinate differs between ranks",
        "weight is (4, 3, 3, 3) torch.float32 strides (27, 9, 3, 1), trained on ranks [0], (4, 3, 3, 3) torch.float32 "
        "strides (27, 1, 9, 3), trained on ranks [1]",
        "Branches is coordinated already",
        "use_reentrant=False",
        "division by zero",
        "the last backward failed",
    )
    for messages in workers(2).run(refused):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_branches() -> None:
    model = nn.ModuleDict({
        "body": nn.Sequential(nn.Linear(1, 1), nn.ModuleList([nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))])),
        "head": nn.Linear(1, 1),
    })  # fmt: skip
    found = {name: branch_of(model, name) for name, _ in model.named_parameters() if name.endswith("weight")}
    assert found == {
        "body.0.weight": "body",
        "body.1.0.weight": "body.1.0",
        "body.1.1.0.weight": "body.1.1",
        "head.weight": "head",
    }
