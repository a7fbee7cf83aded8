"""One test per line of the gap matrix, and per defect D1 to D10 of the DeAR implementation that its authors published.

Each line is what an earlier implementation does not offer, does wrong without a word, or hangs on; here every one is
compared with plain DDP. Other files try the same subjects in more depth; this one shows that no line was forgotten.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from tests.support.dear import clipping, compiled, matrices, twins
from tests.support.dear.loops import adamw_two_groups, foreach_adam, in_bfloat16, momentum_sgd
from tests.support.dear.twins import CONFIG, Trainee, WholeNumbers, compare, whole_batches
from tests.support.messages import message_of
from tests.support.models import MODELS, TOLERANCE, adamw, choices, conditional, rows, sequences
from tests.support.workers import WorkerPools


@dataclass(frozen=True)
class Line:
    """What to train, how, and how far from plain DDP it may end."""

    model: Callable[[int], nn.Module]
    batches: Callable[[int, int, int], tuple[Any, ...]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loop: Callable[[Trainee, int], None]
    tolerance: float = TOLERANCE
    config: DearConfig = CONFIG
    ddp_options: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 8


def on(name: str, loop: Callable[[Trainee, int], None], **changes: Any) -> Line:
    """A line about one of the models in float64."""
    model, batches, optimizer = MODELS[name]
    return Line(model, batches, optimizer, loop, **changes)  # type: ignore[arg-type]


def whole(loop: Callable[[Trainee, int], None], optimizer: Any = adamw_two_groups, **changes: Any) -> Line:
    """A line about a model whose gradients are whole numbers, so that the twins may not differ in any bit."""
    return Line(WholeNumbers, whole_batches, optimizer, loop, tolerance=0.0, **changes)


def save_whole_and_start_anew(twin: Trainee, step: int) -> None:
    """Everything that is needed to go on is in the two ``state_dict``s."""
    twins.plain(twin, step)
    state = twin.optimizer.state_dict() if twin.state is None else twin.state.full_optimizer_state_dict()
    if step == 3:
        twin.memory["saved"] = copy.deepcopy((twin.ddp.module.state_dict(), state))
    if step == 5:
        model, optimizer = copy.deepcopy(twin.memory["saved"])
        twin.ddp.module.load_state_dict(model)
        twin.optimizer.load_state_dict(optimizer)


def evaluate_with_gradients(twin: Trainee, step: int) -> None:
    """Evaluation that forgets ``no_grad``, which made the published code train on it (D1)."""
    twins.plain(twin, step)
    with twins.evaluating(twin.ddp.module):
        twin.losses += [float(twin.ddp.module(*twin.batch(100 + step)).detach()) for _ in range(2)]


def look_at_the_last_step(twin: Trainee, step: int) -> None:
    """What evaluation and a checkpoint see right after ``step()``, and after the last of all (D2)."""
    twins.plain(twin, step)
    twin.losses.append(sum(float(tensor.sum()) for tensor in twin.ddp.module.state_dict().values()))


def change_settings_by_group(twin: Trainee, step: int) -> None:
    """Each group has its own learning rate and decay, and changes them on its own (D5)."""
    for position, group in enumerate(twin.optimizer.param_groups):
        group["lr"] = 0.01 * (1 + (step + position) % 3)
    twins.plain(twin, step)


def step_on_zeros(twin: Trainee, step: int) -> None:
    """``zero_grad`` means it: momentum alone moves the parameters then (D8)."""
    twin.optimizer.zero_grad(set_to_none=False)
    twin.loss(step).backward()
    twin.optimizer.zero_grad(set_to_none=False)
    twin.optimizer.step()


MATRIX = {
    "clipping": on("encoder", partial(clipping.clip_norm, 2.0, 0.05)),
    "GradScaler": Line(
        partial(clipping.half, torch.float16), sequences, partial(clipping.momentum_sgd, False),
        partial(clipping.scaled, True), tolerance=1e-5,
    ),
    "accumulation": on("encoder", twins.accumulate),
    "complete checkpoint": whole(save_whole_and_start_anew),
    "evaluation": on("encoder", twins.evaluate_between),
    "recomputed activations": on("recomputed", twins.plain),
    "recomputed activations, reentrant": on("recomputed-reentrant", twins.plain),
    "unused parameters": Line(
        conditional, choices, adamw, twins.plain, ddp_options={"find_unused_parameters": True}, num_steps=10
    ),
    "any optimizer: Adafactor": Line(
        matrices.matrices, matrices.wide_rows, matrices.adafactor, twins.plain,
        config=replace(CONFIG, update="auto"),
    ),
    "any optimizer: Adam": whole(twins.plain, foreach_adam),
    "torch.compile": Line(
        compiled.blocks, partial(rows, 12), adamw, compiled.compiled_blocks, num_steps=10,
        ddp_options={"bucket_cap_mb": 1},
    ),
    "D1: an update applied twice": on("encoder", twins.double_forward),
    "D1: evaluation that trains": on("encoder", evaluate_with_gradients),
    "D2: one step behind": whole(look_at_the_last_step),
    "D3: another order than registered": on("backwards", twins.plain),
    "D3: another order in every step": on("restless", twins.plain),
    "D4: gathers of what was not reduced": Line(
        conditional, choices, momentum_sgd, twins.two_backwards, ddp_options={"find_unused_parameters": True}
    ),
    "D5: several groups": whole(change_settings_by_group),
    "D8: other types": Line(in_bfloat16, whole_batches, momentum_sgd, twins.plain, tolerance=0.0),
    "D8: zero_grad": whole(step_on_zeros),
    "D8: clipping as a setting": on(
        "encoder", clipping.clip_by_setting, config=replace(CONFIG, max_grad_norm=0.05)
    ),
    "D9: group sizes that change": whole(twins.change_fusion),
}  # fmt: skip


def lines() -> list[Any]:
    """Every line for every number of ranks, 3 among them, which is no power of two; all on gloo."""
    return [
        pytest.param(world_size, name, marks=[pytest.mark.slow] if _is_long(world_size, name) else [])
        for world_size in (1, 2, 3, 4)
        for name in MATRIX
    ]


def _is_long(world_size: int, name: str) -> bool:
    return world_size == 4 or (name == "torch.compile" and world_size != 2)


@pytest.mark.quick(
    "2-D*",
    "2-any optimizer: Ada*",
    "2-GradScaler",
    "2-unused parameters",
    "3-D3: another order in every step",
    "1-D8: zero_grad",
)
@pytest.mark.parametrize(("world_size", "name"), lines())
def test_line(workers: WorkerPools, world_size: int, name: str) -> None:
    line = MATRIX[name]
    # Plain DDP's own division is exact for powers of two only, where it adds to an old mean.
    tolerance = max(line.tolerance, 1e-5 if world_size == 3 and line.loop is step_on_zeros else 0.0)
    run = partial(compare, config=line.config, ddp_options=line.ddp_options)
    for outcome in workers(world_size).run(run, line.model, line.batches, line.optimizer, line.loop, line.num_steps):
        assert outcome.parameter_gap <= tolerance and outcome.loss_gap <= max(tolerance, 1e-9), outcome
        assert outcome.loss_drop != 0 and outcome.stats.step > 0


# -- defects that no comparison of results can show -------------------------------------------------------------------


class SlowGradients(torch.autograd.Function):
    """Writes a gradient long after it has promised it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        for _ in range(200):
            gradient = gradient.sin()
        return gradient


def start_of_reductions(rank: int, world_size: int) -> list[str]:
    """D6, on CPUs: what travels is the gradient that backward has finished, never what the bucket held before."""
    config = replace(CONFIG, trace=True, fusion="none", fusion_mb=None)
    ddp = DistributedDataParallel(twins.WholeNumbers(world_size), gradient_as_bucket_view=True, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    state = DearState(ddp, optimizer, config)
    ddp.register_comm_hook(state, dear_hook)
    wrong = []
    for step in range(6):
        optimizer.zero_grad()
        SlowGradients.apply(ddp(*whole_batches(rank, world_size, step))).backward()
        factor = 1.0
        for _ in range(200):
            factor = math.sin(factor)
        with state.reduced_gradients() as shards:
            for shard, piece in zip(shards, state._driver.update.shards, strict=True):
                expected = expected_gradient(piece.range, world_size, step) * torch.tensor(factor)
                assert shard.grad is not None
                if not torch.allclose(shard.grad, expected, atol=1e-5):
                    wrong.append(f"step {step}: {piece.range}")
        optimizer.step()
    state.close()
    return wrong


def expected_gradient(elements: Any, world_size: int, step: int) -> Tensor:
    """The mean over ranks of what ``WholeNumbers`` gives to these elements."""
    shape = twins.WholeNumbers.SHAPES[elements.parameter]
    total = torch.zeros(shape)
    for rank in range(world_size):
        seed = 100 * whole_batches(rank, world_size, step)[0] + elements.parameter
        total += torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)) * float(world_size)
    return (total / world_size).flatten()[elements.start : elements.end]


@pytest.mark.quick("2", "3")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_d6_gradients_are_complete_when_they_travel(workers: WorkerPools, world_size: int) -> None:
    assert workers(world_size).run(start_of_reductions) == [[]] * world_size


def waits_of_a_step(rank: int, world_size: int) -> tuple[int, int]:
    """D7: how often ``optimizer.step()`` waits for a gather, and how many groups are gathered in the forward."""
    config = replace(CONFIG, trace=True, fusion="none", fusion_mb=None)
    ddp = DistributedDataParallel(twins.WholeNumbers(world_size), gradient_as_bucket_view=True, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, config)
    ddp.register_comm_hook(state, dear_hook)
    awaited_in_step = 0
    for step in range(5):
        optimizer.zero_grad()
        ddp(*whole_batches(rank, world_size, step)).backward()
        calls = count_calls(state._driver.pipe, "_await")
        optimizer.step()
        awaited_in_step += calls[0] if step > 1 else 0
        del state._driver.pipe._await
    groups = state.stats().num_groups
    state.close()
    return awaited_in_step, groups


def count_calls(owner: Any, name: str) -> list[int]:
    """Count an object's calls of one method from now on."""
    calls, original = [0], getattr(owner, name)

    def counting(*args: Any) -> Any:
        calls[0] += 1
        return original(*args)

    setattr(owner, name, counting)
    return calls


@pytest.mark.quick("2", "3")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_d7_nothing_waits_group_by_group_before_the_forward(workers: WorkerPools, world_size: int) -> None:
    for awaited, groups in workers(world_size).run(waits_of_a_step):
        assert awaited == 0 and groups > 3


def disagree_about_groups(rank: int, world_size: int) -> str:
    """D9: ranks that would tune apart are told so, all of them, and nothing hangs."""
    ddp = DistributedDataParallel(twins.WholeNumbers(world_size), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, CONFIG)
    ddp.register_comm_hook(state, dear_hook)
    message = message_of(lambda: state.set_fusion("size", mb=0.01 * (1 + rank)))
    ddp(*whole_batches(rank, world_size, 0)).backward()
    optimizer.step()
    state.close()
    return message


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_d9_ranks_do_not_part(workers: WorkerPools, world_size: int) -> None:
    messages = workers(world_size).run(disagree_about_groups)
    assert len(set(messages)) == 1 and "fusion" in messages[0] and "ValueError" in messages[0], messages


def bytes_of_a_step(rank: int, world_size: int) -> tuple[int, int]:
    """D10: bytes that this rank sends per step, and bytes of the model."""
    ddp = DistributedDataParallel(twins.WholeNumbers(world_size), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, CONFIG)
    ddp.register_comm_hook(state, dear_hook)
    for step in range(4):
        optimizer.zero_grad()
        ddp(*whole_batches(rank, world_size, step)).backward()
        optimizer.step()
        state.synchronize()
    state.synchronize()
    traffic = state._driver.lanes.traffic
    optimizer.zero_grad()
    ddp(*whole_batches(rank, world_size, 9)).backward()
    optimizer.step()
    state.synchronize()
    sent = (state._driver.lanes.traffic - traffic).sent_bytes
    state.close()
    return sent, sum(4 * parameter.numel() for parameter in ddp.parameters())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_d10_no_byte_of_padding(workers: WorkerPools, world_size: int) -> None:
    outcomes = workers(world_size).run(bytes_of_a_step)
    model = outcomes[0][1]
    assert sum(sent for sent, _ in outcomes) == 2 * (world_size - 1) * model
