"""Spar-Reduce-Scatter under FSDP2: nothing is lost, in any loop, also over checkpoints with other numbers of ranks.

Prevents: leftovers that are added to other parameters, twice, or never; gradients that are selected wrongly.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate

from ddp_hooks.comm import run_on_fabric
from ddp_hooks.comm.algorithms.bruck import reduce_scatter_steps
from ddp_hooks.sparse.common import block_counts
from fsdp_ext import ExtConfig, Extension, extend, restore
from fsdp_ext.compressed import even_partition, sparse_reduce_scatter
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.exact import SMALL
from tests.support.fsdp_ext.twins import CONFIG, Trainee
from tests.support.fsdp_ext.unusual import needs_unused
from tests.support.workers import WorkerPools

SPARSE = replace(CONFIG, reduce_scatter="sparse", density=0.05, wire="exact")
THREE = {"num_blocks": 3}


# -- on the fabric ----------------------------------------------------------------------------------------------------


def whole_numbers(world_size: int, numel: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-40, 41, (world_size * numel,), generator=generator).float() for _ in range(world_size)]


def reduce(gradients: list[Tensor], residuals: list[Tensor], density: float, **how: Any) -> tuple[list[Tensor], int]:
    """Return every rank's part of the result, and the bytes that one of them sends."""
    world_size = len(gradients)
    partitions = [even_partition(gradient.clone(), world_size) for gradient in gradients]
    options = {"wire": "exact", **how}
    traffic = run_on_fabric(
        [
            sparse_reduce_scatter(partitions[rank], residuals[rank], rank, density, **options)
            for rank in range(world_size)
        ]
    )
    return [partitions[rank].ranges[rank] for rank in range(world_size)], traffic[0].sent_bytes


def slowly(gradients: list[Tensor], residuals: list[Tensor], density: float) -> list[Tensor]:
    """The same, entry by entry, with whole vectors."""
    world_size, numel = len(gradients), gradients[0].numel()
    bounds = even_partition(gradients[0], world_size).bounds
    counts = block_counts(max(world_size, round(density * numel)), bounds)
    works = [(residual + gradient).tolist() for residual, gradient in zip(residuals, gradients, strict=True)]

    def take(rank: int, block: int) -> list[tuple[int, float]]:
        places = sorted(range(bounds[block], bounds[block + 1]), key=lambda i: (-abs(works[rank][i]), i))
        taken = [(i, works[rank][i]) for i in places[: counts[block]]]
        for i, _ in taken:
            works[rank][i] = 0.0
        return taken

    for number in range(len(reduce_scatter_steps(0, world_size))):
        messages = []
        for rank in range(world_size):
            step = reduce_scatter_steps(rank, world_size)[number]
            messages += [(step.target, take(rank, block)) for block in step.outgoing]
        for target, entries in messages:
            for i, value in entries:
                works[target][i] += value
    results = []
    for rank in range(world_size):
        result = torch.zeros(bounds[1])
        for i, value in take(rank, rank):
            result[i - bounds[rank]] = value
        results.append(result)
    for residual, work in zip(residuals, works, strict=True):
        residual.copy_(torch.tensor(work))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("density", [0.03, 0.4, 1.0])
def test_as_the_slow_one(world_size: int, density: float) -> None:
    numel = 60
    ours, theirs = ([torch.zeros(world_size * numel) for _ in range(world_size)] for _ in range(2))
    for step in range(3):
        gradients = whole_numbers(world_size, numel, step)
        found, _ = reduce(gradients, ours, density)
        expected = slowly(gradients, theirs, density)
        assert all(map(torch.equal, found, expected)) and all(map(torch.equal, ours, theirs))
        if density == 1.0:
            whole = torch.stack(gradients).sum(0)
            assert torch.equal(torch.cat(found), whole) and not any(bool(kept.any()) for kept in ours)


WIRES = st.sampled_from(["exact", "compact"])


@given(st.integers(1, 9), st.integers(1, 300), st.floats(1e-3, 1.0), WIRES, st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost(world_size: int, numel: int, density: float, wire: str, seed: int) -> None:
    residuals = [torch.zeros(world_size * numel) for _ in range(world_size)]
    given_, got = torch.zeros(world_size * numel), torch.zeros(world_size * numel)
    for step in range(3):
        gradients = [each * 37 for each in whole_numbers(world_size, numel, 10 * seed + step)]  # not bfloat16's
        given_ += torch.stack(gradients).sum(0)
        got += torch.cat(reduce(gradients, residuals, density, wire=wire)[0])
    assert torch.equal(got + torch.stack(residuals).sum(0), given_)


@pytest.mark.parametrize("wire", ["exact", "compact"])
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("num_bad", [1, 30])
def test_what_is_not_finite_shows_and_does_not_stay(wire: str, bad: float, num_bad: int) -> None:
    world_size, numel = 4, 50
    gradients = whole_numbers(world_size, numel, 1)
    gradients[1][120 : 120 + num_bad] = bad  # of rank 2's part
    residuals = [torch.zeros(world_size * numel) for _ in range(world_size)]
    found, _ = reduce(gradients, residuals, 0.05, wire=wire)
    assert [bool(each.isfinite().all()) for each in found] == [True, True, False, True]
    assert all(bool(each.isfinite().all()) for each in residuals)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_bytes(world_size: int) -> None:
    numel = 1000
    residuals = [torch.zeros(world_size * numel) for _ in range(world_size)]
    for wire, entry, run in (("exact", 8, 0), ("compact", 4, 4)):
        _, sent = reduce(whole_numbers(world_size, numel, 0), residuals, 0.01, wire=wire)
        assert sent == (world_size - 1) * (10 * entry + run)


def test_means_are_divided() -> None:
    gradients = whole_numbers(4, 30, 0)
    residuals = [torch.zeros(120) for _ in range(4)]
    found, _ = reduce(gradients, residuals, 1.0, divisor=4)
    assert torch.equal(torch.cat(found), torch.stack(gradients).sum(0) / 4)


# -- between processes ------------------------------------------------------------------------------------------------


def gathered(rank: int, world_size: int, loop: Any, config: ExtConfig, how: dict[str, Any]) -> dict[str, Any]:
    """Compare the sums of all steps' gradients of two optimizers, one of them plus the residuals."""
    torch.manual_seed(7)
    replicas = how.get("replicas", 1)
    models = []
    for _ in range(2):
        torch.manual_seed(7)
        mesh = twins.mesh_of(world_size, replicas)
        models.append(twins.shard(twins.WholeNumbers(world_size, **how.get("model", {})), mesh))
    extension = extend(models[0], config)
    if how.get("zeros"):
        for model in models:
            assert isinstance(model, FSDPModule)
            model.set_reduce_scatter_unused_params(True)
    totals: list[dict[str, Tensor]] = [{}, {}]
    for step in range(twins.NUM_STEPS):
        if step == how.get("from_step", 0) and ("factor" in how or "forced" in how):
            for model in models:
                _sum(model, how.get("factor"))
        for model, total in zip(models, totals, strict=True):
            twin = Trainee(model, _Adder(model, total), lambda step: 1001 * step + 10 * rank)
            loop(twin, step)
    left = extension.state_dict()
    kept = sum(float(twins.local(value).abs().sum()) for value in left.values())
    differing = []
    for name, parameter in models[0].named_parameters():
        ours = totals[0].get(name, torch.zeros_like(twins.local(parameter)))
        if name in left:
            ours = ours + twins.local(left[name])
        if not torch.equal(ours, totals[1].get(name, torch.zeros_like(ours))):
            differing.append(name)
    stats, names = extension.stats(), sorted(left)
    restore(models[0])
    return {"differing": differing, "kept": kept, "sent": stats.sent_bytes, "names": names, "stats": stats}


def _sum(model: nn.Module, factor: float | None) -> None:
    """Let FSDP2 add gradients up, and divide sums by ``factor`` if there is one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            if factor is not None:
                module.set_gradient_divide_factor(factor)


class _Adder(torch.optim.SGD):
    """Changes nothing, and adds up the gradients that it gets."""

    def __init__(self, model: nn.Module, total: dict[str, Tensor]) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self._model, self._total = model, total

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                gradient = twins.local(parameter.grad)
                self._total[name] = self._total.get(name, torch.zeros_like(gradient)) + gradient


@pytest.mark.quick("*-1", "*-2")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("loop", [twins.plain, twins.two_backwards, twins.accumulate, twins.two_forwards])
def test_nothing_is_lost_in_training(workers: WorkerPools, world_size: int, loop: Any) -> None:
    how, num_parameters = ({}, 10) if loop is twins.plain else ({"model": THREE}, 7)
    for found in workers(world_size).run(gathered, loop, SPARSE, how):
        assert found["differing"] == []
        assert len(found["names"]) == num_parameters
    assert (found["kept"] > 0) == (world_size > 1)


NOT_ALIKE: list[dict[str, Any]] = [
    {"replicas": 2, "model": SMALL},
    {"model": {"frozen": True, **THREE}},
    {"model": {"idle": True, **THREE}},
    {"factor": 2.0, "model": THREE},
    {"factor": 4.0, "from_step": 2, "model": THREE},
    {"forced": True, "model": THREE},
    {"forced": True, "replicas": 2, "model": SMALL},
    {"factor": 2.0, "replicas": 2, "model": SMALL},
]


@pytest.mark.parametrize("how", NOT_ALIKE, ids=str)
def test_nothing_is_lost_with(workers: WorkerPools, how: dict[str, Any]) -> None:
    for found in workers(4 if "replicas" in how else 2).run(gathered, twins.plain, SPARSE, how):
        assert found["differing"] == [] and found["kept"] > 0


@needs_unused
def test_unused_parameters_may_stay_sparse(workers: WorkerPools) -> None:
    idle: dict[str, Any] = {"model": {"idle": True, **THREE}}
    in_full = workers(2).run(gathered, twins.plain, SPARSE, idle)[0]
    sparse = workers(2).run(gathered, twins.plain, SPARSE, {**idle, "zeros": True})[0]
    assert sparse["differing"] == in_full["differing"] == []
    assert sparse["sent"] < in_full["sent"]


def test_densities_by_module(workers: WorkerPools) -> None:
    config = replace(SPARSE, density={"blocks.[01]": 1.0, "blocks.*": 0.01})
    for found in workers(2).run(gathered, twins.plain, config, {"model": THREE}):
        assert found["differing"] == [] and found["kept"] > 0
        assert all(name.startswith("blocks.2") for name in found["names"])


def test_far_fewer_bytes(workers: WorkerPools) -> None:
    config = replace(SPARSE, density=0.01, wire="compact", all_gather="int8", block=64)
    exact = workers(2).run(gathered, twins.plain, CONFIG, {})[0]["sent"]
    sparse = workers(2).run(gathered, twins.plain, config, {})[0]["sent"]
    assert exact / sparse > 4.5


def mixed(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """The sum of what came and what is left, and of what was given, with gradients in bfloat16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    torch.manual_seed(7)
    model = twins.shard(twins.WholeNumbers(world_size), mp_policy=policy)
    exact = twins.shard(twins.WholeNumbers(world_size), mp_policy=policy)
    extension = extend(model, replace(SPARSE, wire="compact"))
    sums = [0.0, 0.0]
    for step in range(4):
        for index, each in enumerate((model, exact)):
            each.zero_grad()
            each(1000 * step + 10 * rank).backward()
            sums[index] += sum(float(twins.local(p.grad).double().sum()) for p in each.parameters())
    left = sum(float(twins.local(value).double().sum()) for value in extension.state_dict().values())
    restore(model)
    return [sums[0] + left], [sums[1]]


def test_gradients_in_bfloat16(workers: WorkerPools) -> None:
    for found, expected in workers(2).run(mixed):
        assert found == expected


def float16(rank: int, world_size: int) -> str:
    model = twins.shard(twins.WholeNumbers(world_size), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    extend(model, SPARSE)
    try:
        model(rank).backward()
    except ValueError as error:
        return str(error)
    finally:
        restore(model)
    return "nothing was raised"


def test_float16_is_refused(workers: WorkerPools) -> None:
    messages = workers(2).run(float16)
    assert "whose scale in float16 was another: take MixedPrecisionPolicy(reduce_dtype=torch.float32)" in messages[0]
    assert messages[0] == messages[1]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def build(config: ExtConfig) -> tuple[nn.Module, Extension, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = twins.shard(twins.WholeNumbers(6))
    return model, extend(model, config), torch.optim.SGD(model.parameters(), lr=1.0)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for step in numbers:
        optimizer.zero_grad()
        model(1000 * step + 10 * rank).backward()
        optimizer.step()


def train_and_save(rank: int, world_size: int, folder: str, config: ExtConfig) -> list[float]:
    """Save in between; what is there after the steps that follow."""
    model, extension, optimizer = build(config)
    steps(model, optimizer, rank, range(3))
    dcp.save({"model": model.state_dict(), "left": extension.state_dict()}, checkpoint_id=folder)
    steps(model, optimizer, rank, range(3, 6))
    return _everything(model, extension)


def resume(rank: int, world_size: int, folder: str, config: ExtConfig, num_steps: int) -> list[float]:
    model, extension, optimizer = build(config)
    steps(model, optimizer, rank, range(50, 51))  # is forgotten
    state = {"model": model.state_dict(), "left": extension.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    extension.load_state_dict(state["left"])
    steps(model, optimizer, rank, range(3, 3 + num_steps))
    return _everything(model, extension)


def _everything(model: nn.Module, extension: Extension) -> list[float]:
    """Return parameters and residuals."""
    wholes: list[Any] = [*model.parameters(), *extension.state_dict().values()]
    found = [value for each in wholes for value in each.full_tensor().flatten().tolist()]
    restore(model)
    return found


@pytest.mark.quick("*-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["sparse", "int8"])
def test_resumes_bit_for_bit(workers: WorkerPools, tmp_path: Path, world_size: int, name: Any) -> None:
    config = replace(SPARSE, wire=None) if name == "sparse" else replace(CONFIG, reduce_scatter="int8", block=64)
    expected = workers(world_size).run(train_and_save, str(tmp_path), config)[0]
    assert all(found == expected for found in workers(world_size).run(resume, str(tmp_path), config, 3))


@pytest.mark.quick("1-2", "2-1")
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (3, 1)])
def test_checkpoints_with_other_numbers_of_ranks(
    workers: WorkerPools, tmp_path: Path, before: int, after: int
) -> None:
    """Parameters without what is left of their gradients: the same before and after."""
    workers(before).run(train_and_save, str(tmp_path), SPARSE)
    loaded = workers(after).run(resume, str(tmp_path), SPARSE, 0)[0]
    again = workers(before).run(resume, str(tmp_path), SPARSE, 0)[0]
    assert loaded == again
    half = len(loaded) // 2
    assert any(loaded[half:]) == (before > 1)


def load_with_others(rank: int, world_size: int, config: ExtConfig) -> str:
    model, extension, optimizer = build(SPARSE)
    steps(model, optimizer, rank, range(1))
    state = extension.state_dict()
    restore(model)
    other = extend(model, config)
    try:
        other.load_state_dict(state)
    except ValueError as error:
        return str(error)
    finally:
        restore(model)
    return "nothing was raised"


def test_states_of_other_settings_are_refused(workers: WorkerPools) -> None:
    for message in workers(2).run(load_with_others, replace(SPARSE, density={"blocks.3": 0.1})):
        assert "the residual of blocks.0.layers.0.weight is only in this state: extend(" in message


class Pair(nn.Module):
    """Two parameters, of which one is as long as it is told."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(numel)), nn.Parameter(torch.zeros(400))

    def forward(self, factor: float) -> Tensor:
        return (self.first.sum() + self.second.sum()) * factor


def left_over_from(state: str, rank: int) -> dict[str, Any]:
    """Return the state of another model under the names of ``Pair(40)``."""
    mesh = init_device_mesh("cpu", (2,))
    if state == "turned around":
        mesh = DeviceMesh("cpu", [1, 0])
    model = Pair({"longer": 48, "shorter": 24, "much longer": 4000}.get(state, 40))
    fully_shard(model, mesh=mesh)
    extension = extend(model, SPARSE)
    model(2.0 + rank).backward()
    found: dict[str, Any] = dict(extension.state_dict())
    restore(model)
    if state == "whole":
        return {name: value.full_tensor() for name, value in found.items()}
    if state == "replicated":
        return {name: value.redistribute(placements=[Replicate()]) for name, value in found.items()}
    return found


def load_what_does_not_fit(rank: int, world_size: int, state: str) -> tuple[str, bool]:
    """The error, and whether what was kept before is kept still."""
    others = left_over_from(state, rank)
    model = Pair(40)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    extension = extend(model, SPARSE)
    model(3.0 + rank).backward()
    before = {name: value.full_tensor() for name, value in extension.state_dict().items()}
    assert any(value.any() for value in before.values())
    message = "nothing was raised"
    try:
        extension.load_state_dict(others)
    except ValueError as error:
        message = str(error)
    after = {name: value.full_tensor() for name, value in extension.state_dict().items()}
    restore(model)
    return message, all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(("state", "found"), [
    ("longer", "a DTensor of shape (48,) with (Shard(dim=0),) on cpu, ranks [0, 1]"),
    ("shorter", "a DTensor of shape (24,) with (Shard(dim=0),) on cpu, ranks [0, 1]"),
    ("much longer", "a DTensor of shape (4000,) with (Shard(dim=0),) on cpu, ranks [0, 1]"),
    ("turned around", "a DTensor of shape (40,) with (Shard(dim=0),) on cpu, ranks [1, 0]"),
    ("replicated", "a DTensor of shape (40,) with (Replicate(),) on cpu, ranks [0, 1]"),
    ("whole", "a plain tensor of shape (40,)"),
])  # fmt: skip
def test_states_of_other_shapes_or_ranks_are_refused(workers: WorkerPools, state: str, found: str) -> None:
    expected = "must be a DTensor of shape (40,) with (Shard(dim=0),) on cpu, ranks [0, 1], as extension.state_dict()"
    for message, is_kept in workers(2).run(load_what_does_not_fit, state):
        assert f"residual of first {expected}" in message and f"this state has {found}: load" in message, message
        assert is_kept


# -- settings ---------------------------------------------------------------------------------------------------------


def misspelt(rank: int, world_size: int) -> str:
    model = twins.shard(twins.WholeNumbers(world_size))
    try:
        extend(model, replace(SPARSE, density={"layers.*": 0.1}))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_patterns_that_fit_nothing_are_refused(workers: WorkerPools) -> None:
    messages = workers(2).run(misspelt)
    assert "density names 'layers.*', which fits none of the modules that FSDP2 wraps: ['', 'blocks.0'" in messages[0]


def incomplete(rank: int, world_size: int) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fsdp_ext").addHandler(handler)
    model = twins.shard(twins.WholeNumbers(world_size, idle=True))
    extend(model, SPARSE)
    for seed in range(8):
        model.zero_grad()
        model(seed).backward()
    restore(model)
    logging.getLogger("fsdp_ext").removeHandler(handler)
    return records


def test_steps_without_some_gradients_are_told_once(workers: WorkerPools) -> None:
    for records in workers(2).run(incomplete):
        told = [record for record in records if "some of its parameters have no gradient" in record]
        assert 1 <= len(told) == len(set(told))


# -- convergence ------------------------------------------------------------------------------------------------------


def regress(rank: int, world_size: int, config: ExtConfig) -> float:
    """A small network learns a function of another one; returns its last losses' mean."""
    torch.manual_seed(3)
    teacher = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    extend(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.8)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(60):
        inputs = torch.randn(32, 20, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), teacher(inputs).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    restore(model)
    return sum(losses[-15:]) / 15


@pytest.mark.slow
def test_converges(workers: WorkerPools) -> None:
    exact, sparse = (
        max(workers(2).run(regress, config)) for config in (CONFIG, replace(SPARSE, density=0.05, wire="compact"))
    )
    untrained = 0.1
    assert exact < untrained / 5 and sparse < 1.5 * exact, (exact, sparse)


def scaled(rank: int, world_size: int, factor: float) -> bool:
    """Compare residuals before and after they are scaled, in training and after loading."""
    torch.manual_seed(7)
    model = twins.shard(twins.WholeNumbers(world_size))
    extension = extend(model, SPARSE)
    found = []
    for loaded in (False, True):
        if loaded:
            extension.load_state_dict(extension.state_dict())
        else:
            model(3 + rank).backward()
        before = {name: twins.local(value).clone() for name, value in extension.state_dict().items()}
        extension.scale_leftovers(factor)
        after = {name: twins.local(value) for name, value in extension.state_dict().items()}
        found.append(all(torch.equal(after[name], before[name] * factor) for name in before))
        found.append(any(value.any() for value in before.values()) == (not loaded or factor != 0))
    restore(model)
    return all(found)


@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_what_is_left_over_is_scaled(workers: WorkerPools, factor: float) -> None:
    assert all(workers(2).run(scaled, factor))
