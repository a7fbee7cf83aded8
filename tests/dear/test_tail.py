"""The last bucket travels in parts, before DDP hands it over: really, and only when its gradients are in their place.

That the sums are right is tested with everything else, bit for bit, in test_exact.py and test_models.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearState, dear_hook
from tests.dear import twins
from tests.dear.twins import CONFIG, WholeNumbers, compare, whole_batches
from tests.workers import WorkerPools

NAMES = [f"layers.{index}.weight" for index in range(6)]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(6)))

    def forward(self, values: Tensor) -> Tensor:
        return self.layers(values).square().mean()


def events_of_a_backward(rank: int, world_size: int, options: dict[str, Any], accumulate: bool) -> list[str]:
    """What is launched in one backward, and where in between DDP hands over its buckets."""
    ddp = DistributedDataParallel(Layers(), bucket_cap_mb=0.02, gradient_as_bucket_view=True, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = DearState(ddp, optimizer, CONFIG)
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
    reduce_scatter, reduce_bucket = state._lanes.reduce_scatter, state.reduce_bucket

    def noted_reduce_scatter(partitions: Any, label: str, divisor: int = 1) -> Any:
        events.append(label)
        return reduce_scatter(partitions, label, divisor)

    def noted_reduce_bucket(bucket: Any) -> Any:
        events.append("last bucket" if bucket.is_last() else "bucket")
        return reduce_bucket(bucket)

    state._lanes.reduce_scatter = noted_reduce_scatter  # type: ignore[method-assign]
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


@pytest.mark.parametrize("options", [{"static_graph": True}, {"batched_grad_copy": True}], ids=lambda o: next(iter(o)))
def test_not_where_ddp_places_gradients_late(workers: WorkerPools, options: dict[str, Any]) -> None:
    for events in workers(2).run(events_of_a_backward, options, False):
        assert events[events.index("last bucket") + 1 :] == [NAMES[2], NAMES[1], NAMES[0]], events


@pytest.mark.parametrize("world_size", [1, 2, 4])  # of accumulated gradients DDP's own sums are exact for these
@pytest.mark.parametrize(
    "loop", [twins.plain, twins.two_backwards, twins.accumulate, twins.skipped_step], ids=lambda loop: loop.__name__
)
def test_sums_are_those_of_ddp(workers: WorkerPools, world_size: int, loop: Any) -> None:
    """One bucket, so that all of it is a tail."""
    for outcome in workers(world_size).run(_compare_in_one_bucket, loop):
        assert outcome.bitwise and outcome.num_buckets == 1 and outcome.num_atoms > 6, outcome


def _compare_in_one_bucket(rank: int, world_size: int, loop: Any) -> Any:
    options = {"bucket_cap_mb": 25}
    return compare(rank, world_size, WholeNumbers, whole_batches, _momentum_sgd, loop, 12, ddp_options=options)


def _momentum_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
