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
from ddp_hooks.comm.executors.lanes import ThreadLane
from tests.support.dear.compiled import BACKEND, Blocks, blocks, compiled_blocks, count_compilations, plain
from tests.support.dear.twins import CONFIG, Trainee, compare
from tests.support.messages import message_of
from tests.support.models import MODELS, TOLERANCE, rows
from tests.support.workers import WorkerPools

SMALL = replace(CONFIG, atom_mb=0.0005, fusion="none", fusion_mb=None)


def compiled_before(world_size: int) -> nn.Module:
    model: nn.Module = torch.compile(Blocks().double(), backend=BACKEND)  # type: ignore[assignment]
    return model


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


CASES: dict[str, tuple[Callable[[int], nn.Module], Callable[[Trainee, int], None]]] = {
    "blocks": (blocks, compiled_blocks),
    "before wrapping": (compiled_before, plain),
    "gradients kept": (compiled_before, zero_grad_late),
    "after wrapping": (blocks, compiled_after),
}


SLOW = pytest.mark.slow  # compiling takes its time


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_compiled_models(workers: WorkerPools, world_size: int, case: str) -> None:
    model, loop = CASES[case]
    run = partial(compare, ddp_options={"bucket_cap_mb": 1})
    for outcome in workers(world_size).run(run, model, partial(rows, 12), MODELS["encoder"][2], loop, 10):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome
        assert outcome.loss_drop > 0
        assert outcome.stats.forward_stall_s >= 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case == "after wrapping" else pytest.param(case, marks=SLOW) for case in CASES]
)
def test_updates_that_happen_between_graphs(workers: WorkerPools, case: str) -> None:
    """Replicated updates change parameters in the middle of a forward."""
    model, loop = CASES[case]
    config = replace(CONFIG, update="replicated")
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
    ddp, optimizer, state = wrap(model)
    other = DistributedDataParallel(twin, gradient_as_bucket_view=True)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(6):
        train(ddp, optimizer, 1, values)
        train(other, others, 1, values)
    state.synchronize()
    gap = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    state.close()
    return gap


@pytest.mark.slow
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


def compile_somehow(how: str, model: Any, when: str) -> Any:
    """Compile a model, or parts of it, in one of many ways; called before and after it is wrapped and hooked."""
    options: dict[str, Any] = {"backend": BACKEND, "fullgraph": True}
    blocks = list(model.blocks) if isinstance(model, Blocks) else []
    if (how, when) in (("blocks", "before"), ("blocks, later", "after")):
        for block in blocks:
            block.compile(**options)
    elif (how, when) == ("wrapped blocks", "before"):
        for index, block in enumerate(blocks):
            model.blocks[index] = torch.compile(block, **options)
    elif (how, when) == ("forwards of blocks", "before"):
        for block in blocks:
            block.forward = torch.compile(block.forward, **options)
    elif (how, when) == ("in place", "before"):
        model.compile(backend=BACKEND)
    elif (how, when) == ("before wrapping", "before"):
        return torch.compile(model, **options)
    return model


def wrap(
    model: nn.Module, config: DearConfig | None = None, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DearState]:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, config or SMALL)
    ddp.register_comm_hook(state, dear_hook)
    return ddp, optimizer, state


def train(forward: Any, optimizer: torch.optim.Optimizer, steps: int, values: Tensor | None = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        forward(torch.randn(5, 12) if values is None else values).backward()
        optimizer.step()


HOW = ("blocks", "blocks, later", "wrapped blocks", "forwards of blocks", "in place", "before wrapping")


def graphs_made(rank: int, world_size: int, how: str, kind: str, update: Any) -> tuple[list[int], float]:
    """Graphs, and breaks, that six steps make without and with DeAR; and how far the parameters are apart."""
    values = torch.randn(5, 12, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    made: list[int] = []
    ends: list[Tensor] = []
    counters = torch._dynamo.utils.counters
    for with_dear in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(3)
        original = {"blocks": Blocks, "shared": Shared}[kind]().double()
        ddp = DistributedDataParallel(compile_somehow(how, original, "before"), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        state = DearState(ddp, optimizer, replace(CONFIG, update=update, atom_mb=0.0005)) if with_dear else None
        if state is not None:
            ddp.register_comm_hook(state, dear_hook)
        compile_somehow(how, original, "after")
        forward: Any = torch.compile(ddp, backend=BACKEND) if how == "after wrapping" else ddp
        train(forward, optimizer, 6, values)
        made.append(counters["stats"]["unique_graphs"])
        breaks = sum(counters["graph_break"].values())
        assert breaks == 0 or how == "after wrapping", counters["graph_break"]
        ends.append(torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]))
        if state is not None:
            state.close()
    return made, float((ends[0] - ends[1]).abs().max())


@pytest.mark.quick("after wrapping-sharded-shared")
@pytest.mark.parametrize("kind", ["blocks", "shared"])
@pytest.mark.parametrize(
    ("how", "update"),
    [
        ("after wrapping", "sharded"),
        ("before wrapping", "replicated"),
        *(pytest.param(how, "sharded", marks=SLOW) for how in HOW),
        pytest.param("blocks", "replicated", marks=SLOW),
    ],
)
def test_as_many_graphs_as_without(workers: WorkerPools, how: str, update: str, kind: str) -> None:
    """A compiled module waits once, before its guards look: no graph is cut or made anew."""
    if kind == "shared" and "block" in how:
        pytest.skip("it has no blocks")
    for (theirs, ours), gap in workers(2).run(graphs_made, how, kind, update):
        assert ours == theirs > 0 and gap < TOLERANCE


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
    ddp, optimizer, state = wrap(model, find_unused_parameters=True)
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


@pytest.mark.slow
@pytest.mark.parametrize("how", ["part", pytest.param("whole", marks=SLOW)])
def test_another_way_through_compiled_code(workers: WorkerPools, how: str) -> None:
    assert max(workers(2).run(take_another_way, how)) < 1e-6


def compile_the_step(rank: int, world_size: int) -> str:
    ddp, optimizer, state = wrap(Blocks())
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


def choose(rank: int, world_size: int, compiled: bool) -> bool:
    ddp, optimizer, state = wrap(Choosing())
    train(torch.compile(ddp, backend=BACKEND) if compiled else ddp, optimizer, 4)
    state.close()
    return True


def test_operators_that_take_functions(workers: WorkerPools) -> None:
    run = workers(2).run
    assert run(choose, False) == run(choose, True) == [True, True]


class Scripted(nn.Module):
    """A block between two others whose code runs in TorchScript's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 12))
        self.layers = nn.Sequential(nn.Linear(12, 12), torch.jit.script(block), nn.Linear(12, 3))

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layers(values)
        return output.square().mean()


def train_scripted(rank: int, world_size: int, update: Any) -> float:
    """How far the parameters are from plain DDP's after six steps; a scripted module cannot be copied."""
    ends = []
    for with_dear in (True, False):
        torch.manual_seed(3)
        model = Scripted()
        if with_dear:
            forward, optimizer, state = wrap(model, replace(CONFIG, update=update))
        else:
            forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(forward.parameters(), lr=0.1)
        train(forward, optimizer, 6, torch.randn(5, 12, generator=torch.Generator().manual_seed(rank)))
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        if with_dear:
            state.close()
    return float((ends[0] - ends[1]).abs().max())


@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_scripted_blocks(workers: WorkerPools, update: str) -> None:
    assert max(workers(2).run(train_scripted, update)) < 1e-6  # its interpreter changes kernels as it learns
