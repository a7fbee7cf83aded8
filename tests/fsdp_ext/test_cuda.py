"""Extended FSDP2 on NCCL: its own exact collectives stay, and encoded ones run on its streams.

Prevents: another rounding on GPUs than on processors, and memory that is read before a stream has written it, or used
again while another still reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_ext import ExtConfig, extend, restore
from fsdp_ext.all_gather import NativeAllGather
from fsdp_ext.reduce_scatter import NativeReduceScatter
from tests.support.devices import rank_device
from tests.support.fsdp_ext import native, tables, tuning, twins
from tests.support.fsdp_ext.native import CASES, HOWS
from tests.support.fsdp_ext.twins import CONFIG, Trainee, with_codecs
from tests.support.workers import WorkerPools

BF16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("loop", "world_size", "replicas", "options"),
    [
        (twins.plain, 1, 1, {}),
        (twins.plain, 2, 1, {}),
        (twins.two_backwards, 2, 1, {}),
        (twins.accumulate, 2, 1, BF16),
        (twins.clip, 2, 1, {"reshard_after_forward": False}),
        (twins.plain, 4, 2, {}),
    ],
    ids=["one", "two", "two_backwards", "bfloat16", "kept", "replicas"],
)
def test_exact(
    gpu_workers: WorkerPools,
    loop: Callable[[Trainee, int], None],
    world_size: int,
    replicas: int,
    options: dict[str, Any],
) -> None:
    run = partial(twins.compare, num_steps=4, options=options, replicas=replicas)
    for outcome in gpu_workers(world_size).run(run, loop):
        assert outcome.moved and outcome.differing == []
        assert outcome.stats.gathers == outcome.stats.reduce_scatters == 0, "FSDP2's own communication has not stayed"


@pytest.mark.parametrize(("gather", "scatter", "how"), CASES)
def test_the_same_as_on_processors(
    workers: WorkerPools, gpu_workers: WorkerPools, gather: Any, scatter: Any, how: str
) -> None:
    config = with_codecs(gather, scatter)
    world_size = HOWS[how].get("world_size", 3)
    lanes = workers(world_size).run(native.train, config, False, HOWS[how])
    ours = gpu_workers(world_size).run(native.train, config, False, HOWS[how])
    assert ours[0]["kinds"] == {"NativeAllGather", "NativeReduceScatter"}
    assert ours[0]["restored"] == {"DefaultAllGather", "DefaultReduceScatter"}
    # The optimizer rounds otherwise there; residuals, which are among the values, have whole numbers' steps.
    for mine, expected in zip(ours, lanes, strict=True):
        torch.testing.assert_close(torch.tensor(mine["values"]), torch.tensor(expected["values"]))


class Deep(nn.Module):
    """Blocks that compute for a while, so that communication overlaps with it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(1024), nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(6)
        )

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = values + block(values)
        return values.float().square().mean()


def in_turns(communication: Any) -> Any:
    """The same, but alone on the GPU."""

    def call(*arguments: Any, **more: Any) -> Any:
        torch.cuda.synchronize()
        result = communication(*arguments, **more)
        torch.cuda.synchronize()
        return result

    return call


def train_deep(rank: int, world_size: int, config: ExtConfig, alone: bool) -> Tensor:
    """This rank's shards in the end."""
    with pytest.MonkeyPatch.context() as patch:
        if alone:
            for kind in (NativeAllGather, NativeReduceScatter):
                patch.setattr(kind, "__call__", in_turns(kind.__call__))
        torch.manual_seed(7)
        model = Deep().to(rank_device())
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        extend(model, config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(100 + rank)
        for _ in range(6):
            optimizer.zero_grad()
            for _ in range(2):
                model(torch.randn(2048, 1024, device=rank_device())).backward()
            optimizer.step()
        shards = torch.cat([twins.local(parameter).flatten() for parameter in model.parameters()]).cpu()
        restore(model)
    return shards


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("error_feedback", [True, False])
def test_streams_wait_for_each_other(gpu_workers: WorkerPools, world_size: int, error_feedback: bool) -> None:
    config = replace(CONFIG, all_gather="int8", reduce_scatter="int8", error_feedback=error_feedback)
    alone = gpu_workers(world_size).run(train_deep, config, True)
    for repeat in range(3):
        beside = gpu_workers(world_size).run(train_deep, config, False)
        for rank, (ours, expected) in enumerate(zip(beside, alone, strict=True)):
            assert torch.equal(ours, expected), f"rank {rank} in repeat {repeat}"


@pytest.mark.parametrize("world_size", [1, 2])
def test_tables_beside_it(gpu_workers: WorkerPools, world_size: int) -> None:
    assert max(gpu_workers(world_size).run(tables.as_one_process)) < 1e-12


def test_checkpoints_of_tables(gpu_workers: WorkerPools, tmp_path: Path) -> None:
    saved, later = gpu_workers(2).run(tables.train_and_save, str(tmp_path))[0]
    for loaded, resumed in gpu_workers(2).run(tables.resume, str(tmp_path)):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert all(torch.equal(resumed[name], later[name]) for name in later)


def test_searching(gpu_workers: WorkerPools, tmp_path: Path) -> None:
    outcomes = gpu_workers(2).run(tuning.tuned_for_real, str(tmp_path / "profile.json"))
    for outcome in outcomes:
        assert outcome["found"] == outcomes[0]["found"] and outcome["found"].step_s > 0 and outcome["changed"]
