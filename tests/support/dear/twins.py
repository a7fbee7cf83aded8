"""Train the same model twice on the same data, once under DeAR and once under plain DDP, and compare.

Models, optimizers and loops are chosen by name, because the ranks live in other processes. A loop sees only what a
user would write, so that exactly the same code runs on both sides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, DearStats, dear_hook
from tests.support.devices import on_device, rank_device
from tests.support.kept import kept

# Small atoms and slices, so that even small models are cut, fused, sliced and spread over lanes.
CONFIG = DearConfig(atom_mb=0.02, fusion_mb=0.05, slice_mb=0.01, lanes=2, timeout_s=20, stall_warning_s=10)


@dataclass
class Trainee:
    """One of the twins, as a loop sees it."""

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], tuple[Any, ...]]  # step -> inputs of this rank
    state: DearState | None
    losses: list[float] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)  # for loops that keep something between steps

    def loss(self, step: int) -> Tensor:
        """Forward through DDP; the model returns its loss."""
        loss: Tensor = self.ddp(*self.batch(step))
        self.losses.append(float(loss.detach()))
        return loss


class Plain(NamedTuple):
    """How plain DDP has ended."""

    losses: list[float]
    parameters: dict[str, Tensor]


@dataclass(frozen=True)
class Outcome:
    """How far the twins are apart, and what DeAR did."""

    parameter_gap: float
    loss_gap: float
    bitwise: bool
    num_buckets: int
    num_atoms: int
    stats: DearStats
    order_known: bool  # a forward has shown in which order all parameters are needed
    loss_drop: float


def compare(
    rank: int,
    world_size: int,
    model: Callable[[int], nn.Module],
    batches: Callable[[int, int, int], tuple[Any, ...]],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loop: Callable[[Trainee, int], None],
    num_steps: int,
    config: DearConfig = CONFIG,
    ddp_options: dict[str, Any] | None = None,
) -> Outcome:
    """Run ``loop`` for ``num_steps`` on both twins, and compare losses and parameters.

    Args:
        model: world size -> model whose forward takes a batch and returns a loss; called twice with the same seed.
        batches: (rank, world size, step) -> this rank's batch.
        optimizer: model -> optimizer.
    """
    options = {"bucket_cap_mb": 0.05, **(ddp_options or {})}

    def train(with_dear: bool) -> Trainee:
        torch.manual_seed(7)
        ddp = DistributedDataParallel(model(world_size).to(rank_device()), gradient_as_bucket_view=True, **options)
        chosen = optimizer(ddp.module)
        state = DearState(ddp, chosen, config) if with_dear else None
        if state is not None:
            ddp.register_comm_hook(state, dear_hook)
        twin = Trainee(ddp, chosen, lambda step: on_device(batches(rank, world_size, step)), state)
        for step in range(num_steps):
            torch.manual_seed(1000 * step + rank)
            loop(twin, step)
        return twin

    def train_plainly() -> Plain:
        twin = train(with_dear=False)
        return Plain(twin.losses, copy.deepcopy(twin.ddp.module.state_dict()))

    plain = kept(train_plainly, model, batches, optimizer, loop, num_steps, options)
    return _outcome(train(with_dear=True), plain)


def _outcome(dear: Trainee, plain: Plain) -> Outcome:
    assert dear.state is not None
    stats = dear.state.stats()
    driver = dear.state._driver
    layout = driver.layout.current
    num_buckets = len(layout.buckets) if layout is not None else 0
    ours, theirs = dear.ddp.module.state_dict(), plain.parameters
    gaps = [float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours if ours[name].numel()]
    bitwise = all(torch.equal(ours[name], theirs[name]) for name in ours)
    dear.state.close()
    return Outcome(
        parameter_gap=max(gaps),
        loss_gap=max((abs(a - b) for a, b in zip(dear.losses, plain.losses, strict=True)), default=0.0),
        bitwise=bitwise and dear.losses == plain.losses,
        num_buckets=num_buckets,
        num_atoms=len(layout.atoms) if layout is not None else 0,
        stats=stats,
        order_known=len(driver.pipe._order) == len(driver.parameters),
        loss_drop=plain.losses[0] - plain.losses[-1] if plain.losses else 0.0,
    )


# -- a model whose gradients are whole numbers --------------------------------------------------------------------


class Whole(nn.Module):
    """A parameter whose gradient is a whole multiple of the world size, whatever its value."""

    def __init__(self, shape: tuple[int, ...], world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self.weight = nn.Parameter(torch.randint(-8, 9, shape).float())

    def forward(self, total: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        factor = torch.randint(-4, 5, self.weight.shape, generator=generator) * float(self.world_size)
        return total + (self.weight * factor.to(self.weight.device)).sum()


class WholeNumbers(nn.Module):
    """Layers of odd sizes, some larger than an atom, some smaller than a rank's share; registered in reverse."""

    SHAPES = ((3,), (130, 67), (1,), (5, 7), (), (40, 33), (2, 3, 4, 5), (9001,), (64,))

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Whole(shape, world_size) for shape in self.SHAPES)

    def forward(self, seed: int) -> Tensor:
        total = torch.zeros((), device=rank_device())
        for index, layer in reversed(list(enumerate(self.layers))):
            total = layer(total, 100 * seed + index)
        return total


def whole_batches(rank: int, world_size: int, step: int) -> tuple[int]:
    return (17 * step + rank + 1,)


# -- loops: what users write --------------------------------------------------------------------------------------


def plain(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    twin.optimizer.step()


def zero_grad_to_zeros(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad(set_to_none=False)
    twin.loss(step).backward()
    twin.optimizer.step()


def zero_grad_before_step(twin: Trainee, step: int) -> None:
    """Every other step has gradients of zero, by which momentum and weight decay still move parameters."""
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if step % 2:
        twin.optimizer.zero_grad(set_to_none=False)
    twin.optimizer.step()


def replaced_gradients(twin: Trainee, step: int) -> None:
    """Gradients are other tensors by the time of the step, and serve for two."""
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if twin.state is None:
        _double(list(twin.ddp.parameters()))
    else:
        with twin.state.reduced_gradients() as shards:
            _double(shards)
    twin.optimizer.step()
    twin.optimizer.step()


def _double(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 2


def zero_grad_on_model_to_zeros(twin: Trainee, step: int) -> None:
    twin.ddp.zero_grad(set_to_none=False)
    twin.loss(step).backward()
    twin.optimizer.step()


def zero_grad_after_step(twin: Trainee, step: int) -> None:
    twin.loss(step).backward()
    twin.optimizer.step()
    twin.ddp.zero_grad()
    twin.optimizer.zero_grad()


def zero_grad_on_model_only(twin: Trainee, step: int) -> None:
    """As Trainer does."""
    twin.loss(step).backward()
    twin.optimizer.step()
    twin.ddp.zero_grad()


def idle_forwards(twin: Trainee, step: int) -> None:
    """Forwards that no backward follows, with a gradient of an earlier step still there."""
    twin.loss(step)
    if step % 3 == 2:
        twin.optimizer.zero_grad()
    twin.loss(step + 50)
    twin.loss(step + 100).backward()
    twin.optimizer.step()


def zero_grad_after_forward(twin: Trainee, step: int) -> None:
    loss = twin.loss(step)
    twin.optimizer.zero_grad()
    loss.backward()
    twin.optimizer.step()


def zero_model_grad_after_forward(twin: Trainee, step: int) -> None:
    loss = twin.loss(step)
    twin.ddp.zero_grad()
    loss.backward()
    twin.optimizer.step()


def zero_model_grad_to_zeros_after_forward(twin: Trainee, step: int) -> None:
    loss = twin.loss(step)
    twin.ddp.zero_grad(set_to_none=False)
    loss.backward()
    twin.optimizer.step()


def never_zero_grad(twin: Trainee, step: int) -> None:
    twin.loss(step).backward()
    twin.optimizer.step()


def skipped_step(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    if step % 3 == 0:  # also in the very first step
        twin.optimizer.zero_grad(set_to_none=step % 2 == 0)
        return
    if step % 3 == 1:
        twin.ddp.zero_grad(set_to_none=step % 2 == 0)
        twin.optimizer.zero_grad()
        return
    twin.optimizer.step()


def skipped_by_model(twin: Trainee, step: int) -> None:
    twin.loss(step).backward()
    if step % 2 == 0:
        twin.ddp.zero_grad()
        return
    twin.optimizer.step()
    twin.optimizer.zero_grad()


def two_backwards(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(2 * step).backward()
    twin.loss(2 * step + 1).backward()
    twin.optimizer.step()


def two_backwards_then_discard_first(twin: Trainee, step: int) -> None:
    twin.loss(2 * step).backward()
    second = twin.loss(2 * step + 1)
    twin.ddp.zero_grad(set_to_none=step % 2 == 0)
    twin.optimizer.zero_grad(set_to_none=step % 2 == 0)
    second.backward()
    twin.optimizer.step()


def accumulate(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    for micro in range(1 + step % 3):
        with twin.ddp.no_sync():
            twin.loss(10 * step + micro).backward()
    twin.loss(10 * step + 9).backward()
    twin.optimizer.step()


def accumulate_on_zeros(twin: Trainee, step: int) -> None:
    """What no micro-batch has used keeps the zeros that zero_grad has left, and is updated with them."""
    twin.optimizer.zero_grad(set_to_none=False)
    for micro in range(step % 3):
        with twin.ddp.no_sync():
            twin.loss(step + micro).backward()
    twin.loss(step).backward()
    twin.optimizer.step()


def accumulate_then_discard(twin: Trainee, step: int) -> None:
    with twin.ddp.no_sync():
        twin.loss(2 * step).backward()
    if step % 2 == 1:
        twin.optimizer.zero_grad(set_to_none=step % 4 == 1)
    twin.loss(2 * step + 1).backward()
    twin.optimizer.step()
    twin.optimizer.zero_grad()


def closure(twin: Trainee, step: int) -> None:
    def evaluate() -> float:
        twin.optimizer.zero_grad()
        loss = twin.loss(step)
        loss.backward()
        return float(loss.detach())

    loss: Any = twin.optimizer.step(evaluate) if step % 2 else twin.optimizer.step(closure=evaluate)
    assert loss is not None


def double_forward(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    (twin.loss(2 * step) + twin.loss(2 * step + 1)).backward()
    twin.optimizer.step()


def evaluate_between(twin: Trainee, step: int) -> None:
    plain(twin, step)
    with evaluating(twin.ddp.module), torch.no_grad():
        twin.losses.append(float(twin.ddp.module(*twin.batch(step))))


def evaluate_on_one_rank(twin: Trainee, step: int) -> None:
    plain(twin, step)
    if dist.get_rank() == 0:
        with evaluating(twin.ddp.module), torch.no_grad():
            twin.losses.append(float(twin.ddp.module(*twin.batch(step))))


def evaluate_before_step(twin: Trainee, step: int) -> None:
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    with torch.no_grad():
        twin.losses.append(float(twin.ddp.module(*twin.batch(step))))
    twin.optimizer.step()


def save_and_load(twin: Trainee, step: int) -> None:
    plain(twin, step)
    saved = {name: tensor.clone() for name, tensor in twin.ddp.state_dict().items()}
    if step % 3 == 1:
        twin.memory["saved"] = saved
    if step % 3 == 2:
        twin.ddp.load_state_dict(twin.memory["saved"])


def average(twin: Trainee, step: int) -> None:
    if step == 0:
        twin.memory["average"] = torch.optim.swa_utils.AveragedModel(twin.ddp.module)
    plain(twin, step)
    averaged = twin.memory["average"]
    averaged.update_parameters(twin.ddp.module if step % 2 else twin.ddp)
    with torch.no_grad():
        twin.losses.append(sum(float(p.double().sum()) for p in averaged.parameters()))


def scheduled(twin: Trainee, step: int) -> None:
    if step == 0:
        twin.memory["scheduler"] = torch.optim.lr_scheduler.OneCycleLR(twin.optimizer, max_lr=0.01, total_steps=100)
    plain(twin, step)
    twin.memory["scheduler"].step()


def change_fusion(twin: Trainee, step: int) -> None:
    plain(twin, step)
    if twin.state is not None and step % 4 == 1:
        twin.state.set_fusion("size", mb=0.01 * (step + 1))
    if twin.state is not None and step % 4 == 2:
        twin.state.set_fusion("layers", layers=step)
    if twin.state is not None and step % 4 == 3:
        twin.state.set_fusion("none")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    module.eval()
    yield
    module.train()
