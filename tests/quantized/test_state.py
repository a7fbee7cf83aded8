"""The all-reduce in fewer bits between real processes.

Prevents: replicas that drift apart; roundings that are lost or counted twice between buckets, owners and residuals;
results that depend on slices; resumed runs that go another way.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import QuantizedConfig, QuantizedState, quantized_hook
from ddp_hooks.quantized import backward
from tests.support.messages import logged, message_of
from tests.support.quantized.twins import CONFIG, Noise, Side, Twin, agree, noise
from tests.support.workers import WorkerPools

STEPS = 4


def seed_of(step: int, rank: int, micro_batch: int = 0) -> int:
    return 100 * step + 10 * micro_batch + rank + 1


def noises(parameters: Sequence[Tensor], seed: int) -> list[Tensor]:
    return [noise(seed, index, like) for index, like in enumerate(parameters)]


def close_to_twin(rank: int, world_size: int, changes: dict[str, Any], options: dict[str, Any]) -> list[str]:
    """Return what differs from the twin, bit for bit, in some steps, every other of which accumulates."""
    config = replace(CONFIG, **changes)
    side = Side(config, **options)
    parameters = list(side.model.parameters())
    twin = Twin(config, parameters, world_size)
    total = [torch.zeros(p.numel(), dtype=torch.float64) for p in parameters]  # what was given, but not yet applied
    problems = []
    for step in range(STEPS):
        side.ddp.zero_grad(set_to_none=step != 2)
        micro_batches = 1 + step % 2
        if micro_batches == 2:
            with side.ddp.no_sync():
                side.ddp(seed_of(step, rank)).backward()
        side.ddp(seed_of(step, rank, micro_batches - 1)).backward()
        given = []
        for other in range(world_size):
            parts = [noises(parameters, seed_of(step, other, m)) for m in range(micro_batches)]
            given.append([torch.stack(each).sum(0) for each in zip(*parts, strict=True)])
        runs = side.state._runs
        assert runs is not None
        means = twin.reduce(given, runs)
        found = side.gradients()
        problems += [f"step {step}, {i}" for i, g in enumerate(found) if not torch.equal(g.flatten(), means[i])]
        if not agree(found):
            problems.append(f"step {step}: replicas differ")
        for i, each in enumerate(found):
            inputs = torch.stack([own[i].double().flatten() for own in given]).sum(0)
            total[i] += inputs - world_size * each.double().flatten()
    assert side.state.stats().num_buckets > 1
    kept = side.state.state_dict()["residual"]
    for i, each in enumerate(total):
        mine = kept[f"values.{i}"].double().flatten()
        if not torch.equal(mine.float(), twin.residuals[rank][i]):
            problems.append(f"residual {i}")
        dist.all_reduce(mine)
        if not torch.allclose(mine, each, atol=1e-5):
            problems.append(f"{i}: applied and kept is not what was given, by {(mine - each).abs().max()}")
    if sum(float(each.abs().sum()) for each in kept.values()) == 0:
        problems.append("nothing was rounded")
    side.state.close()
    return problems


def all_close_to_twin(rank: int, world_size: int, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    backward._SLICE_BYTES = 12_000  # so that ranges have several slices
    found = []
    for changes, options in cases:
        found += [f"{changes} {options}: {each}" for each in close_to_twin(rank, world_size, changes, options)]
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_equal_to_the_twin(workers: WorkerPools, world_size: int) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}), ({"bits": 4, "lanes": 3}, {})]
    if world_size == 2:
        cases += [
            ({"bits": 16, "block_numel": None}, {}),
            ({}, {"gradient_as_bucket_view": False}),
            ({}, {"static_graph": True}),
            ({}, {"find_unused_parameters": True}),
        ]
    if world_size == 4:
        cases += [({"node_size": 2}, {}), ({"node_size": 2, "bits": 4}, {})]
    for problems in workers(world_size).run(all_close_to_twin, cases):
        assert problems == []


# -- parameters that are not used -------------------------------------------------------------------------------------


def unused(rank: int, world_size: int, view: bool) -> list[str]:
    """Return what differs from the twin where some ranks, or all, leave parameters out."""
    side = Side(find_unused_parameters=True, gradient_as_bucket_view=view)
    parameters = list(side.model.parameters())
    twin = Twin(CONFIG, parameters, world_size)
    problems = []
    for step in range(6):
        nobody, by_some = ((), (5,), (6, 3))[step % 3], (1,) if step > 1 else ()
        before = side.gradients()
        if step != 4:  # DDP leaves gradients of parameters alone that nobody uses
            side.ddp.zero_grad()
        skips = [(*nobody, *by_some) if other == 0 else nobody for other in range(world_size)]
        side.ddp(seed_of(step, rank), skips[rank]).backward()
        given = []
        for other in range(world_size):
            fresh = noises(parameters, seed_of(step, other))
            own = [torch.zeros_like(each) if i in skips[other] else each for i, each in enumerate(fresh)]
            given.append([a + b for a, b in zip(own, before, strict=True)] if step == 4 else own)
        kept = copy.deepcopy(twin.residuals)
        assert side.state._runs is not None
        means = twin.reduce(given, side.state._runs)
        for other in range(world_size):
            for i in nobody:
                twin.residuals[other][i] = kept[other][i]
        for i, parameter in enumerate(parameters):
            if i in nobody and step != 4:
                same = parameter.grad is None
            else:
                expected = before[i].flatten() if i in nobody else means[i]
                same = parameter.grad is not None and torch.equal(parameter.grad.flatten(), expected)
            problems += [] if same else [f"step {step}, {i}"]
    saved = side.state.state_dict()["residual"]
    for i, each in enumerate(twin.residuals[rank]):
        problems += [] if torch.equal(saved[f"values.{i}"].flatten(), each) else [f"residual {i}"]
    side.state.close()
    return problems


@pytest.mark.parametrize("view", [True, False])
def test_residuals_of_unused_parameters_stay(workers: WorkerPools, view: bool) -> None:
    assert workers(2).run(unused, view) == [[], []]


# -- types and layouts of memory --------------------------------------------------------------------------------------


def types(rank: int, world_size: int) -> list[str]:
    """Return what is wrong with models of several types."""
    problems = []
    every = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for bits in (8, 4, 16):
        side = Side(replace(CONFIG, bits=bits, block_numel=None if bits == 16 else 64), Noise(every))
        parameters = list(side.model.parameters())
        missing = [torch.zeros(p.shape, dtype=torch.float64) for p in parameters]
        for step in range(3):
            side.ddp.zero_grad()
            side.ddp(seed_of(step, rank)).backward()
            given = [noises(parameters, seed_of(step, other)) for other in range(world_size)]
            for i, gradient in enumerate(side.gradients()):
                if bits == 16 and gradient.element_size() == 2:  # as it is, summed in float32
                    plain = (torch.stack([own[i] for own in given]).float().sum(0) / world_size).to(gradient.dtype)
                    problems += [] if torch.equal(plain, gradient) else [f"{bits} bits, {gradient.dtype} is rounded"]
                missing[i] += torch.stack([own[i] for own in given]).double().sum(0) - world_size * gradient.double()
            problems += [] if agree(side.gradients()) else [f"{bits} bits: replicas differ"]
        kept = side.state.state_dict()["residual"]
        for i, each in enumerate(missing):
            own = kept.get(f"values.{i}")
            total = torch.zeros_like(each) if own is None else own.double()
            dist.all_reduce(total)
            # 16-bit parameters round the mean once more, which nobody keeps.
            bound = 0.1 if parameters[i].element_size() == 2 else 1e-5
            if each.numel() and float((total - each).abs().max()) > bound:
                problems.append(f"{bits} bits, {parameters[i].dtype}: {(total - each).abs().max()} are lost")
        side.state.close()
    return problems


def test_types(workers: WorkerPools) -> None:
    assert workers(2).run(types) == [[], []]


class Picture(nn.Module):
    """A weight whose memory is not row-major."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 6, 5, 7).to(memory_format=torch.channels_last))

    def forward(self, seed: int) -> Tensor:
        return (self.weight * noise(seed, 0, self.weight)).sum()


def channels_last(rank: int, world_size: int) -> float:
    """Return what is neither applied nor kept at its place in a weight in channels_last, also after a resume."""
    model = Picture()
    side, saved = Side(model=model), {}
    missing = torch.zeros(8, 6, 5, 7)
    for step in range(3):
        side.ddp.zero_grad()
        side.ddp(seed_of(step, rank)).backward()
        assert model.weight.grad is not None
        given = [noise(seed_of(step, other), 0, model.weight) for other in range(world_size)]
        missing += torch.stack(given).sum(0) - world_size * model.weight.grad
        saved = side.state.state_dict()
        side.state.close()
        model = Picture()
        side = Side(model=model)
        side.state.load_state_dict(saved)
    side.state.close()
    assert saved["residual"]["weight"].any()
    dist.all_reduce(saved["residual"]["weight"])
    return float((missing - saved["residual"]["weight"]).abs().max())


def test_channels_last(workers: WorkerPools) -> None:
    for lost in workers(2).run(channels_last):
        assert lost < 1e-5


# -- gradient scalers -------------------------------------------------------------------------------------------------


def scaled(rank: int, world_size: int) -> list[str]:
    """Return what differs between a run with a loss scale that grows and one without."""
    problems = []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    with_scale, without = Side(scaler=scaler), Side()
    optimizer = torch.optim.SGD(with_scale.model.parameters(), lr=0.0)
    for step in range(4):
        for side in (with_scale, without):
            side.ddp.zero_grad()
        scaler.scale(with_scale.ddp(seed_of(step, rank))).backward()
        without.ddp(seed_of(step, rank)).backward()
        scaler.unscale_(optimizer)
        pairs = zip(with_scale.gradients(), without.gradients(), strict=True)
        problems += [f"step {step}, {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        scaler.step(optimizer)
        scaler.update()
        if step == 1:
            with_scale.state.load_state_dict(with_scale.state.state_dict())
    kept = [side.state.state_dict()["residual"] for side in (with_scale, without)]
    problems += [name for name in kept[0] if not torch.equal(kept[0][name], kept[1][name])]
    assert scaler.get_scale() == 64.0
    for side in (with_scale, without):
        side.state.close()
    return problems


def spoilt(rank: int, world_size: int, bits: int) -> list[Any]:
    """Return scales, and what is not finite, where one rank has a gradient that is not finite in the second step."""
    config = replace(CONFIG, bits=bits, block_numel=None if bits == 16 else 64)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    side = Side(config, scaler=scaler)
    optimizer = torch.optim.SGD(side.model.parameters(), lr=1.0)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = side.ddp(seed_of(step, rank))
        if step == 1 and rank == world_size - 1:
            loss = loss + float("nan") * next(p for p in side.model.parameters() if p.dim() == 2)[5].sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    residuals = side.state.state_dict()["residual"].values()
    finite = all(torch.isfinite(each).all() for each in (*side.model.parameters(), *residuals))
    side.state.close()
    return [scales, finite, agree(list(side.model.parameters()))]


def test_scalers(workers: WorkerPools) -> None:
    assert workers(2).run(scaled) == [[], []]
    for bits in (8, 16):
        for scales, finite, same in workers(3).run(spoilt, bits):
            assert scales == [4.0, 2.0, 2.0, 2.0] and finite and same


# -- checkpoints ------------------------------------------------------------------------------------------------------


def train(rank: int, world_size: int, begin: int, end: int, saved: Any = None) -> tuple[list[list[Tensor]], Any]:
    """Return the gradients of some steps, and the state after them, which pickles."""
    side = Side()
    if saved is not None:
        side.state.load_state_dict(saved[rank] if len(saved) == world_size else saved)
    found = []
    for step in range(begin, end):
        side.ddp.zero_grad()
        side.ddp(seed_of(step, rank)).backward()
        found.append(side.gradients())
    state = side.state.state_dict()
    side.state.close()
    return found, state


def resume(rank: int, world_size: int) -> list[str]:
    straight, end = train(rank, world_size, 0, 6)
    _, middle = train(rank, world_size, 0, 3)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, middle)
    resumed, end_of_resumed = train(rank, world_size, 3, 6, everyone)
    problems = [
        f"step {step}, {i}"
        for step, (a, b) in enumerate(zip(straight[3:], resumed, strict=True))
        for i in range(len(a))
        if not torch.equal(a[i], b[i])
    ]
    names = end["residual"]
    problems += [name for name in names if not torch.equal(end["residual"][name], end_of_resumed["residual"][name])]
    return problems + [key for key in ("step", "runs", "rank", "world_size") if end[key] != end_of_resumed[key]]


def test_the_same_ranks_go_on_bit_for_bit(workers: WorkerPools) -> None:
    assert workers(2).run(resume) == [[], []]


def loaded(rank: int, world_size: int, states: list[Any], changes: dict[str, Any]) -> list[float]:
    """Return what the mean of residuals lacks after loading, and what is lost in the next step."""
    side = Side(replace(CONFIG, **changes))
    side.state.load_state_dict(states)
    before = summed(side)
    lacking = max(
        float((total / world_size - torch.stack([state["residual"][name] for state in states]).mean(0)).abs().max())
        for name, total in before.items()
        if total.numel()
    )
    side.ddp(seed_of(9, rank)).backward()
    after, parameters = summed(side), list(side.model.parameters())
    given = [noises(parameters, seed_of(9, other)) for other in range(world_size)]
    lost = [0.0]
    for i, (name, gradient) in enumerate(zip(after, side.gradients(), strict=True)):
        total = before[name] + torch.stack([own[i] for own in given]).sum(0)
        lost += (total - world_size * gradient - after[name]).abs().flatten().tolist()
    side.state.close()
    return [lacking, max(lost)]


def summed(side: Side) -> dict[str, Tensor]:
    total: dict[str, Tensor] = side.state.state_dict()["residual"]
    for each in total.values():
        dist.all_reduce(each)
    return total


def test_to_other_numbers_of_ranks_the_mean_owes_the_same(workers: WorkerPools) -> None:
    states = [state for _, state in workers(4).run(train, 0, 3)]
    for world_size, changes in ((2, {}), (4, {"node_size": 2})):
        for lacking, lost in workers(world_size).run(loaded, states, changes):
            assert lacking < 1e-6 and lost < 1e-5


def load_wrongly(rank: int, world_size: int) -> list[str]:
    side = Side()
    side.ddp(seed_of(0, rank)).backward()
    saved = side.state.state_dict()
    wrong: list[Any] = [
        {**saved, "rank": 1 - rank},
        {**saved, "world_size": 5},
        [saved, saved],
        [],
        {"rank": rank},
        {**saved, "residual": {"elsewhere": torch.zeros(1)}},
        {**saved, "residual": {"values.1": torch.zeros(5)}},
        {**saved, "runs": [["values.0", "values.1"]]},
        {**saved, "step": rank},
    ]
    messages = [message_of(partial(side.state.load_state_dict, state)) for state in wrong]
    side.state.close()
    return messages


def test_states_that_do_not_fit_are_refused(workers: WorkerPools) -> None:
    expected = [
        "was given the state of rank", "pass the states of all", "each once, got those of", "there is no state",
        "it lacks", "which the model has not", "has shape (5,)", "of other parameters", "step is",
    ]  # fmt: skip
    for messages in workers(2).run(load_wrongly):
        for message, part in zip(messages, expected, strict=True):
            assert part in message, (message, part)


# -- costs ------------------------------------------------------------------------------------------------------------


class Spikes(nn.Module):
    """Gradients of which few are much larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4096))

    def forward(self, seed: int) -> Tensor:
        values = noise(seed, 0, self.weight)
        values[::64] *= 15
        return (self.weight * values).sum()


def costs(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []
    for bits in (16, 8, 4):
        side = Side(QuantizedConfig(bits=bits, timeout_s=20, stall_warning_s=10), bucket_cap_mb=25)
        side.ddp(seed_of(0, rank)).backward()
        stats = side.state.stats()
        plain_bytes = 2 * (world_size - 1) / world_size * 4 * sum(p.numel() for p in side.model.parameters())
        found.append((stats.sent_bytes / plain_bytes, stats.relative_error, stats.step, stats.num_lanes))
        side.state.close()
    with logged() as lines:
        for bits in (8, 4):
            side = Side(QuantizedConfig(bits=bits, timeout_s=20, stall_warning_s=10), Spikes())
            for step in range(3):
                side.ddp(seed_of(step, rank)).backward()
            side.state.close()
    return [*found, [line for line in lines if "bits=4" in line]]


def test_costs(workers: WorkerPools) -> None:
    for *found, lines in workers(2).run(costs):
        for (bytes_ratio, error, step, lanes), (bits, usual_error) in zip(
            found, [(16, 0.0017), (8, 0.0066), (4, 0.12)], strict=True
        ):
            assert bits / 32 <= bytes_ratio < bits / 32 + 0.03
            assert 0.8 * usual_error < error < 1.3 * usual_error and step == 1 and lanes == 2
        assert len(lines) == 1 and "rounding takes" in lines[0] and "(weight)" in lines[0]


# -- set-ups and loops that cannot work -------------------------------------------------------------------------------


def linear(dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(3, 3, dtype=dtype))


def refusals(rank: int, world_size: int) -> dict[str, str]:
    used, spent, local = linear(), linear(), linear()
    for ddp in (used, spent, local):
        ddp.register_comm_hook(state := QuantizedState(ddp), quantized_hook)
    state_of_spent: Any = spent._comm_hooks[0][1]
    state_of_spent.close()
    state_of_spent.close()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    loss = local(torch.ones(1, 3)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    wrong = linear()
    wrong.register_comm_hook(None, quantized_hook)
    cases: dict[str, Any] = {
        "bits": lambda: QuantizedConfig(bits=3),
        "blocks": lambda: QuantizedConfig(block_numel=12),
        "no blocks": lambda: QuantizedConfig(bits=16, block_numel=64),
        "module": lambda: QuantizedState(nn.Linear(3, 3)),  # type: ignore[arg-type]
        "config": lambda: QuantizedState(linear(), {"bits": 8}),  # type: ignore[arg-type]
        "hook": lambda: QuantizedState(used),
        "sparse": lambda: QuantizedState(DistributedDataParallel(nn.Embedding(5, 3, sparse=True))),
        "complex": lambda: QuantizedState(linear(torch.complex64)),
        "saves nothing": lambda: QuantizedState(linear(torch.bfloat16), QuantizedConfig(bits=16)),
        "nodes": lambda: QuantizedState(linear(), QuantizedConfig(node_size=2)),
        "differing": lambda: QuantizedState(linear(), QuantizedConfig(bits=8 if rank else 4)),
        "one rank": lambda: QuantizedState(linear(), {} if rank == 1 else None),  # type: ignore[arg-type]
        "copy": lambda: copy.deepcopy(used),
        "pickle": lambda: pickle.dumps(used),
        "join": lambda: used.join(),
        "closed": lambda: spent(torch.ones(1, 3)).sum().backward(),
        "state": lambda: wrong(torch.ones(1, 3)).sum().backward(),
        "two backwards": optimizer.step,
    }
    messages = {name: message_of(case) for name, case in cases.items()}
    state.close()
    return messages


def test_refusals(workers: WorkerPools) -> None:
    expected = {
        "bits": "bits must be one of (16, 8, 4), got 3",
        "blocks": "block_numel must be None, or a multiple of 8, got 12",
        "no blocks": "block_numel=64 has no effect with bits=16",
        "module": "wrap the model first",
        "config": "QuantizedConfig(...), got dict",
        "hook": "already has a communication hook",
        "sparse": "sparse=False",
        "complex": "weight is torch.complex64",
        "saves nothing": "bits=16 saves nothing, because all gradients are torch.bfloat16",
        "nodes": "node_size must divide the number of ranks, 3: got 2, leave it out",
        "differing": "QuantizedConfig.bits is 4 on ranks [0], 8 on ranks [1, 2]; make them equal",
        "one rank": "on ranks [1]: QuantizedState takes",
        "copy": "Copy ddp.module",
        "pickle": "save ddp.module.state_dict()",
        "join": "join() cannot work with QuantizedState",
        "closed": "QuantizedState was closed",
        "state": "quantized_hook got NoneType as its state",
        "two backwards": "was not reduced over the ranks",
    }
    for found in workers(3).run(refusals):
        for name, part in expected.items():
            assert part in found[name], (name, found[name])


def alone(rank: int, world_size: int) -> bool:
    side = Side()
    side.ddp(1).backward()
    pairs = zip(side.gradients(), noises(list(side.model.parameters()), 1), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    same &= side.state.state_dict()["residual"] == {}
    side.state.close()
    return same


def test_one_rank_rounds_nothing(workers: WorkerPools) -> None:
    assert workers(1).run(alone) == [True]
