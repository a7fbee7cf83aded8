"""What cannot be right is refused on every rank, before damage, with a remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from tests.support.dear.misuse import Wrapping, sgd, trained, wrapped
from tests.support.dear.twins import CONFIG, WholeNumbers, evaluating, whole_batches
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

# -- at construction ----------------------------------------------------------------------------------------------


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.table(ids)
        return output.sum()


class SharedMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(4, 4))
        self.two = nn.Parameter(self.one.data[:2])


class Unknown(torch.optim.SGD):
    """An optimizer of which nothing is known."""


def construct(rank: int, world_size: int, case: str) -> str:
    config: Any = CONFIG
    model: nn.Module = WholeNumbers(world_size)
    options: dict[str, Any] = {"gradient_as_bucket_view": True}
    if case == "not a view":
        options["gradient_as_bucket_view"] = False
    if case == "sparse":
        model = Sparse()
    if case == "shared memory":
        model = SharedMemory()
    if case == "optimizer in backward":
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp: Any = DistributedDataParallel(model, **options)
    if case == "strides" and rank == 1:  # after DDP has compared them
        matrix = next(parameter for parameter in ddp.parameters() if parameter.dim() == 2)
        matrix.data = matrix.data.t().contiguous().t()
    optimizer: Any = sgd(ddp)
    if case == "without a constructor":
        optimizer, config = Wrapping(optimizer), replace(CONFIG, update="auto")
    if case == "lbfgs":
        optimizer = torch.optim.LBFGS(ddp.parameters())
    if case == "adafactor":
        optimizer = torch.optim.Adafactor(ddp.parameters())
        config = replace(CONFIG, update="auto", assume_elementwise=True)
    if case == "unknown":
        optimizer = Unknown(ddp.parameters(), lr=0.1)
    if case == "missing":
        optimizer = torch.optim.SGD(list(ddp.parameters())[1:], lr=0.1)
    if case == "not DDP":
        ddp = model
    if case == "two hooks":
        ddp.register_comm_hook(None, allreduce_hook)
    if case == "mixed precision":  # DDP's own set-up of it needs an accelerator
        ddp.mixed_precision = object()
    if case == "skipped buckets":
        ddp.skip_all_reduce_unused_params = True
    if case == "not a config":
        config = {"lanes": 2}
    if case == "learning rates" and rank == world_size - 1:
        optimizer.param_groups[0]["lr"] = 0.25
    if case == "settings" and rank == 0:
        config = DearConfig(lanes=7)
    if case == "one rank only" and rank == 1:
        optimizer = torch.optim.LBFGS(ddp.parameters())
    if case == "shared optimizer":
        other = DistributedDataParallel(WholeNumbers(world_size), gradient_as_bucket_view=True)
        both = torch.optim.SGD([*ddp.parameters(), *other.parameters()], lr=0.1)
        first = DearState(ddp, both, CONFIG)
        message = message_of(lambda: DearState(other, both, CONFIG))
        first.close()
        return message
    if case == "second state":
        first = DearState(ddp, optimizer, CONFIG)
        message = message_of(lambda: DearState(ddp, sgd(ddp), CONFIG))
        first.close()
        return message
    before = [parameter.data_ptr() for parameter in ddp.parameters()]
    message = message_of(lambda: DearState(ddp, optimizer, config))
    assert before == [parameter.data_ptr() for parameter in ddp.parameters()]
    return message


CONSTRUCTION = {
    "not a view": "gradient_as_bucket_view=True",
    "sparse": "sparse=False",
    "shared memory": "share memory",
    "mixed precision": "torch.autocast",
    "optimizer in backward": "plain optimizer.step()",
    "without a constructor": "Wrapping does not run the constructor of torch.optim.Optimizer",
    "lbfgs": "LBFGS evaluates its closure several times per step",
    "adafactor": "assume_elementwise=True is wrong for Adafactor, which looks at whole parameters",
    "unknown": "assume_elementwise=True) if you know that it does",
    "missing": "not in the optimizer",
    "not DDP": "wrap the model first",
    "two hooks": "takes only one",
    "skipped buckets": "leave it out",
    "not a config": "DearConfig(...)",
    "learning rates": "optimizer group 0",
    "settings": "DearConfig",
    "strides": "strides (1, ",
    "one rank only": "on ranks [1]",
    "second state": "already has a DearState",
    "shared optimizer": "give every model an optimizer",
}


@pytest.mark.parametrize("case", CONSTRUCTION)
def test_construction(workers: WorkerPools, case: str) -> None:
    messages = workers(2).run(construct, case)
    assert len(set(messages)) == 1, "ranks must raise the same"
    assert messages[0].startswith("ValueError") and CONSTRUCTION[case] in messages[0], messages[0]


def test_settings_name_the_ranks_on_each_side(workers: WorkerPools) -> None:
    message = workers(3).run(construct, "learning rates")[0]
    assert "on ranks [0, 1]" in message and "on ranks [2]" in message


# -- while training -----------------------------------------------------------------------------------------------


def touch_gradients(rank: int, world_size: int) -> dict[str, str]:
    """Every usual way to read or change gradients between backward and step."""
    ddp, optimizer, state = trained(rank, world_size)
    optimizer.zero_grad()
    ddp(*whole_batches(rank, world_size, 9)).backward()
    parameters = list(ddp.parameters())
    shards = [p for group in optimizer.param_groups for p in group["params"]]
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    scaler.scale(torch.ones(()))
    touches: dict[str, Callable[[], Any]] = {
        "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        "clip_grad_value_": lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        "clip shards": lambda: nn.utils.clip_grad_norm_(shards, 1.0),
        "norm": lambda: parameters[1].grad.norm(),  # type: ignore[union-attr]
        "mul_": lambda: parameters[1].grad.mul_(2),  # type: ignore[union-attr]
        "item": lambda: parameters[2].grad.item(),  # type: ignore[union-attr]
        "clone": lambda: parameters[1].grad.clone(),  # type: ignore[union-attr]
        "foreach": lambda: torch._foreach_mul_([parameters[1].grad], 2.0),  # type: ignore[list-item]
        "unscale_": lambda: scaler.unscale_(optimizer),
        "scaler.step": lambda: scaler.step(optimizer),
        "second optimizer": lambda: torch.optim.SGD(parameters, lr=0.1).step(),
    }
    messages = {name: message_of(touch) for name, touch in touches.items()}
    assert repr(parameters[1].grad).startswith("GradientGuard(")
    optimizer.step()  # the attempts have changed nothing
    state.close()
    return messages


def test_gradients_are_guarded(workers: WorkerPools) -> None:
    for messages in workers(2).run(touch_gradients):
        for name, message in messages.items():
            assert message.startswith("RuntimeError") and "DearState" in message, f"{name}: {message}"
        assert "GradScaler" in messages["unscale_"] and "GradScaler" in messages["scaler.step"]


def guarded_from_the_start(rank: int, world_size: int) -> str:
    ddp, _, state = trained(rank, world_size, num_steps=0)
    ddp(*whole_batches(rank, world_size, 0)).backward()
    message = message_of(lambda: nn.utils.clip_grad_norm_(ddp.parameters(), 1.0))
    state.close()
    return message


def test_gradients_are_guarded_in_the_first_backward(workers: WorkerPools) -> None:
    assert all("shards" in message for message in workers(2).run(guarded_from_the_start))


def misuse(rank: int, world_size: int, case: str) -> str:
    ddp, optimizer, state = trained(rank, world_size)
    batch = whole_batches(rank, world_size, 5)
    if case == "join":
        message = message_of(lambda: ddp.join().__enter__())
    elif case == "Join":
        from torch.distributed.algorithms import Join

        message = message_of(lambda: Join([ddp]).__enter__())
    elif case == "optimizer.state_dict":
        message = message_of(optimizer.state_dict)
    elif case == "no_sync only":
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(*batch).backward()
        message = message_of(optimizer.step)
    elif case == "closure twice":
        optimizer.zero_grad()
        ddp(*batch).backward()

        def twice(*_: Any) -> None:
            replaced = state._driver.before_step(optimizer, (), {"closure": lambda: torch.zeros(())})
            assert replaced is not None
            replaced[1]["closure"]()
            replaced[1]["closure"]()

        message = message_of(twice)
    elif case == "assigned":
        saved = {name: value.clone() for name, value in ddp.module.state_dict().items()}
        message = message_of(lambda: ddp.module.load_state_dict(saved, assign=True))
    elif case == "replaced storage":
        state.synchronize()
        parameter = next(iter(ddp.module.parameters()))
        parameter.data = parameter.data.clone()
        optimizer.zero_grad()
        ddp(*batch).backward()
        message = message_of(optimizer.step)
    elif case == "deepcopy":
        message = message_of(lambda: copy.deepcopy(ddp))
    elif case == "closed":
        state.close()
        message = message_of(lambda: ddp(*batch).backward())
    elif case == "closed optimizer":
        state.close()
        message = message_of(optimizer.step)
    elif case == "closed state_dict":
        state.close()
        message = message_of(optimizer.state_dict)
    elif case == "set_fusion":
        message = message_of(lambda: state.set_fusion("size", mb=-1))
    elif case == "set_fusion without effect":
        message = message_of(lambda: state.set_fusion("size", layers=2))
    else:
        message = message_of(lambda: state.set_fusion("size", mb=1.0 + rank))
    state.close()
    return message


MISUSE = {
    "join": "same number of batches",
    "Join": "same number of batches",
    "optimizer.state_dict": "shard of its state",
    "no_sync only": "no_sync()",
    "closure twice": "more than once",
    "assigned": "load without assign",
    "replaced storage": "was replaced",
    "deepcopy": "ddp.module",
    "closed": "was closed",
    "closed optimizer": "make a new optimizer",
    "closed state_dict": "shard of its state",
    "set_fusion": "fusion_mb must be None, or > 0",
    "set_fusion differs": "fusion rule differs between ranks",
    "set_fusion without effect": "fusion_layers=2 has no effect",
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse(workers: WorkerPools, case: str) -> None:
    pool = workers(2)
    for message in pool.run(misuse, case):
        assert MISUSE[case] in message, message
    if case in ("closed", "no_sync only"):  # DDP itself is left half-way through a backward
        pool.end()


class OldGraph(nn.Module):
    """A layer whose backward needs its weight, unlike the whole-number model's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(values)
        return output.sum()


def backward_through_an_old_graph(rank: int, world_size: int) -> list[str]:
    messages = []
    for with_dear in (True, False):
        ddp = DistributedDataParallel(OldGraph(), gradient_as_bucket_view=True)
        optimizer = sgd(ddp)
        state = DearState(ddp, optimizer, CONFIG) if with_dear else None
        if state is not None:
            ddp.register_comm_hook(state, dear_hook)
        old = ddp.module(torch.ones(2, 4, requires_grad=True))
        ddp(torch.ones(2, 4)).backward()
        optimizer.step()
        messages.append(message_of(old.backward))
        if state is not None:
            state.close()
    return messages


def test_old_graph_raises_as_plain_pytorch_does(workers: WorkerPools) -> None:
    for ours, plain in workers(2).run(backward_through_an_old_graph):
        assert "modified by an inplace operation" in plain, plain
        assert "modified by an inplace operation" in ours, ours


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.used(values)
        return output.sum()


def unused_without_the_flag(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(Optional(), gradient_as_bucket_view=True, bucket_cap_mb=0.00001)
    state = DearState(ddp, sgd(ddp), CONFIG)
    ddp.register_comm_hook(state, dear_hook)
    message = message_of(lambda: (ddp(torch.ones(2, 3)).backward(), state._optimizer.step()))
    return message


def test_unused_parameters_need_the_flag(workers: WorkerPools) -> None:
    pool = workers(2)
    for message in pool.run(unused_without_the_flag):
        assert "find_unused_parameters=True" in message or "was not reduced" in message, message
    pool.end()


def unregistered(rank: int, world_size: int) -> str:
    ddp = wrapped(world_size)
    optimizer = sgd(ddp)
    state = DearState(ddp, optimizer, CONFIG)
    ddp(*whole_batches(rank, world_size, 0)).backward()
    message = message_of(optimizer.step)
    state.close()
    return message


def test_a_forgotten_hook_is_noticed(workers: WorkerPools) -> None:
    assert all("register_comm_hook" in message for message in workers(2).run(unregistered))


def shard_sizes(rank: int, world_size: int) -> tuple[int, int, list[int]]:
    """Elements of optimizer state on this rank after one step, and of the model."""
    ddp = wrapped(world_size)
    optimizer = torch.optim.AdamW(ddp.parameters())
    state = DearState(ddp, optimizer, CONFIG)
    ddp.register_comm_hook(state, dear_hook)
    sizes = []
    for step in range(3):
        ddp(*whole_batches(rank, world_size, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        states = optimizer.state.values()
        sizes.append(sum(part.numel() for entry in states for part in entry["exp_avg"].local_shards()))
    with evaluating(ddp.module):
        state.close()
    return sizes[0], sum(p.numel() for p in ddp.parameters()), sizes


def test_optimizer_state_is_sharded_from_the_first_step(workers: WorkerPools) -> None:
    results = workers(4).run(shard_sizes)
    total = results[0][1]
    for step in range(3):
        assert sum(sizes[step] for *_, sizes in results) == total
    largest_atom = 0.02 * 2**20 / 4
    assert all(max(sizes) <= total / 4 + largest_atom for *_, sizes in results)
