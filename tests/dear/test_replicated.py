"""Replicated updates: gradients are gathered, and every rank updates whole parameters, just before they are read.

Prevents: updates with settings of another step, before the gradient is whole, twice, or not at all; and optimizers
that are shown a part of a tensor, or a part of the model, when they need the whole.
"""

from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import BucketTuner, DearConfig, DearState, dear_hook
from ddp_hooks.comm import LinkProfile, Recorder
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.dear import sizing
from ddp_hooks.intercept import around_step
from ddp_hooks.overlap.waiting import Waiting
from tests.support.dear import clipping, twins
from tests.support.dear.loops import LOOPS, NUM_STEPS, adamw_two_groups, momentum_sgd
from tests.support.dear.matrices import Matrices, adafactor, matrices, wide_rows
from tests.support.dear.saving import differences, save_every_step
from tests.support.dear.twins import CONFIG, Trainee, WholeNumbers, compare, whole_batches
from tests.support.messages import message_of
from tests.support.models import MODELS, TOLERANCE, adamw, choices, conditional, sequences, settings
from tests.support.workers import WorkerPools

REPLICATED = replace(CONFIG, update="replicated")


@pytest.mark.quick("*-2", "adamw_two_groups-3")
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", [momentum_sgd, adamw_two_groups])
def test_many_steps(workers: WorkerPools, world_size: int, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    run = partial(compare, config=REPLICATED)
    for outcome in workers(world_size).run(run, WholeNumbers, whole_batches, optimizer, twins.plain, 12):
        assert outcome.bitwise and outcome.num_buckets > 1 and outcome.stats.step == 12, outcome
        assert outcome.order_known == (world_size > 1), "one rank has nothing to wait for"


@pytest.mark.quick(*(f"{loop}-plain" for loop in (
    "accumulate_then_discard", "change_fusion", "closure", "evaluate_before_step", "idle_forwards", "never_zero_grad",
    "replaced_gradients", "save_and_load", "skipped_by_model", "skipped_step", "two_backwards_then_discard_first",
    "zero_grad_after_forward", "zero_grad_before_step",
)))  # fmt: skip
@pytest.mark.parametrize("find_unused", [False, True], ids=["plain", "find-unused"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(workers: WorkerPools, loop: Callable[[Trainee, int], None], find_unused: bool) -> None:
    run = partial(compare, config=REPLICATED, ddp_options={"find_unused_parameters": find_unused})
    for outcome in workers(2).run(run, WholeNumbers, whole_batches, adamw_two_groups, loop, NUM_STEPS):
        assert outcome.bitwise, outcome


def while_a_thread_reads(twin: Trainee, step: int) -> None:
    """As a logger does: whoever reads first runs the updates."""
    ended, errors = threading.Event(), list[Exception]()

    def read() -> None:
        try:
            while not ended.is_set():
                for parameter in twin.ddp.parameters():
                    assert torch.isfinite(parameter.detach().sum())
        except Exception as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for each in range(4 * step, 4 * step + 4):
            twins.plain(twin, each)
    finally:
        ended.set()
        reader.join()
    assert not errors, errors


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_thread_may_read(workers: WorkerPools, world_size: int) -> None:
    run = partial(compare, config=REPLICATED)
    for outcome in workers(world_size).run(run, WholeNumbers, whole_batches, adamw_two_groups, while_a_thread_reads, 5):
        assert outcome.bitwise, outcome


@pytest.mark.quick("rounded", "inspected", "three-lanes")
@pytest.mark.parametrize("config", [
    replace(REPLICATED, overlap_forward=False),
    replace(REPLICATED, check_replicas=True),
    replace(REPLICATED, wire="bf16"),
    replace(REPLICATED, max_grad_norm=1e9, on_nonfinite="raise"),
    replace(REPLICATED, lanes=3),
    DearConfig(update="replicated"),
], ids=["no-overlap", "checked", "rounded", "inspected", "three-lanes", "defaults"])  # fmt: skip
def test_settings_change_nothing(workers: WorkerPools, config: DearConfig) -> None:
    for outcome in workers(3).run(compare, WholeNumbers, whole_batches, adamw_two_groups, twins.plain, 6, config):
        assert outcome.bitwise, outcome


def test_schedulers_come_too_late(workers: WorkerPools) -> None:
    """The scheduler changes the learning rate after step() and before the update: the update must not see it."""
    run = partial(compare, config=REPLICATED)
    for outcome in workers(2).run(run, WholeNumbers, whole_batches, adamw_two_groups, twins.scheduled, 12):
        assert outcome.bitwise, outcome


# -- optimizers that need whole tensors -------------------------------------------------------------------------------


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


@pytest.mark.quick(
    "plain-recomputed-reentrant",
    "plain-frozen",
    "evaluate_on_one_rank-restless",
    "save_and_load-encoder",
)
@pytest.mark.parametrize("name", [
    "encoder", "backwards", "restless", "recomputed-reentrant", "frozen",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt2", "resnet")),
])  # fmt: skip
@pytest.mark.parametrize(
    "loop", [twins.plain, twins.evaluate_on_one_rank, twins.save_and_load], ids=lambda loop: loop.__name__
)
def test_models(workers: WorkerPools, name: str, loop: Any) -> None:
    model, batches, optimizer = MODELS[name]
    config = replace(settings(name).keywords["config"], update="replicated")
    run = partial(settings(name), config=config)
    for outcome in workers(2).run(run, model, batches, optimizer, loop, 8):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


@pytest.mark.quick("2-*", "3-two_backwards")
@pytest.mark.parametrize(
    "loop",
    [twins.plain, twins.zero_grad_to_zeros, twins.two_backwards, twins.accumulate_on_zeros],
    ids=lambda loop: loop.__name__,
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unused_parameters(workers: WorkerPools, world_size: int, loop: Any) -> None:
    run = partial(compare, config=REPLICATED, ddp_options={"find_unused_parameters": True})
    for outcome in workers(world_size).run(run, conditional, choices, adamw, loop, 10):
        assert outcome.parameter_gap < TOLERANCE and outcome.loss_gap < TOLERANCE, outcome


@pytest.mark.quick("accumulating")
@pytest.mark.parametrize("loop", [
    partial(clipping.clip_norm, 2.0, 0.05), clipping.clip_then_think_again,
    clipping.clip_while_accumulating, clipping.clip_value,
], ids=["norm", "think-again", "accumulating", "value"])  # fmt: skip
def test_clipping_comes_before_the_gather(workers: WorkerPools, loop: Any) -> None:
    clipping.check(workers, 3, "encoder", loop, update="replicated")


def clip_after_the_step(twin: Trainee, step: int) -> None:
    twins.plain(twin, step)
    if twin.state is not None:
        twin.state.clip_grad_norm_(1e-3)
    else:
        nn.utils.clip_grad_norm_(twin.ddp.parameters(), 1e-3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_may_be_changed_after_the_step(workers: WorkerPools, world_size: int) -> None:
    """Pending updates need them as they were."""
    clipping.check(workers, world_size, "encoder", clip_after_the_step, update="replicated")


@pytest.mark.parametrize("world_size", [1, 2])
def test_bad_steps_are_skipped(workers: WorkerPools, world_size: int) -> None:
    loop = clipping.spoilt_on_one_rank
    clipping.check(workers, world_size, "encoder", loop, on_nonfinite="skip", update="replicated")


def test_grad_scaler(workers: WorkerPools) -> None:
    model, optimizer = partial(clipping.half, torch.float16), partial(clipping.momentum_sgd, False)
    run, loop = partial(compare, config=REPLICATED), partial(clipping.scaled, True)
    for outcome in workers(2).run(run, model, sequences, optimizer, loop, 9):
        assert outcome.parameter_gap < 1e-5 and outcome.loss_gap < 1e-5, outcome


# -- when it happens --------------------------------------------------------------------------------------------------


def wrapped(update: Any = "replicated", **changes: Any) -> tuple[DistributedDataParallel, Any, DearState]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Matrices(), bucket_cap_mb=0.005, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    config = replace(CONFIG, **{"update": update, "atom_mb": 0.002, "fusion": "none", "fusion_mb": None, **changes})
    state = DearState(ddp, optimizer, config)
    ddp.register_comm_hook(state, dear_hook)
    return ddp, optimizer, state


def follow_updates(rank: int, world_size: int) -> tuple[int, list[int], bool]:
    """How many layers are updated right after step(), how many as each begins, and what synchronize() does."""
    ddp, optimizer, state = wrapped()
    layers = list(ddp.module.layers)

    def num_updated() -> int:
        return sum(not isinstance(layer.weight, Waiting) for layer in layers)

    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.ones(2, 24)).backward()
        optimizer.step()
    at_first = num_updated()
    seen: list[int] = []
    handles = [layer.register_forward_pre_hook(lambda *_: seen.append(num_updated())) for layer in layers]
    optimizer.zero_grad()
    ddp(torch.ones(2, 24)).backward()
    for handle in handles:
        handle.remove()
    optimizer.step()
    state.synchronize()
    complete = num_updated() == len(layers)
    state.close()
    return at_first, seen, complete


def test_each_layer_is_updated_as_it_is_reached(workers: WorkerPools) -> None:
    for at_first, seen, complete in workers(2).run(follow_updates):
        assert at_first == 0, "updated inside step(): nothing was deferred"
        assert seen == [1, 2, 3, 4, 5, 6, 7], "not updated one after the other, just before use"
        assert complete


def held(gate: threading.Event) -> Algorithm:
    """Work that keeps a lane busy."""
    gate.wait(10)
    yield from ()


def step_behind_busy_lanes(
    rank: int, world_size: int, changes: dict[str, Any], twice: bool, busy_s: float
) -> tuple[bool, float]:
    """Whether step() returns although nothing can be reduced yet; and how far the model is from plain DDP's."""
    ddp, optimizer, state = wrapped(**changes)
    twin = DistributedDataParallel(copy.deepcopy(ddp.module), gradient_as_bucket_view=True)
    twins_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    gate = threading.Event()
    returned = False
    for step in range(6):
        values = torch.randn(2, 24, generator=torch.Generator().manual_seed(10 * rank + step))
        for model, its in ((ddp, optimizer), (twin, twins_optimizer)):
            its.zero_grad()
            if twice:
                model(values).backward()
            output = model(values)
            if model is ddp and step == 4:
                for _ in range(len(state._driver.lanes)):
                    state._driver.lanes.run(held(gate), "a gate")
                timer = threading.Timer(busy_s, gate.set)
                timer.start()
            output.backward()
            its.step()
            if model is ddp and step == 4:
                returned = not gate.is_set()
                timer.cancel()
                gate.set()
    state.synchronize()
    gap = max(float((a - b).abs().max()) for a, b in zip(ddp.parameters(), twin.parameters(), strict=True))
    state.close()
    return returned, gap


@pytest.mark.quick("plain", "clipped", "two backwards")
@pytest.mark.parametrize(
    ("changes", "twice", "expected"),
    [
        ({}, False, True),
        ({"fusion": "size", "fusion_mb": 1, "lanes": 3}, False, True),
        ({}, True, False),
        ({"reduce_dtype": torch.float64}, False, False),
        ({"max_grad_norm": 1e9}, False, False),
    ],
    ids=["plain", "fused", "two backwards", "sums in another type", "clipped"],
)
def test_gathers_wait_for_gradients_and_step_does_not(
    workers: WorkerPools, changes: dict[str, Any], twice: bool, expected: bool
) -> None:
    # A step that returns ends the wait itself; one that does not needs no longer than a step that should have waited.
    busy_s = 8.0 if expected else 0.5
    for returned, gap in workers(3).run(step_behind_busy_lanes, changes, twice, busy_s):
        assert returned == expected, "gathers may follow reduce-scatters only where nothing is to be done in between"
        assert gap < 1e-5


# -- gathers that begin in the backward -------------------------------------------------------------------------------


def clip_inside(rank: int, world_size: int) -> str:
    ddp, optimizer, state = wrapped()
    around_step(optimizer, lambda *_: state.clip_grad_norm_(1.0), lambda *_: None)  # after the state's own
    ddp(torch.ones(2, 24)).backward()
    message = message_of(optimizer.step)
    state.close()
    return message


def test_clipping_inside_of_the_step_is_refused(workers: WorkerPools) -> None:
    for message in workers(2).run(clip_inside):
        assert "inside of optimizer.step()" in message


@pytest.mark.parametrize("goodput_bytes_s", [100e6, 1e9])
@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_sizes_where_the_processor_limits(monkeypatch: pytest.MonkeyPatch, update: Any, goodput_bytes_s: float) -> None:
    """Messages cost it time, so a model that has whole updates to do as well is cut into fewer pieces."""
    monkeypatch.setattr(sizing, "profile_link", lambda lanes: LinkProfile(goodput_bytes_s, 1, 16 << 20))
    lanes = MagicMock(native=False, world_size=4)
    monkeypatch.setattr(sizing, "Lanes", lambda *args: lanes)
    config, device = DearConfig(update=update), torch.device("cpu")
    _, atom_bytes, *_ = sizing.open_lanes(config, MagicMock(), device, Recorder(False), 160 << 20, update != "sharded")
    assert atom_bytes == (40 if update == "replicated" and goodput_bytes_s == 1e9 else 20) << 20


def test_sizes_where_the_link_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "profile_link", lambda lanes: LinkProfile(100e6, 3, 1 << 20))
    monkeypatch.setattr(sizing, "Lanes", lambda *args: MagicMock(native=False, world_size=4))
    device = torch.device("cpu")
    _, *sizes, _ = sizing.open_lanes(DearConfig(), MagicMock(), device, Recorder(False), 400 << 20, False)
    assert sizes == [8 << 20, 8 << 20]


def test_a_tuner_has_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made of atoms, so where sizes are to be tried these are small, but messages not tiny."""
    monkeypatch.setattr(sizing, "profile_link", lambda lanes: LinkProfile(100e6, 3, 1 << 20))
    monkeypatch.setattr(sizing, "Lanes", lambda *args: MagicMock(native=False, world_size=4))
    device, config = torch.device("cpu"), DearConfig(tuner=BucketTuner())
    _, *sizes, _ = sizing.open_lanes(config, MagicMock(), device, Recorder(False), 100 << 20, False)
    assert sizes == [2 << 20, 8 << 20]
    _, *sizes, _ = sizing.open_lanes(config, MagicMock(), device, Recorder(False), 320 << 20, False)
    assert sizes == [5 << 20, 8 << 20]


class Halving(torch.optim.SGD):
    """Gives gradients other memory, as some optimizers and hooks do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data * 0.5
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def halve_or_step_half_as_far(rank: int, world_size: int, deferred: bool) -> float:
    """How far two models are apart. (Plain DDP is no reference: it breaks when its views are given other memory.)"""
    trained = []
    for kind, lr in ((Halving, 0.1), (torch.optim.SGD, 0.05)):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Matrices(), gradient_as_bucket_view=True)
        optimizer = kind(ddp.parameters(), lr=lr)
        state = DearState(ddp, optimizer, replace(REPLICATED, assume_parameterwise=deferred))
        ddp.register_comm_hook(state, dear_hook)
        for step in range(6):
            optimizer.zero_grad()
            ddp(torch.randn(2, 24, generator=torch.Generator().manual_seed(10 * rank + step))).backward()
            optimizer.step()
        state.synchronize()
        trained.append([parameter.detach().clone() for parameter in ddp.parameters()])
        state.close()
    return max(float((a - b).abs().max()) for a, b in zip(*trained, strict=True))


@pytest.mark.parametrize("deferred", [True, False])
def test_gradients_that_are_given_other_memory(workers: WorkerPools, deferred: bool) -> None:
    assert max(workers(2).run(halve_or_step_half_as_far, deferred)) < 1e-6


def nothing_on_the_way(rank: int, world_size: int) -> bool:
    """After close() the optimizer is as in plain DDP: whole, and free to step."""
    ddp, optimizer, state = wrapped()
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.ones(2, 24)).backward()
        optimizer.step()
    state.close()
    before = [p.detach().clone() for p in ddp.parameters()]
    for parameter in ddp.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return all(torch.equal(b - 0.1, p) for b, p in zip(before, ddp.parameters(), strict=True))


def test_close_gives_the_optimizer_back(workers: WorkerPools) -> None:
    assert all(workers(2).run(nothing_on_the_way))


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
