"""Early reduce-scatters where gradients become ready differently: on ranks, in steps, after failures.

Prevents: parts that meet other messages, or silently miss changes of gradients.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from ddp_hooks.comm import LaneError
from ddp_hooks.comm.executors.work import WorkGroup
from fsdp_ext import ExtConfig, extend, restore
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.life import train_until_somebody_dies
from tests.support.fsdp_ext.twins import WAITING, Stopped
from tests.support.fsdp_ext.unusual import Failing, needs_reset, needs_unused
from tests.support.workers import WorkerPools

NUM_STEPS = 5


class Chain(nn.Module):
    """Layers of a block, of which a rank may skip the last, fail behind one, or run all in a checkpoint's backward."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(num_layers))
        self.skips = self.reentrant = False
        self.fails_behind: int | None = None

    def forward(self, batch: Tensor) -> Tensor:
        result: Any = checkpoint(self.run, batch, use_reentrant=True) if self.reentrant else self.run(batch)
        return result

    def run(self, batch: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers[: -1 if self.skips else None]):
            batch = layer(batch).tanh()
            if self.fails_behind == index:
                batch = Failing.apply(batch)
        return batch


def chains(unused: bool = False) -> nn.Module:
    model = nn.Sequential(Chain(), Chain())
    for chain in model:
        fully_shard(chain)
        if unused:
            chain.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    fully_shard(model)
    return model


Step = Callable[[Any, int], None]
"""Change to the model before a step."""


def gap(build: Callable[[], nn.Module], before: Step, config: ExtConfig = WAITING) -> tuple[float, int]:
    """The largest difference of gradients from stock FSDP2, and how many reduce-scatters began early.

    On two ranks: two numbers have one sum.
    """
    seen: list[list[Tensor]] = []
    num_early = 0
    for extended in (True, False):
        torch.manual_seed(7)
        model = build()
        extension = extend(model, config) if extended else None
        seen.append([])
        for step in range(NUM_STEPS):
            model.zero_grad()
            before(model, step)
            model(batch_of(step)).square().mean().backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    seen[-1].append(twins.local(parameter.grad).clone())
        if extension is not None:
            num_early = extension.stats().early
        restore(model)
    assert len(seen[0]) == len(seen[1]) > 0
    return max(float((a - b).abs().max()) for a, b in zip(*seen, strict=True) if a.numel()), num_early


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(5, 64, generator=generator).requires_grad_()


# -- ranks that run other modules, or in another order -----------------------------------------------------------------


class Around(nn.Module):
    """Two modules that were wrapped together, and one in between that was not; a rank may swap, or skip in part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = Chain(1), Chain(2), Chain(2)
        self.swaps = False

    def forward(self, batch: Tensor) -> Tensor:
        first, last = (self.last, self.first) if self.swaps else (self.first, self.last)
        result: Tensor = last(self.between(first(batch)))
        return result


def around() -> nn.Module:
    model = Around()
    fully_shard([model.first, model.last])
    fully_shard(model.between)
    model.first.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    fully_shard(model)
    return model


def in_another_order(rank: int, world_size: int, skips: bool) -> tuple[float, int]:
    def before(model: Any, step: int) -> None:
        differs = step > 0 and rank == 1
        model.swaps, model.last.skips = differs and not skips, differs and skips

    return gap(around, before)


@needs_unused
@pytest.mark.parametrize("skips", [False, True])
def test_modules_between_those_wrapped_together(workers: WorkerPools, skips: bool) -> None:
    outcomes = workers(2).run(in_another_order, skips)
    assert [difference for difference, _ in outcomes] == [0, 0] and any(early for _, early in outcomes)


def gives_up_on_some_ranks_parts(rank: int, world_size: int, how: str) -> tuple[float, int]:
    """Rank 1 skips a layer, and so sends nothing early, when all ranks find that the whole has to be reduced."""

    def before(model: Any, step: int) -> None:
        for chain in model:
            chain.skips = step > 0 and rank == 1
            if step == 4 and how == "sums":
                chain.set_force_sum_reduction_for_comms(True)
            elif step == 4:
                chain.layers[0].bias.requires_grad_(False)

    return gap(lambda: chains(unused=True), before)


@needs_unused
@pytest.mark.parametrize("how", ["sums", "frozen"])
def test_parts_that_only_some_ranks_have_sent(workers: WorkerPools, how: str) -> None:
    (difference, early), (other, _) = workers(2).run(gives_up_on_some_ranks_parts, how)
    assert difference == other == 0 and early


def skipping_in_checkpoints(rank: int, world_size: int) -> tuple[float, int]:
    """Gradients come in backwards inside of the backward, on rank 1 not all of them."""

    def before(model: Any, step: int) -> None:
        for chain in model:
            chain.reentrant, chain.skips = True, step > 1 and rank == 1

    return gap(lambda: chains(unused=True), before)


@needs_unused
def test_parts_of_checkpoints(workers: WorkerPools) -> None:
    assert workers(2).run(skipping_in_checkpoints) == [(0, 0)] * 2


# -- other parameters, other gradients ---------------------------------------------------------------------------------


class Tables(nn.Module):
    """Sparse rows of the same size, so that zeros are most of what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(256, 64) for _ in range(3))
        self.tables[2].weight.requires_grad_(False)

    def forward(self, batch: Tensor) -> Tensor:
        for factor, table in enumerate(self.tables, 1):
            batch = batch + factor * table(torch.tensor([3, 7, 13, 20, 21]))
        return batch


def tables() -> nn.Module:
    model = nn.Sequential(Tables())
    fully_shard(model[0])
    fully_shard(model)
    return model


def train_others(rank: int, world_size: int) -> tuple[float, int]:
    def before(model: Any, step: int) -> None:
        if step == 2:
            model[0].tables[0].weight.requires_grad_(False)
            model[0].tables[2].weight.requires_grad_(True)

    return gap(tables, before)


def test_other_parameters_of_the_same_size(workers: WorkerPools) -> None:
    """Two steps to see what is trained, each time; the whole is reduced when others are."""
    assert workers(2).run(train_others) == [(0, 1)] * 2


def bytes_of_steps_that_train_others(rank: int, world_size: int) -> list[int]:
    model: Any = tables()
    extension = extend(model, WAITING)
    sent = [extension.stats().sent_bytes]
    for step in range(8):
        for index in (0, 2):
            model[0].tables[index].weight.requires_grad_(index == 2 * (step % 2))
        model.zero_grad()
        model(batch_of(step)).square().mean().backward()
        sent.append(extension.stats().sent_bytes)
    restore(model)
    return [after - before for before, after in itertools.pairwise(sent)]


def test_others_in_every_step_do_not_cost_twice_for_ever(workers: WorkerPools) -> None:
    for whole, *sent in workers(2).run(bytes_of_steps_that_train_others):
        assert all(each > 1.2 * whole for each in sent[:4]) and sent[4:] == [whole] * 3


def a_row_by_data(layer: Any) -> None:
    layer.weight.grad.data[3] = 0


def a_row_of_another(layer: Any) -> None:
    gradient = layer.weight.grad.clone()
    gradient[3] = 0
    layer.weight.grad = gradient


def all_signs(layer: Any) -> None:
    layer.weight.grad.data.neg_()


def signs_of_a_bias(layer: Any) -> None:
    layer.bias.grad.numpy()[:] *= -1


def order_of_a_bias(layer: Any) -> None:
    layer.bias.grad.data = layer.bias.grad.flip(0)


def dropped(layer: Any) -> None:
    layer.weight.grad = layer.bias.grad = None


def changed_by_a_hook(rank: int, world_size: int, change: Callable[[Any], None], everywhere: bool) -> tuple[float, int]:
    active = False

    def hook(layer: nn.Module, *ignored: Any) -> None:
        if active and (everywhere or rank == 1):
            change(layer)

    def build() -> nn.Module:
        model: Any = chains(unused=True)
        for chain in model:
            chain.layers[2].register_full_backward_hook(hook)
        return model

    def before(model: Any, step: int) -> None:
        nonlocal active
        active = step >= 3

    return gap(build, before)


@pytest.mark.quick("signs_of_a_bias", "a_row_by_data", "dropped")
@needs_unused
@pytest.mark.parametrize(
    "change", [a_row_by_data, a_row_of_another, all_signs, signs_of_a_bias, order_of_a_bias, dropped]
)
def test_hooks_that_change_gradients(workers: WorkerPools, change: Callable[[Any], None]) -> None:
    """On one of the ranks alone, or also on both."""
    everywhere = change in (dropped, a_row_by_data)
    for difference, early in workers(2).run(changed_by_a_hook, change, everywhere):
        assert difference == 0 and early == 2, "two blocks in the third step"


# -- failures ----------------------------------------------------------------------------------------------------------


def failing(rank: int, world_size: int, places: tuple[int, int], timeout_s: float) -> tuple[float, int] | str:
    """A backward fails in the second block behind a layer that may be another one on every rank."""

    def before(model: Any, step: int) -> None:
        if step == 3:
            model[1].fails_behind = places[rank]
            with pytest.raises(Stopped):
                model(batch_of(step)).square().mean().backward()
            model[1].fails_behind = None
            model.reset_iter_state()
            model.zero_grad()

    config = dataclasses.replace(WAITING, timeout_s=timeout_s, stall_warning_s=timeout_s / 2)
    try:
        return gap(chains, before, config)
    except LaneError as error:
        return str(error)


@needs_reset
def test_a_backward_that_fails_at_one_place(workers: WorkerPools) -> None:
    for difference, early in workers(2).run(failing, (0, 0), 20.0):
        assert difference == 0 and early


@needs_reset
def test_a_backward_that_fails_at_different_places_of_one_module(workers: WorkerPools) -> None:
    """Rank 0 has sent two parts, rank 1 one: what is under way belongs to no gradients of rank 1."""
    for message in workers(2).run(failing, (0, 1), 3.0):
        assert isinstance(message, str) and "early=False" in message and "part" in message, message


@pytest.mark.quick("2-0")
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 1)])
def test_survivors_name_the_dead(workers: WorkerPools, world_size: int, victim: int) -> None:
    """It dies before the backward of a block of which the others send parts."""
    pool = workers(world_size)
    given = victim, "before a block's backward", dataclasses.replace(WAITING, slice_mb=0.001)
    outcomes = pool.outcomes(train_until_somebody_dies, *given, timeout_s=40)
    pool.end()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0] == "ok" and f"rank {victim} died" in outcome[1], outcome
            assert "blocks.1, part 0" in outcome[1], outcome


def interrupted(rank: int, world_size: int) -> tuple[float, int]:
    """While the parts of a block are waited for that runs in a backward inside of the backward."""

    num_interrupted = 0

    def before(model: Any, step: int) -> None:
        nonlocal num_interrupted
        for chain in model:
            chain.reentrant = True
        if step == 3 and hasattr(model, "_fsdp_ext_extension"):
            wait: Any = WorkGroup.wait

            def stop(work: WorkGroup) -> None:
                wait(work)
                if "part 0" in work.label:
                    raise KeyboardInterrupt

            WorkGroup.wait = stop  # type: ignore[assignment,method-assign]
            try:
                model(batch_of(step + 100)).square().mean().backward()
            except KeyboardInterrupt:
                num_interrupted += 1
            finally:
                WorkGroup.wait = wait  # type: ignore[method-assign]
            model.reset_iter_state()
            model.zero_grad()

    difference, _ = gap(chains, before)
    return difference, num_interrupted


@needs_reset
def test_an_interrupt_while_parts_are_waited_for(workers: WorkerPools) -> None:
    assert workers(2).run(interrupted) == [(0, 1)] * 2


def forgotten(rank: int, world_size: int) -> tuple[int, bool]:
    """Is a model freed that nobody restores?"""
    model: Any = chains()
    extension = extend(model, WAITING)
    for step in range(3):
        model(batch_of(step)).square().mean().backward()
    num_early, block = extension.stats().early, weakref.ref(model[0])
    del model, extension
    gc.collect()
    return num_early, block() is None


def test_models_that_nobody_restores_are_freed(workers: WorkerPools) -> None:
    assert workers(2).run(forgotten) == [(2, True)] * 2
