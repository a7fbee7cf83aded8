"""Checks of the set-up: everything that cannot work is refused before anything is changed, with a remedy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import agree, agree_on_node_size
from ddp_hooks.comm.torch_compat.ddp import managed_parameters
from ddp_hooks.intercept import ddp_checks
from ddp_hooks.quantized.config import QuantizedConfig


def agree_on_setup(
    ddp: DistributedDataParallel, config: QuantizedConfig, scaler: torch.amp.GradScaler | None
) -> tuple[dist.ProcessGroup, int]:
    """Return the model's group, and the ranks per node, 1 for one level; collective.

    Raises:
        ValueError: on every rank, if the set-up cannot work, or if ranks differ.
    """
    group = getattr(ddp, "process_group", None) or dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    problem = (
        ddp_checks.find_problem_of_types(ddp, config, QuantizedConfig, "QuantizedState")
        or ddp_checks.find_problem_of_ddp(ddp)
        or ddp_checks.find_problem_of_parameters(ddp, "QuantizedState")
        or ddp_checks.find_problem_of_dtypes(ddp)
        or _problem_of_bits(ddp, config)
        or ddp_checks.find_problem_of_nodes(config.node_size, dist.get_world_size(group))
    )
    entries: dict[str, object] = {}
    if problem is None:
        entries = ddp_checks.fingerprint(ddp, config) | {"a gradient scaler": "none" if scaler is None else "given"}
    agree(entries, problem, group, "the set-up of QuantizedState", config)
    return group, agree_on_node_size(config.node_size, group, "the set-up of QuantizedState", config)


def _problem_of_bits(ddp: DistributedDataParallel, config: QuantizedConfig) -> str | None:
    dtypes = {parameter.dtype for parameter in managed_parameters(ddp).values()}
    if any(config.codec_for(dtype) is not None for dtype in dtypes):
        return None
    found = ", ".join(sorted(map(str, dtypes)))
    return f"bits={config.bits} saves nothing, because all gradients are {found}: use bits=8, or plain DDP"
