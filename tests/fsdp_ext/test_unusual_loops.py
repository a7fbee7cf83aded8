"""What loops may do to an extended model, beside training it: the bits of stock FSDP2, or an error that says why not.

Prevents: parameters that were gathered before a step and are used after it, gradients of backwards that failed, and
models that cannot go on after an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_ext import compat, extend, gather, restore
from tests.fsdp_ext import twins
from tests.fsdp_ext.test_life import message_of
from tests.fsdp_ext.test_pending import Reduction, backward, pending
from tests.fsdp_ext.twins import CONFIG, Block, Trainee, Whole, WholeNumbers, local, momentum_sgd, shard
from tests.workers import WorkerPools

needs_reset = pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch cannot go on after an exception"
)


class Stopped(Exception):
    """What a loop catches."""


def stop(*_: Any) -> None:
    raise Stopped


def on_both(
    build: Callable[[], nn.Module], run: Callable[[nn.Module], list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """What ``run`` sees of an extended model, and of one that is not."""
    seen = []
    for extended in (True, False):
        torch.manual_seed(7)
        model = build()
        if extended:
            extend(model, CONFIG)
        seen.append(run(model))
        if extended:
            restore(model)
    return seen[0], seen[1]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) > 0 and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def shards(model: nn.Module) -> list[Tensor]:
    return [local(parameter).clone() for parameter in model.parameters()]


# -- what was gathered ahead and not used -----------------------------------------------------------------------------


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
    """What a loop gathers by itself stays until it is waited for, whatever runs meanwhile."""

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
    states = [block._get_fsdp_state() for block in blocks]
    lists = states[3]._states_to_backward_prefetch, states[1]._states_to_forward_prefetch
    return len(lists[0]), len(lists[1]), len(states[4]._states_to_backward_prefetch)


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


# -- other modes ------------------------------------------------------------------------------------------------------


def inferring(twin: Trainee, step: int) -> None:
    """Evaluation in inference mode, in which lanes, being other threads, are not."""
    twins.plain(twin, step)
    twin.model.eval()
    with torch.inference_mode():
        twin.loss(step + 51)
    twin.model.train()


@pytest.mark.parametrize("codec", ["exact", "bf16", "int8"])
@pytest.mark.parametrize("kept", [False, True])
def test_inference_mode(workers: WorkerPools, codec: Any, kept: bool) -> None:
    options = {"reshard_after_forward": False} if kept else {}
    for outcome in workers(2).run(twins.compare, inferring, 4, replace(CONFIG, all_gather=codec), options):
        assert outcome.moved and outcome.num_seen > 0
        assert codec == "int8" or not [name for name in outcome.differing if not name.startswith("seen")]


def only_inferring(rank: int, world_size: int) -> bool:
    """A model that is made in inference mode."""
    with torch.inference_mode():
        ours, theirs = on_both(lambda: shard(WholeNumbers(world_size)), lambda model: [model(3) for _ in range(3)])
        return same(ours, theirs)


def test_models_for_inference(workers: WorkerPools) -> None:
    assert workers(2).run(only_inferring) == [True, True]


def gathers_in_int8(rank: int, world_size: int) -> set[int]:
    """Among how many ranks, when the first gather is one among few."""
    model = shard(WholeNumbers(world_size), None, reshard_after_forward=2)
    with torch.no_grad():
        model(1)  # after it, parameters are whole on every two ranks
    extend(model, replace(CONFIG, all_gather="int8", prefetch=0))
    numbers = set()
    original = gather.compressed_all_gather

    def counting(chunks: Any, *others: Any) -> Any:
        numbers.add(len(chunks))
        return original(chunks, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "compressed_all_gather", counting)
        for step in range(3):
            model(step).backward()
    restore(model)
    return numbers


def test_only_whole_gathers_are_rounded(workers: WorkerPools) -> None:
    assert workers(4).run(gathers_in_int8) == [{4}] * 4


# -- failures ---------------------------------------------------------------------------------------------------------


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise Stopped


def failing_micro_batch(rank: int, world_size: int, zero: bool | None, foreach: bool) -> bool:
    """The first backward of a step fails, the second one does not; gradients may be set to None or zeros between."""

    def run(model: Any) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5, foreach=foreach)
        for step in range(6):
            optimizer.zero_grad()
            if step % 2:
                if step > 2:
                    model(1000 * step + 55 + rank).backward()
                handle = model.blocks[2].register_forward_hook(lambda module, given, total: Failing.apply(total))
                with pytest.raises(Stopped):
                    model(1000 * step + 77 + rank).backward()
                handle.remove()
                model.reset_iter_state()
                if zero is not None:
                    optimizer.zero_grad(set_to_none=not zero)
            model(1000 * step + rank).backward()
            optimizer.step()
        return shards(model)

    return same(*on_both(lambda: shard(WholeNumbers(world_size)), run))


@needs_reset
@pytest.mark.parametrize("zero", [None, False, True], ids=["added_to", "to_none", "to_zeros"])
@pytest.mark.parametrize("foreach", [False, True])
def test_backwards_that_fail(workers: WorkerPools, zero: bool | None, foreach: bool) -> None:
    assert workers(2).run(failing_micro_batch, zero, foreach) == [True, True]


def zeroed_in_part(rank: int, world_size: int) -> bool:
    """Two optimizers share a module, and one of them sets its gradients to zeros after a backward that failed."""

    def run(model: Any) -> list[Tensor]:
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(parameters[part::2], lr=0.125) for part in (0, 1)]
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            handle = model.blocks[0].register_forward_hook(lambda module, given, total: Failing.apply(total))
            with pytest.raises(Stopped):
                model(1000 * step + 77 + rank).backward()
            handle.remove()
            model.reset_iter_state()
            optimizers[0].zero_grad(set_to_none=False)
            model(1000 * step + rank).backward()
            for optimizer in optimizers:
                optimizer.step()
        return shards(model)

    return same(*on_both(lambda: shard(WholeNumbers(world_size)), run))


@needs_reset
def test_backwards_that_fail_with_two_optimizers(workers: WorkerPools) -> None:
    assert workers(2).run(zeroed_in_part) == [True, True]


def interrupted(rank: int, world_size: int) -> bool:
    """Ctrl-C in a forward, in a notebook, say; then a step."""

    def run(model: Any) -> list[Tensor]:
        optimizer, seen = momentum_sgd(model), []
        for step in range(4):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
        model(5).backward()
        handle = model.blocks[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(6)
        handle.remove()
        optimizer.step()
        model.reset_iter_state()
        for seed in (7, 8):
            seen.append(model(seed).detach().clone())
        return seen

    return same(*on_both(lambda: shard(WholeNumbers(world_size)), run))


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@needs_reset
def test_interrupts(workers: WorkerPools) -> None:
    assert workers(2).run(interrupted) == [True, True]


def after_a_timeout(rank: int, world_size: int) -> tuple[str, int, float]:
    """One rank comes too late for a forward; the model is restored and goes on with stock communication."""
    torch.manual_seed(7)
    model = shard(WholeNumbers(world_size))
    extend(model, replace(CONFIG, timeout_s=2, stall_warning_s=1))
    for step in range(3):
        model(step).backward()
    message = ""
    if rank == 0:
        message = message_of(lambda: model(4))
        message_of(lambda: restore(model))  # its lanes have failed, which it says when it is through
    else:
        time.sleep(4)
        message_of(lambda: restore(model))
    dist.barrier()
    held = sum(compat.holds_a_gather(module) for module in model.modules() if isinstance(module, FSDPModule))
    assert isinstance(model, FSDPModule)
    model.reset_iter_state()  # the first rank's forward has ended in the middle
    return message, held, float(model(5).detach())


@needs_reset
def test_a_model_goes_on_after_its_lanes_have_failed(workers: WorkerPools) -> None:
    outcomes = workers(2).run(after_a_timeout)
    assert "timed out" in outcomes[0][0] or "waited" in outcomes[0][0]
    assert [held for _, held, _ in outcomes] == [0, 0]
    assert outcomes[0][2] == outcomes[1][2]


# -- other settings ---------------------------------------------------------------------------------------------------


def with_other_settings(rank: int, world_size: int) -> tuple[float, float, float]:
    """What is kept of gradients, with a density, another density, and none."""
    torch.manual_seed(7)
    model = shard(WholeNumbers(world_size))
    kept = []
    for step, density in enumerate((0.05, 0.1, None)):
        changes: dict[str, Any] = {} if density is None else {"reduce_scatter": "sparse", "density": density}
        extension = extend(model, replace(CONFIG, **changes))
        state = extension.state_dict()
        kept.append(sum(float(each.full_tensor().abs().sum()) for each in state.values()))
        if step == 0:
            model(3 + rank).backward()
            kept[0] = sum(float(each.full_tensor().abs().sum()) for each in extension.state_dict().values())
    restore(model)
    return kept[0], kept[1], kept[2]


def test_what_is_left_over_stays_with_other_settings(workers: WorkerPools) -> None:
    for first, second, third in workers(2).run(with_other_settings):
        assert first == second > 0 and third == 0.0


def changed_too_early(rank: int, world_size: int, whole: bool) -> str:
    """Inside of the backward somebody multiplies a gradient that has not come: a DTensor, or what it holds."""
    waiting, reduction = pending(), Reduction(2)
    mesh, places = init_device_mesh("cpu", (world_size,)), [Shard(0)]
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4 * world_size), mesh, places))

    def defer() -> None:
        waiting.defer(reduction.delivery._replace(parameters=(parameter,)))
        parameter.grad = DTensor.from_local(reduction.output, mesh, places)

    def change() -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            (parameter.grad if whole else local(parameter.grad)).mul_(2)

    return message_of(lambda: backward(defer, change))


@pytest.mark.parametrize("whole", [True, False])
def test_who_changes_a_gradient_too_early_hears_of_it(workers: WorkerPools, whole: bool) -> None:
    for message in workers(2).run(changed_too_early, whole):
        assert "was changed inside of the backward, before it had come" in message
