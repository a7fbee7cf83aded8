"""torch.compile: the whole module or blocks of it, before or after wrapping; correct, and not compiled anew each step.

Prevents: pre-hooks that a compiled graph skips, so that a layer reads parameters that are still under way, and
recompilation in every step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from ddp_hooks.comm.lanes import ThreadLane
from tests.dear.test_models import MODELS, TOLERANCE, Restless, rows, rows_in_any_order
from tests.dear.test_refusals import message_of
from tests.dear.twins import CONFIG, Trainee, compare
from tests.workers import WorkerPools

BACKEND = "aot_eager"  # the machinery of torch.compile without a C++ compiler


class Blocks(nn.Module):
    """Some blocks that may be compiled one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 12)) for _ in range(4)
        )

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = values + block(values)
        return values.square().mean()


def blocks(world_size: int) -> nn.Module:
    return Blocks().double()


def compiled_before(world_size: int) -> nn.Module:
    model: nn.Module = torch.compile(Blocks().double(), backend=BACKEND)  # type: ignore[assignment]
    return model


def compiled_blocks(twin: Trainee, step: int) -> None:
    """Blocks are compiled here, because a copy of a compiled module is not compiled."""
    if step == 0:
        for block in twin.ddp.module.blocks:
            block.compile(backend=BACKEND)
    plain(twin, step)


def plain(twin: Trainee, step: int) -> None:
    count_compilations(twin, step)
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    twin.optimizer.step()


def compiled_after(twin: Trainee, step: int) -> None:
    """``torch.compile(ddp)``, as Accelerate and Trainer do it."""
    count_compilations(twin, step)
    if step == 0:
        twin.memory["compiled"] = torch.compile(twin.ddp, backend=BACKEND)
    twin.optimizer.zero_grad()
    loss = twin.memory["compiled"](*twin.batch(step))
    twin.losses.append(float(loss.detach()))
    loss.backward()
    twin.optimizer.step()


def zero_grad_late(twin: Trainee, step: int) -> None:
    """The compiler meets parameters whose gradients are guarded, and describes them."""
    loss = twin.loss(step)
    twin.optimizer.zero_grad()
    loss.backward()
    twin.optimizer.step()


def count_compilations(twin: Trainee, step: int) -> None:
    """After the first steps, in which shapes and orders are learned, nothing may be compiled anew."""
    if step == 0 and twin.state is not None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    if step == 4:
        assert torch._dynamo.utils.counters["frames"]["ok"] > 0, "nothing was compiled"
        twin.memory["frames"] = torch._dynamo.utils.counters["frames"]["total"]
    if step == 9:
        assert torch._dynamo.utils.counters["frames"]["total"] == twin.memory["frames"], "compiled anew in every step"


CASES: dict[str, tuple[Callable[[int], nn.Module], Callable[[Trainee, int], None]]] = {
    "blocks": (blocks, compiled_blocks),
    "before wrapping": (compiled_before, plain),
    "gradients kept": (compiled_before, zero_grad_late),
    "after wrapping": (blocks, compiled_after),
}


SLOW = pytest.mark.slow  # compiling takes its time


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("case", CASES)
def test_compiled_models(workers: WorkerPools, world_size: int, case: str) -> None:
    model, loop = CASES[case]
    run = partial(compare, ddp_options={"bucket_cap_mb": 1})
    for outcome in workers(world_size).run(run, model, partial(rows, 12), MODELS["encoder"][2], loop, 10):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome
        assert outcome.loss_drop > 0
        assert outcome.stats.forward_stall_s >= 0


@pytest.mark.parametrize(
    "case", [case if case == "after wrapping" else pytest.param(case, marks=SLOW) for case in CASES]
)
def test_updates_that_happen_between_graphs(workers: WorkerPools, case: str) -> None:
    """Replicated updates change parameters in the middle of a forward."""
    model, loop = CASES[case]
    config = replace(CONFIG, update="replicated", early_gathers=0.6)
    run = partial(compare, ddp_options={"bucket_cap_mb": 1}, config=config)
    for outcome in workers(2).run(run, model, partial(rows, 12), MODELS["encoder"][2], loop, 10):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


def graphs_from_before(rank: int, world_size: int) -> float:
    """The model was compiled and used before it got any hooks, as after an evaluation of what was loaded."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    model: Any = torch.compile(Blocks(), backend=BACKEND)
    twin = copy.deepcopy(model._orig_mod)
    values = torch.randn(5, 12)
    model(values).backward()
    model.zero_grad()
    ddp, optimizer, state = wrap(model, 0)
    other = DistributedDataParallel(twin, gradient_as_bucket_view=True)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(6):
        train(ddp, optimizer, 1, values)
        train(other, others, 1, values)
    state.synchronize()
    gap = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    state.close()
    return gap


def test_hooks_that_come_later(workers: WorkerPools) -> None:
    assert max(workers(2).run(graphs_from_before)) < 1e-5


# -- where compiled code waits ----------------------------------------------------------------------------------------


class Shared(nn.Module):
    """Blocks that share a layer, and read another one's weight as a function."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(12, 12) for _ in range(3)]
        self.first = nn.Sequential(layers[0], layers[2])
        self.second = nn.Sequential(layers[1], nn.Tanh(), layers[2])
        self.late = nn.Linear(12, 12)

    def forward(self, values: Tensor) -> Tensor:
        values = self.second(values)
        values = nn.functional.linear(values, self.late.weight) + self.first(values)
        output: Tensor = self.late(values)
        return output.square().mean()


def shared_whole(world_size: int) -> nn.Module:
    model: nn.Module = torch.compile(Shared().double(), backend=BACKEND)  # type: ignore[assignment]
    return model


def shared(world_size: int) -> nn.Module:
    return Shared().double()


def compiled_parts(twin: Trainee, step: int) -> None:
    if step == 0:
        model: Any = twin.ddp.module
        model.first.compile(backend=BACKEND)
        model.second.forward = torch.compile(model.second.forward, backend=BACKEND)
    plain(twin, step)


@pytest.mark.parametrize(("model", "loop"), [(shared_whole, plain), (shared, compiled_parts)], ids=["whole", "parts"])
@pytest.mark.parametrize("graph_bytes", [2000, *(pytest.param(size, marks=SLOW) for size in (0, 1 << 20))])
def test_shared_layers(workers: WorkerPools, model: Any, loop: Any, graph_bytes: int) -> None:
    run = partial(compare, ddp_options={"bucket_cap_mb": 1}, config=replace(CONFIG, atom_mb=0.0005, fusion="none"))
    loop = partial(with_graphs_of, graph_bytes, loop)
    for outcome in workers(2).run(run, model, partial(rows, 12), MODELS["encoder"][2], loop, 8):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


def with_graphs_of(graph_bytes: int, loop: Callable[[Trainee, int], None], twin: Trainee, step: int) -> None:
    """DDP compiles nothing with buckets below 1 MB, so small models need another bound."""
    if twin.state is not None:
        twin.state._pipe._graph_bytes = graph_bytes
    loop(twin, step)


def wrap(
    model: nn.Module, graph_bytes: int, config: DearConfig | None = None, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DearState]:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, config or replace(CONFIG, atom_mb=0.0005, fusion="none"))
    state._pipe._graph_bytes = graph_bytes
    ddp.register_comm_hook(state, dear_hook)
    return ddp, optimizer, state


def compile_somehow(how: str, graph_bytes: int) -> tuple[Any, torch.optim.Optimizer, DearState]:
    """The blocks wrapped and compiled in one of three ways: what to call, the optimizer and the state."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = Blocks()
    if how == "blocks":
        for block in model.blocks:
            block.compile(backend=BACKEND)
    elif how == "before wrapping":
        model = torch.compile(model, backend=BACKEND)
    ddp, optimizer, state = wrap(model, graph_bytes)
    if how == "after some steps":
        train(ddp, optimizer, 3)
    return torch.compile(ddp, backend=BACKEND) if how.startswith("after") else ddp, optimizer, state


def train(forward: Any, optimizer: torch.optim.Optimizer, steps: int, values: Tensor | None = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        forward(torch.randn(5, 12) if values is None else values).backward()
        optimizer.step()


def waits_of_a_forward(rank: int, world_size: int, how: str, graph_bytes: int) -> list[str]:
    """The modules that run their pre-hooks in a forward, once everything has been compiled."""
    forward, optimizer, state = compile_somehow(how, graph_bytes)
    train(forward, optimizer, 4)
    entered: list[str] = []
    enter = state._pipe.enter

    def noting(module: int) -> None:
        entered.append(state._pipe._paths[module].removeprefix("_orig_mod").lstrip("."))
        enter(module)

    state._pipe.enter = noting  # type: ignore[method-assign]
    train(forward, optimizer, 1)
    state.close()
    return entered


EVERYWHERE = ["", *(f"blocks.{i}{part}" for i in range(4) for part in ("", ".0", ".2", ".3"))]


@pytest.mark.parametrize(
    "how",
    ["after wrapping", *(pytest.param(how, marks=SLOW) for how in ("blocks", "before wrapping", "after some steps"))],
)
def test_compiled_code_waits_as_often_as_ddp_cuts(workers: WorkerPools, how: str) -> None:
    run = workers(2).run
    whole = ["", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
    for entered in run(waits_of_a_forward, how, 1 << 20):  # larger than the model
        assert entered == (whole if how == "blocks" else [""])
    for entered in run(waits_of_a_forward, how, 8000):  # larger than a block, smaller than the model
        assert entered == whole
    for entered in run(waits_of_a_forward, how, 0):
        assert entered == EVERYWHERE  # but for the activation, which has nothing to wait for


def call_past_the_one_that_waits(rank: int, world_size: int) -> tuple[bool, bool]:
    """A layer inside of a compiled block is compiled and called by itself, while its parameters are on their way."""
    forward, optimizer, state = compile_somehow("before wrapping", 1 << 20)
    train(forward, optimizer, 4)
    layer = forward.module.blocks[2][0]
    alone = torch.compile(layer, backend=BACKEND)
    values = torch.randn(5, 12)
    right = []
    for _ in range(3):
        with torch.no_grad():
            state.synchronize()
            alone(values)  # compiled while everything is there
        train(forward, optimizer, 1)
        pipe = state._pipe
        groups = pipe._groups_of_module[pipe._paths.index("_orig_mod.blocks.2.0")]
        was_awaited = [pipe._works[group] is None for group in groups]
        output = alone(values).detach()
        is_awaited = [pipe._works[group] is None for group in groups]
        state.synchronize()
        expected = nn.functional.linear(values, layer.weight, layer.bias)
        right.append(not any(was_awaited) and all(is_awaited) and torch.equal(output, expected))
    state.close()
    return all(right), bool(state._pipe._stand_ins)


def test_a_graph_that_is_entered_elsewhere_waits(workers: WorkerPools) -> None:
    assert workers(2).run(call_past_the_one_that_waits) == [(True, True)] * 2


def compile_without_breaks(rank: int, world_size: int) -> str:
    ddp, optimizer, state = wrap(torch.compile(Blocks(), backend=BACKEND, fullgraph=True), 8000)  # type: ignore[arg-type]
    message = message_of(lambda: train(ddp, optimizer, 3))
    state.close()
    return message


def test_one_graph_is_refused(workers: WorkerPools) -> None:
    for message in workers(2).run(compile_without_breaks):
        assert "compile with fullgraph=False" in message, message


def change_order(rank: int, world_size: int) -> tuple[float, int, bool]:
    """Compiled layers in an order that changes from step to step, against the same model without hooks."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = Restless().double()
    for layer in model.layers:
        layer.compile(backend=BACKEND)
    twin = copy.deepcopy(model)
    ddp, optimizer, state = wrap(model, 1 << 20)
    other = DistributedDataParallel(twin, gradient_as_bucket_view=True)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(9):
        for each, its in ((ddp, optimizer), (other, others)):
            its.zero_grad()
            each(*rows_in_any_order(rank, world_size, step)).backward()
            its.step()
    state.synchronize()
    gap = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    state.close()
    return gap, state._pipe._num_traces, bool(state._pipe._stand_ins)


def test_orders_that_change(workers: WorkerPools) -> None:
    for gap, traces, _ in workers(2).run(change_order):
        assert gap < TOLERANCE and traces > 1


class Part(nn.Module):
    """Takes another way now and then, on which it reads the weight of a layer that comes later."""

    def __init__(self, late: nn.Linear) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.elsewhere = [late]

    def forward(self, values: Tensor, second_way: bool) -> Tensor:
        if not second_way:
            values = self.first(values)
        values = self.second(values)
        if second_way:
            values = nn.functional.linear(values, self.elsewhere[0].weight)
        return values


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        late = nn.Linear(12, 12)
        self.part = Part(late)
        self.middle = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.late = late

    def forward(self, values: Tensor, second_way: bool) -> Tensor:
        values = self.part(values, second_way)
        for layer in self.middle:
            values = layer(values)
        output: Tensor = self.late(values)
        return output.square().mean()


def take_another_way(rank: int, world_size: int, how: str) -> float:
    """Gathers are slow, so that reading too early shows; the twin is compiled by nobody."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    model: Any = TwoWays()
    twin = copy.deepcopy(model)
    if how == "part":
        model.part.compile(backend=BACKEND)
    ddp, optimizer, state = wrap(model, 1 << 20 if how == "part" else 1500, find_unused_parameters=True)
    forward = torch.compile(ddp, backend=BACKEND) if how == "whole" else ddp
    other = DistributedDataParallel(twin, gradient_as_bucket_view=True, find_unused_parameters=True)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    gaps = []
    run_slices = ThreadLane._run_slices

    def slowly(lane: ThreadLane, submission: Any) -> None:
        if submission.work.label.startswith("all-gather"):
            time.sleep(0.004)
        run_slices(lane, submission)

    with mock.patch.object(ThreadLane, "_run_slices", slowly):
        for step in range(15):
            values = torch.randn(5, 12, generator=torch.Generator().manual_seed(step + 100 * rank))
            losses = []
            for call, its in ((forward, optimizer), (other, others)):
                its.zero_grad()
                loss = call(values, step % 3 == 2)
                loss.backward()
                its.step()
                losses.append(float(loss.detach()))
            gaps.append(abs(losses[0] - losses[1]))
        state.synchronize()
    state.close()
    return max(gaps)


@pytest.mark.parametrize("how", ["part", "whole"])
def test_another_way_through_compiled_code(workers: WorkerPools, how: str) -> None:
    assert max(workers(2).run(take_another_way, how)) < 1e-6


def interrupt_a_traced_forward(rank: int, world_size: int) -> bool:
    """KeyboardInterrupt reaches no forward hook; what the trace has switched must not stay."""
    model = Blocks()
    for block in model.blocks:
        block.compile(backend=BACKEND)
    ddp, _, state = wrap(model, 1 << 20)
    before = torch._dynamo.eval_frame._stance.stance, torch._C._len_torch_function_stack()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.blocks[2].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        ddp(torch.randn(2, 12))
    handle.remove()
    ddp(torch.randn(2, 12))
    restored = (torch._dynamo.eval_frame._stance.stance, torch._C._len_torch_function_stack()) == before
    state.close()
    return restored


def test_an_interrupted_trace_ends(workers: WorkerPools) -> None:
    assert workers(2).run(interrupt_a_traced_forward) == [True, True]


def compile_the_step(rank: int, world_size: int) -> str:
    ddp, optimizer, state = wrap(Blocks(), 1 << 20)
    train(ddp, optimizer, 2)
    ddp(torch.randn(5, 12)).backward()
    message = message_of(torch.compile(lambda: optimizer.step(), backend=BACKEND))
    optimizer.step()
    state.close()
    return message


def test_a_compiled_step_is_refused(workers: WorkerPools) -> None:
    for message in workers(2).run(compile_the_step):
        assert "optimizer.step() was called from compiled code" in message, message


class Choosing(nn.Module):
    """An operator that takes functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, values: Tensor) -> Tensor:
        values = self.layer(values)
        values = torch.cond(values.sum() > 0, torch.sin, torch.cos, (values,))
        return values.square().mean()


def choose(rank: int, world_size: int, compiled: bool, overlap_forward: bool) -> str:
    ddp, optimizer, state = wrap(Choosing(), 1 << 20, DearConfig(overlap_forward=overlap_forward))
    forward: Any = torch.compile(ddp, backend=BACKEND) if compiled else ddp
    try:
        train(forward, optimizer, 4)
    except TypeError as error:
        return "\n".join(getattr(error, "__notes__", ["Python 3.10 has no notes"]))
    finally:
        state.close()
    return "fine"


def test_operators_that_take_functions(workers: WorkerPools) -> None:
    run = workers(2).run
    assert run(choose, False, True) == run(choose, True, False) == ["fine", "fine"]
    assert all("without compiled graphs" in notes or "3.10" in notes for notes in run(choose, True, True))
