"""Checks of the set-up that hooks of DDP share; each returns the first problem, with a remedy, or None."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm.torch_compat.ddp import (
    comm_hook_registered,
    delays_all_reduce,
    managed_parameters,
    problem_of_reduced_set,
    sparse_parameters,
)
from ddp_hooks.comm.torch_compat.distributed import backend_of


def find_problem_of_types(ddp: object, config: object, config_type: type, state: str) -> str | None:
    if not isinstance(ddp, DistributedDataParallel):
        return f"{state} needs a DistributedDataParallel module, got {type(ddp).__name__}: wrap the model first"
    if not isinstance(config, config_type):
        return f"{state} takes its settings as {config_type.__name__}(...), got {type(config).__name__}"
    return None


def find_problem_of_optimizer_type(optimizer: object, state: str) -> str | None:
    if isinstance(optimizer, torch.optim.Optimizer):
        return None
    return (
        f"{state} takes the torch.optim.Optimizer that steps on the model, got {type(optimizer).__name__}: pass the "
        f"inner optimizer if it is wrapped"
    )


def find_problem_of_ddp(ddp: DistributedDataParallel) -> str | None:
    """Look at the settings by which DDP keeps gradients from a hook."""
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP's mixed_precision takes the one communication hook for itself: use torch.autocast instead"
    if comm_hook_registered(ddp):
        return (
            "the DDP module already has a communication hook, and takes only one: drop one of the two. To replace a "
            "state, close() it, and wrap the model again"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        return "skip_all_reduce_unused_params keeps buckets from the hook: leave it out"
    if delays_all_reduce(ddp):
        return "delay_all_reduce_named_params keeps parameters from the hook: leave it out"
    managed = managed_parameters(ddp)
    sparse = next((name for name in sparse_parameters(ddp) if name in managed), None)
    if sparse is not None:
        return (
            f"{sparse} has sparse gradients, with only the rows that are used: construct it with sparse=False, split "
            f"it with shard_embeddings(), or create an EmbeddingState before, which reduces it"
        )
    return None


def find_problem_of_parameters(ddp: DistributedDataParallel, state: str) -> str | None:
    parameters = managed_parameters(ddp).values()
    if not parameters:
        return "the model has no parameters to train"
    changed = problem_of_reduced_set(ddp, state)
    if changed is not None:
        return changed
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        return f"the parameters must be on one device, found {sorted(map(str, devices))}"
    device = devices.pop()
    backend = backend_of(ddp.process_group, device)
    if device.type != "cpu" and backend != "nccl":
        return f"parameters on {device.type} need the nccl backend, found {backend}"
    return None


def find_problem_of_dtypes(ddp: DistributedDataParallel) -> str | None:
    """Look for gradients that are not real numbers of 16 bits or more."""
    for name, parameter in managed_parameters(ddp).items():
        if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
            return (
                f"{name} is {parameter.dtype}, which is not supported: use float32, float64, bfloat16 or float16, or "
                f"keep it out of DDP with requires_grad_(False)"
            )
    return None


def find_problem_of_nodes(node_size: object, world_size: int) -> str | None:
    """Look whether nodes of ``node_size`` ranks, if that is a number, make two levels."""
    if not isinstance(node_size, int) or (node_size < world_size and world_size % node_size == 0):
        return None
    if node_size == world_size:
        return (
            f"node_size={node_size} makes all {node_size} ranks one node, and within a node everything is sent: leave "
            f"it out, or use DearState, which is exact"
        )
    return about_uneven_nodes(node_size, world_size, "leave it out")


def about_uneven_nodes(node_size: int, world_size: int, without_nodes: str) -> str:
    """Return the refusal of nodes that would not be equal; ``without_nodes`` is the remedy where no size would do."""
    possible = [number for number in range(2, world_size) if world_size % number == 0]
    remedy = f"possible are {possible}" if possible else without_nodes
    return f"node_size must divide the number of ranks, {world_size}: got {node_size}, {remedy}"


def fingerprint(ddp: DistributedDataParallel, config: object) -> dict[str, object]:
    """Return entries that must be equal on all ranks, by name: versions, settings, parameters."""
    from ddp_hooks import __version__

    entries: dict[str, object] = {
        "torch version": torch.__version__,
        "ddp_hooks version": __version__,
        type(config).__name__: config,
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
    }
    for name, p in managed_parameters(ddp).items():
        entries[f"parameter {name}"] = f"{tuple(p.shape)} {p.dtype} strides {p.stride()}"
    return entries
