"""Training in fewer bits: fewer bytes, and nearly the same weights, the same on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_ext import ExtConfig
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.twins import CONFIG, Trainee, with_codecs
from tests.support.workers import WorkerPools


def train(rank: int, world_size: int, config: ExtConfig, loop: Any, idle: bool) -> tuple[list[float], int]:
    """A parameter after 12 steps, and the bytes that were sent."""
    torch.manual_seed(5)
    model = twins.shard(twins.WholeNumbers(world_size, idle=idle))
    extension = twins.extend(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.5)
    twin = Trainee(model, optimizer, lambda step: 1000 * step + 10 * rank)
    for step in range(12):
        loop(twin, step)
    sent = extension.stats().sent_bytes
    twins.restore(model)
    parameters: list[Any] = list(model.parameters())
    return parameters[1].full_tensor().flatten().tolist(), sent


@pytest.mark.quick("bf16-1.9-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("name", "least"), [("bf16", 1.9), ("int8", 3.0), ("int4", 5.0)])
def test_training_with_fewer_bytes(workers: WorkerPools, world_size: int, name: str, least: float) -> None:
    exact = workers(world_size).run(train, CONFIG, twins.plain, False)
    rounded = workers(world_size).run(train, with_codecs(name, name), twins.plain, False)
    assert exact[0][1] / rounded[0][1] > least
    weights = torch.tensor([run[0] for run in rounded])
    assert torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[0], torch.tensor(exact[0][0]), rtol=0.02, atol=0.02)
    assert (rounded[0][0] != exact[0][0]) == (name != "bf16"), "small whole numbers are bfloat16's, too"


@pytest.mark.quick("True-accumulate")
@pytest.mark.parametrize("loop", [twins.two_backwards, twins.accumulate, twins.two_forwards])
@pytest.mark.parametrize("idle", [False, True])
def test_loops_with_int8(workers: WorkerPools, loop: Any, idle: bool) -> None:
    exact = workers(2).run(train, CONFIG, loop, idle)[0]
    rounded = workers(2).run(train, with_codecs("int8", "int8"), loop, idle)[0]
    torch.testing.assert_close(torch.tensor(rounded[0]), torch.tensor(exact[0]), rtol=0.03, atol=0.05)


@pytest.mark.slow
def test_error_feedback_is_a_choice(workers: WorkerPools) -> None:
    with_it, without = (
        workers(2).run(train, with_codecs("exact", "int8", error_feedback=choice), twins.plain, False)[0][0]
        for choice in (True, False)
    )
    exact = torch.tensor(workers(2).run(train, CONFIG, twins.plain, False)[0][0])
    gap, gap_without = ((torch.tensor(each) - exact).abs().mean() for each in (with_it, without))
    assert 0 < gap < gap_without
