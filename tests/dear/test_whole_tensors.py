"""Optimizers that need whole tensors: replicated updates of them, their checkpoints, and how an update is chosen.

Prevents: optimizers that are shown a part of a tensor, or a part of the model, when they need the whole; and memory
that an optimizer assigns and nobody sees again.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from tests.support.dear import twins
from tests.support.dear.loops import adamw_two_groups, momentum_sgd
from tests.support.dear.matrices import Matrices, adafactor, matrices, wide_rows
from tests.support.dear.saving import differences, save_every_step
from tests.support.dear.twins import CONFIG, Trainee, WholeNumbers, compare, whole_batches
from tests.support.messages import message_of
from tests.support.models import TOLERANCE, adamw
from tests.support.workers import WorkerPools

REPLICATED = replace(CONFIG, update="replicated")


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), lr=0.01)


class Lamb(torch.optim.Optimizer):
    """Trust ratios per tensor, steps counted in the group, and one scale for the whole model."""

    def __init__(self, parameters: Any, lr: float = 0.01, coupled: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0})
        self.coupled = coupled

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 1 / (1 + sum(p.grad.norm() for p in every)) if self.coupled else 1.0
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    update = p.grad / (p.grad.norm() + 1e-6) + 0.01 * p
                    p.sub_(group["lr"] * scale / group["step"] ** 0.5 * p.norm() / (update.norm() + 1e-6) * update)


def coupled_lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), coupled=True)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters())


class Assigning(torch.optim.Optimizer):
    """Gradient descent that gives parameters new memory, or that of its state, or leaves theirs to its state."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 0.125})
        self.kind = kind
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group["lr"])
        if self.fails:
            raise Interruption

    def _update(self, p: torch.nn.Parameter, state: dict[str, Tensor], lr: float) -> None:
        assert p.grad is not None
        if self.kind == "shared":
            state.setdefault("own", p.detach().clone()).sub_(lr * p.grad)
            p.data = state["own"]
            return
        update = lr * p.grad + state.get("before", torch.zeros_like(p)) / 4
        if self.kind == "left":
            state["before"] = p.data
        p.data = p.data - update


class Interruption(Exception):
    """A step fails."""


def _assigning(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    return Assigning(model.parameters(), kind)


def failing_once(twin: Trainee, step: int) -> None:
    """The third step raises, and the loop goes back to where it was."""
    assert isinstance(twin.optimizer, Assigning)
    before = copy.deepcopy(twin.ddp.module.state_dict())
    twin.optimizer.zero_grad()
    twin.loss(step).backward()
    twin.optimizer.fails = step == 2
    try:
        twin.optimizer.step()
    except Interruption:
        twin.ddp.module.load_state_dict(before)


@pytest.mark.quick("sharded-new", "sharded-failing", "deferred-shared", "at-once-*[!d]")
@pytest.mark.parametrize(("kind", "loop"), [
    ("new", twins.plain), ("shared", twins.plain), ("left", twins.plain), ("new", failing_once),
], ids=["new", "shared", "left", "failing"])  # fmt: skip
@pytest.mark.parametrize("config", [
    replace(CONFIG, assume_elementwise=True), replace(REPLICATED, assume_parameterwise=True), REPLICATED,
], ids=["sharded", "deferred", "at-once"])  # fmt: skip
def test_an_optimizer_may_assign_data(
    workers: WorkerPools, config: DearConfig, kind: str, loop: Callable[[Trainee, int], None]
) -> None:
    run = partial(compare, config=config)
    for outcome in workers(2).run(run, WholeNumbers, whole_batches, partial(_assigning, kind), loop, 5):
        assert outcome.bitwise, outcome


@pytest.mark.quick("*-replicated-2", "coupled_lamb-auto-2", "muon-auto-1")
@pytest.mark.parametrize("world_size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
@pytest.mark.parametrize("update", ["replicated", "auto"])
@pytest.mark.parametrize("optimizer", [adafactor, muon, coupled_lamb], ids=lambda f: f.__name__)
def test_whole_tensors(workers: WorkerPools, world_size: int, update: Any, optimizer: Any) -> None:
    run = partial(compare, config=replace(CONFIG, update=update), ddp_options={"bucket_cap_mb": 0.01})
    for outcome in workers(world_size).run(run, matrices, wide_rows, optimizer, twins.plain, 12):
        # Muon orthogonalises in bfloat16, where a difference in the last bit of a sum shows.
        tolerance = 1e-3 if optimizer is muon and world_size == 3 else TOLERANCE
        assert outcome.parameter_gap < tolerance and outcome.num_buckets > 1 and outcome.loss_drop != 0, outcome


def test_steps_that_are_counted_in_groups(workers: WorkerPools) -> None:
    """Vouched for, so updated one by one; yet every step counts once."""
    run = partial(compare, config=replace(REPLICATED, assume_parameterwise=True))
    for outcome in workers(2).run(run, matrices, wide_rows, lamb, twins.plain, 9):
        assert outcome.parameter_gap < TOLERANCE, outcome


# -- checkpoints ------------------------------------------------------------------------------------------------------


def saved_states(rank: int, world_size: int, optimizer: Any) -> list[str]:
    collected: list[Any] = []

    def remember(twin: Trainee, step: int) -> None:
        save_every_step(twin, step)
        if twin.state is not None and step == 3:
            twin.state.consolidate()
            assert differences(twin.optimizer.state_dict(), twin.memory["saved"][-1]) == []
        if step == 4:
            collected.append(twin.memory["saved"])

    outcome = compare(rank, world_size, WholeNumbers, whole_batches, optimizer, remember, 5, config=REPLICATED)
    assert outcome.bitwise
    return differences(*collected)


@pytest.mark.parametrize("optimizer", [momentum_sgd, adamw_two_groups, adafactor], ids=lambda f: f.__name__)
def test_states_are_those_of_plain_ddp(workers: WorkerPools, optimizer: Any) -> None:
    for found in workers(2).run(saved_states, optimizer):
        assert found == []


def resume(rank: int, world_size: int, optimizer_of: Any, folder: str, sharded: bool) -> float:
    """Six steps at a stretch against three, a checkpoint, and three in a new model."""

    def train(first: int, last: int, save: bool, load: bool) -> list[Tensor]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Matrices().double(), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
        optimizer = optimizer_of(ddp)
        state = DearState(ddp, optimizer, REPLICATED)
        ddp.register_comm_hook(state, dear_hook)
        if load and sharded:
            content = {"model": ddp.module.state_dict()}
            dcp.load(content, checkpoint_id=folder)
            ddp.module.load_state_dict(content["model"])
            state.load_sharded_optimizer(folder)
        elif load:
            model, saved = torch.load(f"{folder}-{rank}", weights_only=True)
            ddp.module.load_state_dict(model)
            optimizer.load_state_dict(saved)
        for step in range(first, last):
            optimizer.zero_grad()
            ddp(*wide_rows(rank, world_size, step)).backward()
            optimizer.step()
        if save and sharded:
            content = {"model": ddp.module.state_dict(), "optimizer": state.sharded_optimizer_state_dict()}
            dcp.save(content, checkpoint_id=folder)
        elif save:
            torch.save((ddp.module.state_dict(), state.full_optimizer_state_dict()), f"{folder}-{rank}")
        state.close()
        return [p.detach().clone() for p in ddp.parameters()]

    whole = train(0, 6, False, False)
    train(0, 3, True, False)
    resumed = train(3, 6, False, True)
    return max(float((a - b).abs().max()) for a, b in zip(whole, resumed, strict=True))


@pytest.mark.quick("adamw-sharded", "muon-full", "adafactor-full")
@pytest.mark.parametrize("sharded", [False, True], ids=["full", "sharded"])
@pytest.mark.parametrize("optimizer", [adafactor, muon, adamw], ids=lambda f: f.__name__)
def test_resume(workers: WorkerPools, optimizer: Any, sharded: bool, tmp_path: Path) -> None:
    assert workers(2).run(resume, optimizer, str(tmp_path / "saved"), sharded) == [0.0, 0.0]


# -- choosing ---------------------------------------------------------------------------------------------------------


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


def choose(
    rank: int, world_size: int, optimizer: Any, config: DearConfig, saved_by_loop: bool = False
) -> tuple[str, str]:
    ddp = DistributedDataParallel(Matrices(), gradient_as_bucket_view=True)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("ddp_hooks")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    states: list[DearState] = []
    try:
        message = message_of(lambda: states.append(DearState(ddp, optimizer(ddp), config, saved_by_loop=saved_by_loop)))
    finally:
        logger.removeHandler(handler)
    kind = type(states[0]._driver.update).__name__ if states else message
    if states:
        states[0].close()
    return kind, stream.getvalue()


@pytest.mark.parametrize(
    ("optimizer", "update", "expected"),
    [
        (adafactor, "sharded", 'DearConfig(update="replicated")'),
        (lamb, "sharded", 'DearConfig(update="replicated")'),
        (adafactor, "auto", "ReplicatedUpdate"),
        (momentum_sgd, "auto", "ShardedUpdate"),
        (momentum_sgd, "replicated", "ReplicatedUpdate"),
        (lbfgs, "replicated", "LBFGS"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_choices(workers: WorkerPools, optimizer: Any, update: Any, expected: str) -> None:
    outcomes = workers(2).run(choose, optimizer, replace(CONFIG, update=update))
    assert all(expected in kind for kind, _ in outcomes), outcomes
    said = ["updates are replicated" in log for _, log in outcomes]
    assert said == ([True, False] if (optimizer, update) == (adafactor, "auto") else [False, False]), "say it once"


def test_consolidate_is_announced(workers: WorkerPools) -> None:
    """Or users learn at the first checkpoint, which one rank saves alone, that all ranks must take part."""
    said = [log.count("state.consolidate() on all ranks") for _, log in workers(2).run(choose, momentum_sgd, CONFIG)]
    assert said == [1, 0], "say it once"
    for config, saved_by_loop in ((CONFIG, True), (replace(CONFIG, update="replicated"), False)):
        outcomes = workers(2).run(choose, momentum_sgd, config, saved_by_loop)
        assert not any("consolidate" in log for _, log in outcomes), "nobody has to call it"


def test_update_must_be_one_of_three() -> None:
    with pytest.raises(ValueError, match="update must be one of"):
        DearConfig(update="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lanes must be None, or a whole number >= 1, got 'two'"):
        DearConfig(lanes="two")  # type: ignore[arg-type]
