"""Parameters that FSDP2 gathers ahead for an extended model: used as they are when they are used, or not at all.

Prevents: parameters that were gathered before a step and are used after it, gathers of which some ranks know nothing,
and gathers of the user's own that go.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from fsdp_ext import compat, extend, restore
from tests.support.fsdp_ext.twins import (
    CONFIG,
    Block,
    Stopped,
    Whole,
    WholeNumbers,
    local,
    momentum_sgd,
    on_both,
    same,
    shard,
    shards,
    stop,
)
from tests.support.workers import WorkerPools


class Towers(nn.Module):
    """Two FSDP2 models in a module that is none."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.first, self.second = WholeNumbers(world_size), WholeNumbers(world_size)

    def forward(self, seed: int, frozen: bool = False) -> Tensor:
        with torch.set_grad_enabled(not frozen):
            total = self.first(seed)
        return self.second(seed + 1) + total * (self.second.head.weight.sum() > -1e9)


def two_towers(rank: int, world_size: int) -> bool:
    """The second one's backward asks for parameters of the first, which are changed before they are used."""

    def build() -> nn.Module:
        model = Towers(world_size)
        shard(model.first)
        shard(model.second)
        return model

    def run(model: Any) -> list[Tensor]:
        optimizer, seen = momentum_sgd(model), []
        for step in range(5):
            optimizer.zero_grad()
            for frozen in (False, True):
                loss = model(1000 * step + rank, frozen)
                loss.backward()
                seen.append(loss.detach().clone())
            optimizer.step()
            with torch.no_grad():
                seen.append(model.first(step))
        return seen + shards(model)

    return same(*on_both(build, run))


class SomeBlocks(nn.Module):
    """Wrapped one by one, and not as a whole."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(((20 + i, 7),), world_size) for i in range(8))

    def forward(self, seed: int, which: tuple[int, ...]) -> Tensor:
        total = torch.zeros(())
        for index in which:
            total = self.blocks[index](total, seed * 7 + index)
        return total


def skipped_blocks(rank: int, world_size: int) -> bool:
    def build() -> nn.Module:
        model = SomeBlocks(world_size)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=True)
        return model

    def run(model: nn.Module) -> list[Tensor]:
        optimizer, seen = momentum_sgd(model), []
        for step in range(5):
            optimizer.zero_grad()
            for which in (tuple(range(8)), (0, 1, 2, 6, 7)):
                loss = model(1000 * step + rank, which)
                loss.backward()
                seen.append(loss.detach().clone())
            optimizer.step()
            with torch.no_grad():
                seen.append(model(step, tuple(range(8))))
        return seen + shards(model)

    return same(*on_both(build, run))


def idle_forward_then_blocks(rank: int, world_size: int) -> bool:
    """A forward that ends early, a step, and then blocks by themselves."""

    def run(model: nn.Module) -> list[Tensor]:
        optimizer = momentum_sgd(model)
        for step in range(3):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
        model(3).backward()
        handle = model.get_submodule("blocks.1").register_forward_pre_hook(stop)
        with pytest.raises(Stopped):
            model(4)
        handle.remove()
        optimizer.step()
        with torch.no_grad():
            return [block(torch.zeros(()), 5) for block in model.get_submodule("blocks").children()]

    return same(*on_both(lambda: shard(WholeNumbers(world_size)), run))


def without_modules_forwards(rank: int, world_size: int, by_method: bool) -> bool:
    """Parameters that are asked for without the module's forward, after a backward has gathered ahead in vain."""

    def build() -> Any:
        model: Any = SomeBlocks(world_size)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=True)
            block.encode = block.forward
            register_fsdp_forward_method(block, "encode")
        return model

    def run(model: Any) -> list[Tensor]:
        optimizer, seen = momentum_sgd(model), []
        for step in range(5):
            optimizer.zero_grad()
            for which in (tuple(range(8)), (0, 1, 2, 6, 7)):
                model(1000 * step + rank, which).backward()
            optimizer.step()
            with torch.no_grad():
                for block in model.blocks:
                    if by_method:
                        seen.append(block.encode(torch.zeros(()), 5))
                    else:
                        block.unshard()
                        seen += [parameter.detach().clone() for parameter in block.parameters()]
                        block.reshard()
        return seen + shards(model)

    return same(*on_both(build, run))


def by_method(rank: int, world_size: int) -> bool:
    return without_modules_forwards(rank, world_size, True)


def unsharded_by_hand(rank: int, world_size: int) -> bool:
    return without_modules_forwards(rank, world_size, False)


def on_one_rank(rank: int, world_size: int) -> bool:
    """Between a forward that has skipped blocks and its backward one rank uses a block that is whole."""

    def build() -> nn.Module:
        model = SomeBlocks(world_size)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=False)
        model.head = Whole((17, 3), world_size)  # without any parameters of the root stock FSDP2 hangs here, too
        fully_shard(model, reshard_after_forward=False)
        return model

    def run(model: Any) -> list[Tensor]:
        optimizer, seen = momentum_sgd(model), []
        for step in range(5):
            optimizer.zero_grad()
            loss = model(1000 * step + rank, (0, 1, 2, 6, 7) if step > 1 else tuple(range(8)))
            if rank == 0:
                with torch.no_grad():
                    seen.append(model.blocks[0](torch.zeros(()), 5))
            loss.backward()
            seen.append(loss.detach().clone())
            optimizer.step()
        return seen + shards(model)

    return same(*on_both(build, run))


def held_by_the_user(rank: int, world_size: int) -> bool:
    """A gather of the loop's own stays until it is waited for."""

    def run(model: Any) -> list[Tensor]:
        for step in range(3):
            model(step).backward()
        with torch.no_grad():
            handle = model.blocks[1].unshard(async_op=True)
            model.blocks[0](torch.zeros(()), 5)
            handle.wait()
            seen = [parameter.detach().clone() for parameter in model.blocks[1].parameters()]
            model.blocks[1].reshard()
        return seen

    return same(*on_both(lambda: shard(WholeNumbers(world_size)), run))


@pytest.mark.quick("two_towers", "by_method", "unsharded_by_hand", "on_one_rank", "held_by_the_user")
@pytest.mark.parametrize(
    "run",
    [
        two_towers,
        skipped_blocks,
        idle_forward_then_blocks,
        by_method,
        unsharded_by_hand,
        on_one_rank,
        held_by_the_user,
    ],
    ids=lambda run: run.__name__,
)
def test_nothing_old_is_used(workers: WorkerPools, run: Any) -> None:
    assert workers(2).run(run) == [True, True]


WAYS: dict[str, Callable[[list[Any]], object]] = {
    "shards": lambda parameters: [local(parameter).clamp_(-3, 3) for parameter in parameters],
    "parameters": lambda parameters: [parameter.clamp_(-3, 3) for parameter in parameters],
    "foreach": lambda parameters: torch._foreach_mul_(parameters, 0.5),
    "data": lambda parameters: [parameter.data.mul_(0.5) for parameter in parameters],
}


def changed_by_a_hook(rank: int, world_size: int, way: str) -> tuple[str, bool]:
    """A hook of the model's forward that writes to parameters of blocks; and without gathering ahead."""
    messages, agree = [], []
    for config in (CONFIG, replace(CONFIG, prefetch=0)):
        seen = []
        for extended in (True, False):
            torch.manual_seed(7)
            model = shard(WholeNumbers(world_size))
            if extended:
                extend(model, config)

            def clamp(module: nn.Module, _: Any) -> None:
                with torch.no_grad():
                    WAYS[way](list(module.get_submodule("blocks").parameters()))

            model.register_forward_pre_hook(clamp)
            optimizer = momentum_sgd(model)
            try:
                for step in range(4):
                    optimizer.zero_grad()
                    model(1000 * step + rank).backward()
                    optimizer.step()
            except RuntimeError as error:
                messages.append(str(error))
            seen.append(shards(model))
            if extended:
                restore(model)
        agree.append(same(*seen))
    return " ".join(messages), agree[1]


@pytest.mark.quick("data", "shards")
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_a_hook_changes_are_refused(workers: WorkerPools, way: str) -> None:
    outcomes = workers(2).run(changed_by_a_hook, way)
    assert outcomes[0] == outcomes[1]
    message, agree = outcomes[0]
    assert message.count("parameters of blocks.0 were changed inside of the model's forward") == 1
    assert "set ExtConfig(prefetch=0)" in message and agree


def own_lists(rank: int, world_size: int) -> tuple[int, int, int]:
    """Lists that a user has set after extending stay when the model is restored."""
    model = shard(WholeNumbers(world_size))
    extend(model, CONFIG)
    blocks: Any = list(model.get_submodule("blocks").children())
    for step in range(3):
        model(step).backward()
    blocks[3].set_modules_to_backward_prefetch([blocks[2]])
    blocks[1].set_modules_to_forward_prefetch([blocks[2]])
    for step in range(3):
        model(step).backward()
    restore(model)
    (forward, _), (_, backward), (_, last) = (compat.prefetch_lists(blocks[index]) for index in (1, 3, 4))
    return len(backward), len(forward), len(last)


def test_own_lists_stay(workers: WorkerPools) -> None:
    assert workers(2).run(own_lists) == [(1, 1, 0)] * 2


def extended_late(rank: int, world_size: int, kept: bool) -> int:
    """Modules that are known when the model was evaluated before."""
    model = shard(WholeNumbers(world_size), None, reshard_after_forward=not kept)
    with torch.no_grad():
        model(1)
    extension = extend(model, CONFIG)
    for step in range(4):
        model(step).backward()
    known = len(extension.prefetcher._order)
    restore(model)
    return known


@pytest.mark.parametrize("kept", [False, True])
def test_the_order_is_learned_when_there_is_one(workers: WorkerPools, kept: bool) -> None:
    assert min(workers(2).run(extended_late, kept)) >= 5
