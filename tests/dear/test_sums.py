"""Sums of real-valued gradients: ``(((g0 + g1) + g2) + ...) / P`` to the bit, whatever settings, bucket and restart.

Prevents: sums whose order depends on buckets, atoms, groups, lanes, tuner, or on what a run was resumed from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import BucketTuner, DearConfig, DearState, dear_hook
from tests.support.dear.loops import adamw_two_groups
from tests.support.dear.twins import CONFIG, WholeNumbers
from tests.support.workers import WorkerPools

STEPS, HALF = 6, 3


def gradient(step: int, rank: int, layer: int, shape: tuple[int, ...]) -> Tensor:
    """(shape), of a layer; it does not depend on weights, so that every rank can tell those of all others."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + 50 * rank + layer))


class Real(nn.Module):
    """Parameters of odd sizes whose gradients are those above."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.weights = nn.ParameterList(torch.randn(shape) for shape in WholeNumbers.SHAPES)

    def forward(self, step: int, rank: int) -> Tensor:
        total = torch.zeros(())
        for layer, weight in reversed(list(enumerate(self.weights))):
            total = total + (weight * gradient(step, rank, layer, tuple(weight.shape))).sum()
        return total


def added(gradients: list[Tensor]) -> Tensor:
    total = gradients[0]
    for other in gradients[1:]:
        total = total + other
    return total


def in_order(gradients: list[Tensor]) -> Tensor:
    return added(gradients) / len(gradients)


def by_node_of_two(gradients: list[Tensor]) -> Tensor:
    sums = [first + second for first, second in zip(gradients[::2], gradients[1::2], strict=True)]
    return added(sums) / len(gradients)


def in_bfloat16(gradients: list[Tensor]) -> Tensor:
    """Added in float32, and rounded once."""
    return in_order([each.bfloat16().float() for each in gradients]).bfloat16().float()


def twin(world_size: int, mean: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """Parameters after all steps, without any communication."""
    model = Real()
    optimizer = adamw_two_groups(model)
    for step in range(STEPS):
        for layer, weight in enumerate(model.weights):
            weight.grad = mean([gradient(step, rank, layer, tuple(weight.shape)) for rank in range(world_size)])
        optimizer.step()
    return [weight.detach() for weight in model.weights]


class Run(NamedTuple):
    """A way to train, and another one for the steps after a restart; None: there is none."""

    config: DearConfig = CONFIG
    options: dict[str, Any] = {}  # noqa: RUF012 (of DDP; never changed)
    then: DearConfig | None = None
    saved: str = "full"
    mean: Callable[[list[Tensor]], Tensor] = in_order


TUNER = BucketTuner(
    low_mb=0.02, high_mb=0.2, start_mb=0.02, max_trials=3, steps_per_trial=1, dropped_steps=0,
    first_step=2, profile=None,
)  # fmt: skip
SMALL_ATOMS = replace(CONFIG, atom_mb=0.003, fusion="none", fusion_mb=None)
LARGE_ATOMS = replace(CONFIG, atom_mb=0.05, fusion="none", fusion_mb=None)
LAYERS = replace(CONFIG, fusion="layers", fusion_mb=None, fusion_layers=3, lanes=1, slice_mb=0.001)
RUNS = {
    "large buckets": Run(replace(CONFIG, lanes=4, slice_mb=1), {"bucket_cap_mb": 25}),
    "tuner": Run(replace(CONFIG, fusion_mb=None, tuner=TUNER)),
    "static graph": Run(options={"static_graph": True}),
    "unused parameters": Run(options={"find_unused_parameters": True}),
    "replicated": Run(replace(CONFIG, update="replicated")),
    "small atoms, resumed": Run(SMALL_ATOMS, then=replace(CONFIG, lanes=1)),
    "layers, resumed from shards": Run(LAYERS, then=LARGE_ATOMS, saved="shards"),
}


def train(rank: int, world_size: int, run: Run, folder: str) -> list[Tensor]:
    def begin(config: DearConfig) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DearState]:
        ddp = DistributedDataParallel(Real(), gradient_as_bucket_view=True, **{"bucket_cap_mb": 0.05, **run.options})
        optimizer = adamw_two_groups(ddp.module)
        state = DearState(ddp, optimizer, config)
        ddp.register_comm_hook(state, dear_hook)
        return ddp, optimizer, state

    ddp, optimizer, state = begin(run.config)
    for step in range(STEPS):
        if run.then is not None and step == HALF:
            weights, full = copy.deepcopy((ddp.module.state_dict(), state.full_optimizer_state_dict()))
            dcp.save({"optimizer": state.sharded_optimizer_state_dict()}, checkpoint_id=folder)
            state.close()
            ddp, optimizer, state = begin(run.then)
            ddp.module.load_state_dict(weights)
            if run.saved == "full":
                optimizer.load_state_dict(full)
            else:
                state.load_sharded_optimizer(folder)
        optimizer.zero_grad()
        ddp(step, rank).backward()
        optimizer.step()
    found = [parameter.detach().clone() for parameter in ddp.module.parameters()]
    state.close()
    return found


def differing(rank: int, world_size: int, runs: dict[str, Run], folder: str) -> list[str]:
    """Names of runs that do not end as their twins."""
    expected = {mean: twin(world_size, mean) for mean in {run.mean for run in runs.values()}}
    return [
        name
        for name, run in runs.items()
        if not all(map(torch.equal, train(rank, world_size, run, f"{folder}/{name}"), expected[run.mean]))
    ]


@pytest.mark.quick("3")  # a sum of two has only one order
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_sums_are_formed_in_the_order_of_ranks(workers: WorkerPools, tmp_path: Any, world_size: int) -> None:
    assert workers(world_size).run(differing, RUNS, str(tmp_path)) == [[]] * world_size


@pytest.mark.quick("4")
@pytest.mark.parametrize("world_size", [4, 6, 8])
def test_two_levels_add_within_nodes_first(workers: WorkerPools, tmp_path: Any, world_size: int) -> None:
    small, then = (replace(each, collective="two-level", node_size=2) for each in (SMALL_ATOMS, LARGE_ATOMS))
    runs = {"small atoms, resumed": Run(small, then=replace(then, lanes=1), mean=by_node_of_two)}
    assert workers(world_size).run(differing, runs, str(tmp_path)) == [[]] * world_size


def test_the_order_of_ranks_shows() -> None:
    """Else the tests above could not fail."""
    for mean in (lambda gradients: in_order(gradients[::-1]), in_bfloat16):
        assert not all(map(torch.equal, twin(3, mean), twin(3, in_order)))
    assert not all(map(torch.equal, twin(4, by_node_of_two), twin(4, in_order)))
