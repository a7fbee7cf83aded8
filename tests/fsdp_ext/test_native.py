"""What accelerators do, on CPUs: encoded numbers in the backend's own collectives, the same as in rings.

Prevents: another rounding there than here; models on accelerators whose exact communication is replaced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fsdp_ext import ExtConfig, checks
from tests.devices import rank_device
from tests.fsdp_ext import twins
from tests.fsdp_ext.test_life import communication
from tests.fsdp_ext.twins import CONFIG, Trainee, with_codecs
from tests.workers import WorkerPools


def train(rank: int, world_size: int, config: ExtConfig, native: bool, how: dict[str, Any]) -> dict[str, Any]:
    """Parameters, and what gradients have lost, after some steps."""
    torch.manual_seed(5)
    mesh = twins.mesh_of(world_size, how.get("replicas", 1))
    original = twins.WholeNumbers(world_size, **how.get("model", {})).to(rank_device())
    model = twins.shard(original, mesh, **how.get("options", {}))
    if how.get("factor"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(how["factor"])
                module.set_force_sum_reduction_for_comms(True)
    with pytest.MonkeyPatch.context() as patch:
        if native:
            patch.setattr(checks, "is_on_cpu", lambda module: False)
        extension = twins.extend(model, config)
    kinds = communication(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.5)
    twin = Trainee(model, optimizer, lambda step: 1000 * step + 10 * rank)
    for step in range(6):
        how.get("loop", twins.plain)(twin, step)
    values: list[Any] = [*model.parameters(), *extension.state_dict().values()]
    found = [value for each in values for value in twins.local(each).flatten().tolist()]
    twins.restore(model)
    return {"kinds": set(kinds), "values": found, "restored": set(communication(model))}


HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two backwards": {"loop": twins.two_backwards},
    "accumulation": {"loop": twins.accumulate},
    "replicas": {"world_size": 4, "replicas": 2},
    "bfloat16": {"options": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}},
    "unused parameters": {"model": {"idle": True}},
    "another factor": {"factor": 2.0},
    "kept parameters": {"options": {"reshard_after_forward": False}},
    "kept on two ranks": {"world_size": 4, "options": {"reshard_after_forward": 2}},
}


CASES = [("int8", "int8", how) for how in HOWS] + [("bf16", "exact", "plain"), ("exact", "bf16", "plain")]


@pytest.mark.parametrize(("gather", "scatter", "how"), CASES)
def test_the_same_as_rings(workers: WorkerPools, gather: Any, scatter: Any, how: str) -> None:
    config = with_codecs(gather, scatter)
    world_size = HOWS[how].get("world_size", 3)
    rings = workers(world_size).run(train, config, False, HOWS[how])
    native = workers(world_size).run(train, config, True, HOWS[how])
    assert rings[0]["kinds"] == {"RingAllGather", "RingReduceScatter"}
    assert native[0]["kinds"] == {"NativeAllGather", "NativeReduceScatter"}
    assert native[0]["restored"] == {"DefaultAllGather", "DefaultReduceScatter"}
    assert [each["values"] for each in native] == [each["values"] for each in rings]


def test_exact_communication_stays(workers: WorkerPools) -> None:
    found = workers(2).run(train, CONFIG, True, {})
    assert found[0]["kinds"] == {"DefaultAllGather", "DefaultReduceScatter"}


def sparse_is_refused(rank: int, world_size: int) -> str:
    model = twins.shard(twins.WholeNumbers(world_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "is_on_cpu", lambda module: False)
        try:
            twins.extend(model, replace(CONFIG, reduce_scatter="sparse"))
        except ValueError as error:
            return str(error)
    return "nothing was raised"


def test_sparse_is_refused(workers: WorkerPools) -> None:
    messages = workers(2).run(sparse_is_refused)
    assert "on an accelerator, where reduce_scatter='sparse' is not supported: take 'int8' or 'bf16'" in messages[0]
    assert messages[0] == messages[1]
