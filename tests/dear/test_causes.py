"""Backwards and models that DDP does not reduce: refused on every rank, before damage, with the cause that is so.

Prevents: weights that part or go astray without a word, and errors that send users to a setting that is not at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, TopKConfig, TopKState, dear_hook, embedding_hook, topk_hook
from ddp_hooks.dear.layout.placement import held_in_shards
from ddp_hooks.intercept import GradientGuard
from tests.support.dear.misuse import sgd
from tests.support.dear.twins import CONFIG
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


class Heads(nn.Module):
    """Two heads; one of them may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 5)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, values: Tensor, both: bool = True, boxed: bool = False) -> Any:
        hidden = torch.tanh(self.body(values))
        output: Tensor = self.first(hidden)
        output = output + self.second(hidden) if both else output
        return Box(output) if boxed else output


class Box:
    """An output in which nobody finds the tensor."""

    def __init__(self, output: Tensor) -> None:
        self.output = output


class Pair(Heads):
    """Returns the outputs of both heads."""

    def forward(self, values: Tensor, both: bool = True, boxed: bool = False) -> Any:
        hidden = torch.tanh(self.body(values))
        return self.first(hidden), self.second(hidden)


def dear(update: str = "sharded", register: bool = True, model: type[nn.Module] = Heads, **options: Any) -> Any:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True, **options)
    optimizer = sgd(ddp)
    state = DearState(ddp, optimizer, DearConfig(update=update, timeout_s=20))  # type: ignore[arg-type]
    if register:
        ddp.register_comm_hook(state, dear_hook)
    return ddp, optimizer, state


VALUES = torch.linspace(-1, 1, 10).view(2, 5)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(VALUES).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


# -- while training -------------------------------------------------------------------------------------------------


def around_hooks(ddp: Any, optimizer: Any) -> str:
    with torch.no_grad():
        ddp.forward(VALUES)  # which does no harm
    return message_of(lambda: ddp.forward(VALUES).sum().backward())


def around_hooks_after_a_backward(ddp: Any, optimizer: Any) -> str:
    ddp(VALUES).sum().backward()
    optimizer.zero_grad()
    return message_of(lambda: ddp.forward(VALUES).sum().backward())


def around_hooks_before_buckets_are_rebuilt(ddp: Any, optimizer: Any) -> str:
    ddp(VALUES).sum().backward()
    return message_of(lambda: ddp.forward(VALUES))


def second_backward(ddp: Any, optimizer: Any) -> str:
    output = ddp(VALUES)
    output.mean().backward(retain_graph=True)
    return message_of(output.square().mean().backward)


def second_backward_after_zeroing(ddp: Any, optimizer: Any) -> str:
    output = ddp(VALUES)
    output.mean().backward(retain_graph=True)
    optimizer.zero_grad()
    output.square().mean().backward()
    return message_of(optimizer.step)


def inner_module(ddp: Any, optimizer: Any) -> str:
    ddp.module(VALUES).sum().backward()
    return message_of(optimizer.step)


def only_no_sync(ddp: Any, optimizer: Any) -> str:
    with ddp.no_sync():
        ddp(VALUES).sum().backward()
    return message_of(optimizer.step)


def parametrised(ddp: Any, optimizer: Any) -> str:
    nn.utils.parametrizations.weight_norm(ddp.module.body)
    ddp(VALUES).sum().backward()
    return message_of(optimizer.step)


def left_out(ddp: Any, optimizer: Any) -> str:
    ddp(VALUES, both=False).sum().backward()
    return message_of(optimizer.step)


def set_by_hand(ddp: Any, optimizer: Any) -> str:
    ddp(VALUES).sum().backward()
    ddp.module.body.bias.grad = torch.ones(5)
    return message_of(optimizer.step)


def set_in_a_hook(ddp: Any, optimizer: Any) -> str:
    ddp(VALUES).sum().backward()

    def assign(*_: Any) -> None:
        for parameter in ddp.parameters():
            parameter.grad = torch.ones_like(parameter)

    optimizer.register_step_pre_hook(assign)
    return message_of(optimizer.step)


LOOPS: dict[Callable[[Any, Any], str], str] = {
    around_hooks: "call ddp(...), not ddp.forward(...)",
    around_hooks_after_a_backward: "call ddp(...), not ddp.forward(...)",
    around_hooks_before_buckets_are_rebuilt: "call ddp(...), not ddp.forward(...)",
    second_backward: "run one backward for each forward",
    second_backward_after_zeroing: "run one backward for each forward",
    inner_module: "its forward was called by ddp.module(...)",
    only_no_sync: "ran under no_sync()",
    parametrised: "body.parametrizations.weight.original0",
    left_out: "pass find_unused_parameters=True",
    set_by_hand: "something other than the last backward through ddp(...) has set .grad",
    set_in_a_hook: "with state.reduced_gradients() as shards:`, if code has set .grad",
}


def causes(rank: int, world_size: int, update: str) -> dict[str, tuple[str, bool]]:
    """What is said, and whether all parameters are as they were."""
    found = {}
    for loop in LOOPS:
        ddp, optimizer, state = dear(update)
        if loop is not around_hooks_before_buckets_are_rebuilt:
            train(ddp, optimizer)
        state.synchronize()
        before = [parameter.detach().clone() for parameter in state._driver.parameters.tensors]
        message = loop(ddp, optimizer)
        unchanged = all(torch.equal(a, b) for a, b in zip(state._driver.parameters.tensors, before, strict=True))
        found[loop.__name__] = (message, unchanged)
        state.close()
    cases: dict[str, dict[str, Any]] = {"static": {"static_graph": True}, "unregistered": {"register": False}}
    for name, options in cases.items():
        ddp, optimizer, state = dear(update, model=Pair, **options)
        messages = []
        for _ in range(3):
            optimizer.zero_grad()
            messages.append(message_of(lambda ddp=ddp: ddp(VALUES)[0].sum().backward()))  # type: ignore[misc]
            messages.append(message_of(optimizer.step))
        found[name] = (next((m for m in messages if m != "nothing was raised"), ""), True)
        state.close()
    return found


@pytest.mark.quick("sharded")
@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_the_cause_is_named(workers: WorkerPools, update: str) -> None:
    pool = workers(2)
    first, second = pool.run(causes, update)
    pool.end()  # DDP is left half-way through backwards
    assert first == second
    expected = {loop.__name__: part for loop, part in LOOPS.items()}
    expected |= {"static": "in the place of static_graph=True", "unregistered": "register_comm_hook"}
    for name, part in expected.items():
        message, unchanged = first[name]
        assert message.startswith("RuntimeError") and part in message and unchanged, (name, message, unchanged)
        if name != "only_no_sync":
            assert "no_sync" not in message, (name, message)


# -- at set-up ------------------------------------------------------------------------------------------------------


def set_up(rank: int, world_size: int) -> dict[str, str]:
    def refused(change: Callable[[Heads], Any], kind: str, frozen: bool = False) -> str:
        model = Heads()
        model.second.requires_grad_(not frozen)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)
        change(model)
        make = (lambda: DearState(ddp, sgd(ddp), CONFIG)) if kind == "dear" else (lambda: TopKState(ddp))
        return message_of(make)

    changes: dict[str, tuple[Callable[[Heads], Any], bool]] = {
        "frozen": (lambda model: model.first.requires_grad_(False), False),
        "thawed": (lambda model: model.second.requires_grad_(True), True),
        "parametrised": (lambda model: nn.utils.parametrizations.weight_norm(model.body), False),
    }
    found: dict[str, str] = {}
    for name, (change, frozen) in changes.items():
        found |= {f"{kind} {name}": refused(change, kind, frozen) for kind in ("dear", "topk")}
    ddp = DistributedDataParallel(nn.Linear(3, 3, dtype=torch.complex64), gradient_as_bucket_view=True)
    found["dear complex"] = message_of(lambda: DearState(ddp, sgd(ddp), CONFIG))
    return found


def test_what_changed_since_wrapping_is_refused(workers: WorkerPools) -> None:
    first, second = workers(2).run(set_up)
    assert first == second
    for kind in ("dear", "topk"):
        assert "first.weight, first.bias was frozen after" in first[f"{kind} frozen"]
        assert "second.weight, second.bias was added, thawed" in first[f"{kind} thawed"]
        assert "body.parametrizations.weight.original0" in first[f"{kind} parametrised"]
    assert "weight is torch.complex64" in first["dear complex"] and "view_as_real" in first["dear complex"]
    assert all(message.startswith("ValueError") for message in first.values()), first


def real_for_complex(rank: int, world_size: int) -> float:
    """What the refusal advises trains as plain DDP trains the complex parameter."""

    class Net(nn.Module):
        def __init__(self, real: bool) -> None:
            super().__init__()
            values = torch.randn(4, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
            self.real = real
            self.mix = nn.Parameter(torch.view_as_real(values).clone() if real else values)

        def forward(self, values: Tensor) -> Tensor:
            mix = torch.view_as_complex(self.mix) if self.real else self.mix
            output: Tensor = (values.to(torch.complex128) @ mix).abs().square().mean()
            return output

    ends = []
    for real in (True, False):
        ddp = DistributedDataParallel(Net(real), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
        state = DearState(ddp, optimizer, CONFIG) if real else None
        if state is not None:
            ddp.register_comm_hook(state, dear_hook)
        for step in range(4):
            optimizer.zero_grad()
            ddp(torch.linspace(-1, 1 + rank + step, 8, dtype=torch.float64).view(2, 4)).backward()
            optimizer.step()
        if state is not None:
            state.close()
        mix = ddp.module.mix.detach()
        ends.append(mix if real else torch.view_as_real(mix))
    return float((ends[0] - ends[1]).abs().max())


def test_what_is_advised_for_complex_parameters_trains_alike(workers: WorkerPools) -> None:
    assert max(workers(2).run(real_for_complex)) < 1e-12


def frozen_later(rank: int, world_size: int) -> float:
    """Layers are frozen after the state is made, as its error for earlier ones advises."""
    ends = []
    for ours in (True, False):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Heads().double(), gradient_as_bucket_view=True, find_unused_parameters=True)
        optimizer = sgd(ddp)
        state = DearState(ddp, optimizer, CONFIG) if ours else None
        if state is not None:
            ddp.register_comm_hook(state, dear_hook)
        for step in range(5):
            if step in (0, 3):
                (ddp.module.first if step else ddp.module.second).requires_grad_(False)
            optimizer.zero_grad()
            ddp(VALUES.double() * (1 + rank + step)).square().mean().backward()
            optimizer.step()
        if state is not None:
            state.close()
        ends.append(torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()]))
    return float((ends[0] - ends[1]).abs().max())


def test_what_is_frozen_later_stays_as_it_is(workers: WorkerPools) -> None:
    assert max(workers(2).run(frozen_later)) < 1e-12


@pytest.mark.parametrize("hook", [dear_hook, topk_hook, embedding_hook])
def test_a_hook_without_its_state_says_so(hook: Any) -> None:
    with pytest.raises(TypeError, match=rf"{hook.__name__} got NoneType as its state: call ddp.register_comm_hook\("):
        hook(None, None)


# -- gradients of one rank under sparse all-reduce ------------------------------------------------------------------


def late_no_sync(ddp: Any, optimizer: Any) -> None:
    ddp(VALUES).square().mean().backward()
    with ddp.no_sync():
        ddp(VALUES).square().mean().backward()


def late_no_sync_in_a_box(ddp: Any, optimizer: Any) -> None:
    ddp(VALUES, boxed=True).output.square().mean().backward()
    with ddp.no_sync():
        ddp(VALUES, boxed=True).output.square().mean().backward()


def late_no_sync_around_hooks(ddp: Any, optimizer: Any) -> None:
    ddp(VALUES).square().mean().backward()
    with ddp.no_sync():
        ddp.forward(VALUES).square().mean().backward()


def inner_module_alone(ddp: Any, optimizer: Any) -> None:
    ddp.module(VALUES).square().mean().backward()


def inner_module_second(ddp: Any, optimizer: Any) -> None:
    ddp(VALUES).square().mean().backward()
    ddp.module(VALUES).square().mean().backward()


def head_left_out(ddp: Any, optimizer: Any) -> None:
    ddp(VALUES, both=False).square().mean().backward()


def never_synchronised(ddp: Any, optimizer: Any) -> None:
    with ddp.no_sync():
        ddp(VALUES).square().mean().backward()


def twice(ddp: Any, optimizer: Any) -> None:
    output = ddp(VALUES)
    output.mean().backward(retain_graph=True)
    output.square().mean().backward()


def two_forwards_then_their_backwards(ddp: Any, optimizer: Any) -> None:
    first, second = ddp(VALUES), ddp(VALUES * 2)
    first.square().mean().backward()
    second.square().mean().backward()


def early_no_sync(ddp: Any, optimizer: Any) -> None:
    never_synchronised(ddp, optimizer)
    ddp(VALUES).square().mean().backward()


def between(ddp: Any, optimizer: Any) -> None:
    """What is added on one rank is reduced with the next synchronised backward."""
    late_no_sync(ddp, optimizer)
    ddp(VALUES).square().mean().backward()


def gradients_of_inputs(ddp: Any, optimizer: Any) -> None:
    """autograd.grad() after the backward fills no .grad."""
    values = VALUES.clone().requires_grad_()
    output = ddp(values)
    output.square().mean().backward(retain_graph=True)
    torch.autograd.grad(output.sum(), values)


def dropped(ddp: Any, optimizer: Any) -> None:
    never_synchronised(ddp, optimizer)
    optimizer.zero_grad(set_to_none=False)


def in_a_closure(ddp: Any, optimizer: Any) -> None:
    """The last backward runs inside of step(), as Lightning has it."""
    never_synchronised(ddp, optimizer)

    def closure() -> torch.Tensor:
        loss: torch.Tensor = ddp(VALUES).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


REFUSED: dict[Callable[[Any, Any], None], str] = {
    late_no_sync: "ran under no_sync()",
    late_no_sync_in_a_box: "ran under no_sync()",
    late_no_sync_around_hooks: "or ddp.forward(...)",
    never_synchronised: "ran under no_sync()",
    inner_module_alone: "its forward was called by ddp.module(...)",
    inner_module_second: "its forward was called by ddp.module(...)",
    head_left_out: "pass find_unused_parameters=True to DistributedDataParallel: the last backward gave no gradient",
    twice: "one backward for each forward",
    two_forwards_then_their_backwards: "one backward for each forward",
}
FINE = (early_no_sync, between, gradients_of_inputs, dropped, in_a_closure)


def local_gradients(rank: int, world_size: int, pipeline: Any) -> dict[str, tuple[str, bool]]:
    """What a step says, and whether nothing has changed; then the loop goes on."""
    found = {}
    for loop in (*REFUSED, *FINE):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Heads(), gradient_as_bucket_view=True)
        optimizer = sgd(ddp)
        state = TopKState(ddp, TopKConfig(density=0.5, pipeline=pipeline, timeout_s=20), optimizer=optimizer)
        ddp.register_comm_hook(state, topk_hook)
        train(ddp, optimizer)
        state.synchronize()
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        message = message_of(lambda loop=loop, ddp=ddp, optimizer=optimizer: loop(ddp, optimizer))  # type: ignore[misc]
        if message == "nothing was raised":
            message = message_of(optimizer.step)
        unchanged = all(torch.equal(a, b) for a, b in zip(ddp.parameters(), before, strict=True))
        optimizer.zero_grad()
        if loop in FINE or loop in (late_no_sync, never_synchronised):
            train(ddp, optimizer)
        state.close()
        found[loop.__name__] = (message, unchanged)
    return found


@pytest.mark.quick("backward")
@pytest.mark.parametrize("pipeline", ["backward", "forward"])
def test_steps_with_gradients_of_one_rank_are_refused(workers: WorkerPools, pipeline: str) -> None:
    pool = workers(2)
    first, second = pool.run(local_gradients, pipeline)
    pool.end()
    assert first == second
    for loop, part in REFUSED.items():
        message, unchanged = first[loop.__name__]
        assert message.startswith("RuntimeError") and part in message and unchanged, (loop.__name__, message, unchanged)
    assert all(first[loop.__name__][0] == "nothing was raised" for loop in FINE), first


# -- guards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [nn.Module.cpu, nn.Module.double, nn.Module.share_memory, nn.Module.bfloat16,
    lambda m: m.to("meta"), lambda m: m.to(torch.float64), lambda m: m.to_empty(device="cpu"),
    lambda m: m.to(memory_format=torch.channels_last), lambda m: m.type(torch.float64)])  # fmt: skip
def test_a_module_is_converted_with_its_guards(convert: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Conv2d(2, 2, 1))
    plain = nn.Sequential(nn.Linear(3, 2), nn.Conv2d(2, 2, 1))
    for name, parameter in model.named_parameters():
        parameter.grad = GradientGuard.standing_for(parameter, name, lambda what: "not here")
        parameter.grad.zero_()
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    convert(model), convert(plain)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.dtype, ours.device, ours.shape) == (theirs.dtype, theirs.device, theirs.shape)
        assert isinstance(ours.grad, GradientGuard) and ours.grad.owner == name and ours.grad.zeroed
        assert (ours.grad.dtype, ours.grad.device) == (theirs.grad.dtype, theirs.grad.device)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="not here"):
            ours.grad.float().sum()


def test_a_guard_says_first_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_hooks.dear.layout.placement.clipping_of_frameworks", {})
    for function, remedy in (("linalg_vector_norm", "state.clip_grad_norm_"), ("x_non_finite_check", "GradScaler")):
        advice = held_in_shards(function)
        assert remedy in advice[:100] and len(advice) < 330, advice
        assert not any(name in advice for name in ("Trainer", "Accelerate", "Lightning"))
    known = {"Accelerate": "accelerator.clip_grad_norm_()"}
    monkeypatch.setattr("ddp_hooks.dear.layout.placement.clipping_of_frameworks", known)
    assert "Accelerate clips by accelerator.clip_grad_norm_()" in held_in_shards("mul_")

