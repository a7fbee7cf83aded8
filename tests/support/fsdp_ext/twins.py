"""Train the same model twice on the same data, once with stock FSDP2 and once extended, and compare bit for bit.

Gradients are whole multiples of the world size, so that every order of adding gives the same bits; a loop sees only
what a user would write, and the same code runs on both sides.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdp_ext import ExtConfig, Extension, ExtStats, extend, restore
from tests.support.devices import rank_device
from tests.support.kept import kept

# FSDP2 begins in the first step, all orders are known from the second on, and with seeds that are even and odd in turn
# the model then uses all of its parameters once more, and some of them.
NUM_STEPS = 4
# Small slices and two lanes, so that even small models are sliced and spread.
CONFIG = ExtConfig(lanes=2, slice_mb=0.005, timeout_s=20, stall_warning_s=10)
# A backward waits for its first reduce-scatter, which begins early where a group is cut into many slices.
WAITING = replace(CONFIG, defer=False, slice_mb=0.002)


def with_codecs(gather: Any, scatter: Any, **more: Any) -> ExtConfig:
    """Settings for gathers and reduce-scatters that round."""
    block = 64 if {"int8", "int4"} & {gather, scatter} else None
    return replace(CONFIG, all_gather=gather, reduce_scatter=scatter, block=block, **more)


class Whole(nn.Module):
    """A parameter whose gradient is a whole multiple of the world size, whatever its value."""

    def __init__(self, shape: tuple[int, ...], world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self.weight = nn.Parameter(torch.randint(-8, 9, shape).float())

    def forward(self, total: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        factor = torch.randint(-2, 3, self.weight.shape, generator=generator) * float(self.world_size)
        return total + (self.weight * factor.to(self.weight)).sum()


class Block(nn.Module):
    """Several of them, one of which is only used with even seeds, if it is ``idle``."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...], world_size: int, idle: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Whole(shape, world_size) for shape in shapes)
        self.idle = idle

    def forward(self, total: Tensor, seed: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if not (self.idle and index == 0 and seed % 2):
                total = layer(total, seed * 31 + index)
        return total


class WholeNumbers(nn.Module):
    """Blocks of odd sizes, some of whose rows do not divide by the number of ranks, and parameters of the root."""

    SHAPES = (((3,), (130, 67)), ((1,), (5, 7), (40, 33)), ((2, 3, 4, 5),), ((9001,), (64,)), ((33, 16),))

    def __init__(self, world_size: int, frozen: bool = False, idle: bool = False, num_blocks: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(shapes, world_size, idle) for shapes in self.SHAPES[:num_blocks])
        self.head = Whole((17, 3), world_size)
        if frozen:
            self.get_parameter("blocks.1.layers.0.weight").requires_grad_(False)
            self.get_submodule("blocks.2").requires_grad_(False)

    def forward(self, seed: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=rank_device())
        for index, block in enumerate(self.blocks):
            total = block(total, seed * 7 + index)
        return self.head(total, seed * 7 + 6)


@dataclass
class Trainee:
    """One of the twins, as a loop sees it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    seed: Callable[[int], int]  # step -> of this rank's batch
    seen: list[Tensor] = field(default_factory=list)  # what a loop wants compared

    def loss(self, step: int) -> Tensor:
        loss: Tensor = self.model(self.seed(step))
        self.seen.append(loss.detach().clone())
        return loss

    def see_gradients(self) -> None:
        """Compare these, too."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.seen.append(local(parameter.grad).clone())


def local(tensor: Any) -> Tensor:
    """This rank's shard."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard.detach()


@dataclass(frozen=True)
class Outcome:
    """How the twins ended, and what the extension did."""

    differing: list[str]
    num_seen: int
    stats: ExtStats
    moved: bool  # whether training changed anything


def shard(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    """Every block by itself, then the rest."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


@functools.cache
def mesh_of(world_size: int, replicas: int) -> Any:
    """None, FSDP2's own, or with replicas; made once, since its groups stay as long as the process."""
    if replicas == 1:
        return None
    shape = (replicas, world_size // replicas)
    return init_device_mesh(rank_device().type, shape, mesh_dim_names=("replicate", "shard"))


def compare(
    rank: int,
    world_size: int,
    loop: Callable[[Trainee, int], None],
    num_steps: int = NUM_STEPS,
    config: ExtConfig = CONFIG,
    options: dict[str, Any] | None = None,
    model_options: dict[str, Any] | None = None,
    replicas: int = 1,
    prepare: Callable[[nn.Module], None] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
) -> Outcome:
    """Run ``loop`` for ``num_steps`` on both twins, and compare losses, what loops have seen, and parameters."""

    def train(extended: bool) -> tuple[Trainee, Extension | None, bool]:
        torch.manual_seed(7)
        original = WholeNumbers(world_size, **(model_options or {})).to(rank_device())
        model = shard(copy.deepcopy(original), mesh_of(world_size, replicas), **(options or {}))
        if prepare is not None:
            prepare(model)
        extension = extend(model, config) if extended else None
        twin = Trainee(model, (optimizer or momentum_sgd)(model), lambda step: 1001 * step + 10 * rank)
        for step in range(num_steps):
            loop(twin, step)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root stays whole after a forward without a backward
        return twin, extension, not torch.equal(full(model, "head.weight"), original.head.weight)

    def train_plainly() -> tuple[dict[str, Tensor], list[Tensor], bool]:
        twin, _, moved = train(extended=False)
        return {name: local(p).clone() for name, p in twin.model.named_parameters()}, twin.seen, moved

    key = loop, num_steps, options, model_options, replicas, prepare, optimizer
    parameters, seen, moved = kept(train_plainly, *key)
    ours, extension, _ = train(extended=True)
    assert extension is not None
    pairs = zip(ours.model.named_parameters(), parameters.values(), strict=True)
    differing = [name for (name, own), other in pairs if not torch.equal(local(own), other)]
    for index, (a, b) in enumerate(zip(ours.seen, seen, strict=True)):
        if not torch.equal(a, b):
            differing.append(f"seen {index}")
    stats = extension.stats()
    restore(ours.model)
    return Outcome(differing, len(ours.seen), stats, moved)


def on_both(
    build: Callable[[], nn.Module], run: Callable[[nn.Module], list[Tensor]], config: ExtConfig = CONFIG
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of ``run`` with an extended model, and with a stock one."""
    seen = []
    for extended in (True, False):
        torch.manual_seed(7)
        model = build()
        if extended:
            extend(model, config)
        seen.append(run(model))
        if extended:
            restore(model)
    return seen[0], seen[1]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def shards(model: nn.Module) -> list[Tensor]:
    return [local(parameter).clone() for parameter in model.parameters()]


class Stopped(Exception):
    """Error that a loop catches."""


def stop(*_: Any) -> None:
    raise Stopped


def full(model: nn.Module, name: str) -> Tensor:
    """The whole parameter; collective."""
    parameter: Any = model.get_parameter(name)
    whole: Tensor = parameter.full_tensor()
    return whole.detach()


def momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.25)


# -- loops ----------------------------------------------------------------------------------------------------------


def plain(twin: Trainee, step: int) -> None:
    """The loop of every tutorial."""
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    twin.see_gradients()
    twin.optimizer.step()


def zero_grad_to_zeros(twin: Trainee, step: int) -> None:
    """Gradients are there, and are added to."""
    twin.optimizer.zero_grad(set_to_none=False)
    twin.loss(step).backward()
    twin.optimizer.step()


def never_zero_grad(twin: Trainee, step: int) -> None:
    """They add up over all steps."""
    twin.loss(step).backward()
    twin.optimizer.step()


def two_backwards(twin: Trainee, step: int) -> None:
    """Accumulation that reduces every time."""
    twin.optimizer.zero_grad()
    for part in range(3):
        twin.loss(100 * step + part).backward()
    twin.see_gradients()
    twin.optimizer.step()


def accumulate(twin: Trainee, step: int, setting: str = "set_requires_gradient_sync") -> None:
    """Accumulation that reduces once."""
    twin.optimizer.zero_grad()
    for part in range(3):
        getattr(twin.model, setting)(part == 2)
        twin.loss(100 * step + part).backward()
    twin.see_gradients()
    twin.optimizer.step()


def accumulate_unsharded(twin: Trainee, step: int) -> None:
    """Likewise, with whole parameters kept in between."""
    assert isinstance(twin.model, FSDPModule)
    twin.optimizer.zero_grad()
    for part in range(3):
        last = part == 2
        twin.model.set_requires_gradient_sync(last)
        twin.model.set_reshard_after_backward(last)
        twin.model.set_is_last_backward(last)
        twin.loss(100 * step + part).backward()
    twin.optimizer.step()


def clip(twin: Trainee, step: int) -> None:
    """The norm is of what all ranks have."""
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    norm: Any = nn.utils.clip_grad_norm_(twin.model.parameters(), 3.0)
    twin.seen.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    twin.optimizer.step()


def evaluate(twin: Trainee, step: int) -> None:
    """Forwards between backward and step, and after it."""
    twin.optimizer.zero_grad()
    with torch.no_grad():
        twin.loss(step + 50)
    twin.loss(step).backward()
    twin.model.eval()
    with torch.no_grad():
        twin.loss(step + 51)
    twin.model.train()
    twin.optimizer.step()
    with torch.no_grad():
        twin.loss(step + 52)


def discarded(twin: Trainee, step: int) -> None:
    """A backward whose gradients are thrown away."""
    twin.loss(step + 70).backward()
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    twin.optimizer.step()
    twin.optimizer.zero_grad()


def two_forwards(twin: Trainee, step: int) -> None:
    """One backward through two forwards."""
    twin.optimizer.zero_grad()
    (twin.loss(step) + twin.loss(step + 90)).backward()
    twin.see_gradients()
    twin.optimizer.step()
