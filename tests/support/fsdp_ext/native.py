"""Training with native collectives of compressed numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fsdp_ext import ExtConfig, checks
from tests.support.devices import rank_device
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.life import communication
from tests.support.fsdp_ext.twins import Trainee


def train(rank: int, world_size: int, config: ExtConfig, native: bool, how: dict[str, Any]) -> dict[str, Any]:
    """Return parameters and residuals after some steps."""
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
CASES = [("int8", "int8", how) for how in HOWS] + [
    ("bf16", "exact", "plain"), ("exact", "bf16", "plain"), ("int4", "int4", "two backwards"),
]  # fmt: skip
