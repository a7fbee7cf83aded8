"""The first and the last bucket travel in parts, before DDP hands them over: really, and only when all is in place.

Prevents: sums of gradients that are not complete yet, or of memory that is not the bucket's.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from ddp_hooks.dear.reduction.reduction import Reduction
from tests.support.dear import twins
from tests.support.dear.twins import CONFIG, Whole, compare, whole_batches
from tests.support.workers import WorkerPools

NAMES = [f"layers.{index}.weight" for index in range(6)]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(6)))

    def forward(self, values: Tensor) -> Tensor:
        return self.layers(values).square().mean()


def events_of_a_backward(
    rank: int, world_size: int, options: dict[str, Any], accumulate: bool, config: DearConfig = CONFIG
) -> list[str]:
    """What is launched in one backward, and where in between DDP hands over its buckets."""
    ddp = DistributedDataParallel(Layers(), bucket_cap_mb=0.02, gradient_as_bucket_view=True, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, config)
    ddp.register_comm_hook(state, dear_hook)
    events: list[str] = []

    def step() -> None:
        optimizer.zero_grad()
        if accumulate:
            with ddp.no_sync():
                ddp(torch.ones(2, 48)).backward()
            events.append("accumulated")
        ddp(torch.ones(2, 48)).backward()
        optimizer.step()

    for _ in range(3):
        step()
    reduce_scatter, reduce_bucket = state._driver.lanes.reduce_scatter, state.reduce_bucket

    def noted_reduce_scatter(partitions: Any, label: str, divisor: int = 1) -> Any:
        events.append(label)
        return reduce_scatter(partitions, label, divisor)

    def noted_reduce_bucket(bucket: Any) -> Any:
        events.append("last bucket" if bucket.is_last() else "bucket")
        return reduce_bucket(bucket)

    state._driver.lanes.reduce_scatter = noted_reduce_scatter  # type: ignore[method-assign]
    state.reduce_bucket = noted_reduce_bucket  # type: ignore[method-assign]
    events.clear()
    step()
    state.close()
    return events


@pytest.mark.parametrize("accumulate", [False, True])
def test_parts_of_the_last_bucket_travel_before_it_is_complete(workers: WorkerPools, accumulate: bool) -> None:
    for events in workers(2).run(events_of_a_backward, {}, accumulate):
        last = events.index("last bucket")
        assert events[last - 2 : last] == [NAMES[2], NAMES[1]], events
        assert events[last + 1 :] == [NAMES[0]], events
        if accumulate:
            assert events[0] == "accumulated", "launched in a backward that DDP does not reduce"


def test_parts_of_the_first_bucket_travel_before_it_is_complete(workers: WorkerPools) -> None:
    alone = replace(CONFIG, fusion="none", fusion_mb=None, atom_mb=0.01)
    for events in workers(2).run(events_of_a_backward, {}, False, alone):
        assert events[: events.index("bucket")] == [NAMES[5], NAMES[4]], events


LATE: list[dict[str, Any]] = [{"static_graph": True}]
if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:  # of newer versions of torch
    LATE.append({"batched_grad_copy": True})


@pytest.mark.parametrize("options", LATE, ids=lambda options: next(iter(options)))
def test_not_where_ddp_places_gradients_late(workers: WorkerPools, options: dict[str, Any]) -> None:
    for events in workers(2).run(events_of_a_backward, options, False):
        assert events[-1] == NAMES[0] and NAMES[1] not in events, f"the last bucket was cut for nothing: {events}"


class Wholes(nn.Module):
    """Layers of equal size with whole-number gradients; one of them is used in every other step only."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Whole((40, 50), world_size) for _ in range(8))

    def forward(self, seed: int) -> Tensor:
        total = torch.zeros(())
        for index, layer in enumerate(self.layers):
            if index != 1 or seed % 34 < 17:  # the same on all ranks: seeds of a step are close together
                total = layer(total, 100 * seed + index)
        return total


# Of accumulated gradients DDP's own sums are exact for these.
@pytest.mark.quick("plain-False-2", "two_backwards-True-2", "accumulate-False-2")
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize(
    "loop",
    [twins.plain, twins.two_backwards, twins.accumulate, twins.skipped_step, twins.never_zero_grad],
    ids=lambda loop: loop.__name__,
)
def test_sums_are_those_of_ddp(workers: WorkerPools, world_size: int, loop: Any, find_unused: bool) -> None:
    for outcome, num_ahead in workers(world_size).run(compare_and_count, loop, find_unused):
        assert outcome.bitwise and outcome.num_buckets > 1, outcome
        # Buckets that DDP never rebuilds are in the order of definition, where the atom that is complete last is first.
        assert find_unused or num_ahead >= 10, "hardly anything travelled ahead of its bucket"


def compare_and_count(rank: int, world_size: int, loop: Any, find_unused: bool) -> tuple[Any, int]:
    """The twins' outcome, and how many atoms were launched before DDP handed over their bucket."""
    num_ahead = 0
    check = Reduction._refuse_moved_memory

    def counting(reduction: Reduction) -> None:
        nonlocal num_ahead
        num_ahead += len(reduction._ahead)
        check(reduction)

    setattr(Reduction, "_refuse_moved_memory", counting)  # noqa: B010
    try:
        model = Wholes if find_unused else EveryWhole
        options = {"bucket_cap_mb": 0.04, "find_unused_parameters": find_unused}
        outcome = compare(rank, world_size, model, whole_batches, _momentum_sgd, loop, 15, ddp_options=options)
    finally:
        setattr(Reduction, "_refuse_moved_memory", check)  # noqa: B010
    return outcome, num_ahead


class EveryWhole(Wholes):
    """All of them in every step."""

    def forward(self, seed: int) -> Tensor:
        total = torch.zeros(())
        for index, layer in enumerate(self.layers):
            total = layer(total, 100 * seed + index)
        return total


def _momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def freeze_and_regroup(rank: int, world_size: int) -> list[float]:
    """A parameter that is frozen after wrapping, as in gradual unfreezing, cannot be watched, and need not be."""
    ddp = DistributedDataParallel(
        Layers(), bucket_cap_mb=0.02, gradient_as_bucket_view=True, find_unused_parameters=True
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, CONFIG)
    ddp.register_comm_hook(state, dear_hook)
    losses = []
    for step in range(4):
        if step == 2:
            ddp.module.layers[1].weight.requires_grad_(False)
            state.set_fusion("none")
        optimizer.zero_grad()
        loss = ddp(torch.ones(2, 48))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    state.close()
    return losses


def test_frozen_parameters_are_not_watched(workers: WorkerPools) -> None:
    for losses in workers(2).run(freeze_and_regroup):
        assert losses == sorted(losses, reverse=True)
