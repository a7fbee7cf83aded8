"""FSDP2's private names, and torch's that only fsdp_ext needs. Nothing is changed here.

``extend`` asks :func:`find_missing_name` first, so that all other functions find the names that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather as DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as DefaultReduceScatter

from ddp_hooks.comm.torch_compat.overrides import version_of


def overrides_are_enabled() -> bool:
    """Return True if functions call ``__torch_function__``; a backward started from a tensor subclass disables it."""
    return torch._C._is_torch_function_enabled()


def has_grad_ready_hooks(parameter: Tensor) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def chunk_cat(gradients: Sequence[Tensor], output: Tensor) -> None:
    """Write rank r's rows of all gradients to ``output[r]``, (P, columns), as FSDP2 does."""
    torch._chunk_cat(list(gradients), dim=0, num_chunks=len(output), out=output)


# -- modules and their groups of parameters ----------------------------------------------------------------------------


def find_missing_name(module: FSDPModule) -> str | None:
    """Return Python's message about a name that this version of torch lacks; None if it has all."""
    reads: list[Callable[[FSDPModule], object]] = [keeps_parameters, holds_a_gather, prefetch_lists]
    try:
        if num_param_groups(module) == 1 and not is_replicated(module):
            reads += [communication_of, num_shards, replicas_of, holds_other_modules, runs_forward]
            reads += [facts_of, columns_of, whole_parameters_of, reduces_in_this_backward]
        for read in reads:
            read(module)
    except AttributeError as error:
        return str(error)
    return None


def state_of(module: FSDPModule) -> Any:
    """Return what modules wrapped together share."""
    return module._get_fsdp_state()


def _groups(module: FSDPModule) -> Sequence[Any]:
    state = state_of(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch 2.11 has at most one


def _group(module: FSDPModule) -> Any:
    (group,) = _groups(module)
    return group


def num_param_groups(module: FSDPModule) -> int:
    """Return the number of groups that communicate separately; 0 for a module without parameters of its own."""
    return len(_groups(module))


def communication_of(module: FSDPModule) -> tuple[Any, Any] | None:
    """Return the all-gather and reduce-scatter objects of a module, or of its first group; None without parameters."""
    groups = _groups(module)
    return (groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm) if groups else None


def num_shards(module: FSDPModule) -> int:
    """Return the number of ranks that shard the parameters outside of forward and backward."""
    return int(_group(module).mesh_info.shard_mesh_size)


def is_replicated(module: FSDPModule) -> bool:
    """Return True if parameters are whole on every rank (replicate_with_fsdp)."""
    return any(group.mesh_info.shard_mesh_dim is None for group in _groups(module))


def replicas_of(module: FSDPModule) -> dist.ProcessGroup | None:
    """Return the ranks with the same shards as this one (HSDP)."""
    return getattr(_group(module).mesh_info, "replicate_process_group", None)


def num_ranks_around(mesh: DeviceMesh) -> int:
    """Return the size of the mesh that this one is a slice of."""
    return mesh._get_root_mesh().size()


def holds_other_modules(module: FSDPModule) -> bool:
    """Return True if FSDP modules are inside of this one, or inside of one wrapped together with it."""
    inside = (each for top in _group(module).modules for each in top.modules() if isinstance(each, FSDPModule))
    return len(set(map(state_of, inside))) > 1


# -- gathers -----------------------------------------------------------------------------------------------------------


def keeps_parameters(module: FSDPModule) -> bool:
    """Return True if parameters stay whole between forward and backward."""
    return all(group.post_forward_mesh_info is None for group in _groups(module))


def holds_a_gather(module: FSDPModule) -> bool:
    """Return True if parameters were gathered and not used so far."""
    return any(group._all_gather_result is not None for group in _groups(module))


def runs_forward(module: FSDPModule) -> bool:
    """Return True if the module is in its forward, or about to enter it."""
    return bool(_group(module)._training_state.name == "FORWARD")


def prefetch_lists(module: FSDPModule) -> tuple[list[Any], list[Any]]:
    """Return the states of the modules to prefetch in forward, and in backward."""
    state = state_of(module)
    return list(state._states_to_forward_prefetch), list(state._states_to_backward_prefetch)


def shard_version(module: FSDPModule) -> tuple[object, ...]:
    """Return a value that differs after the module's shards were changed: PyTorch's counts, and some numbers.

    PyTorch does not count writes by ``.data``, foreach operations and fused optimizers.
    """
    parameters = facts_of(module).parameters
    # A write to a DTensor does not count for the tensor that it holds.
    shards = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
    count = sum(version_of(tensor) for tensor in (*parameters, *shards) if not tensor.is_inference())
    numbers = []
    for shard in (shards[0], shards[len(shards) // 2], shards[-1]):
        if shard.numel() and shard.device.type == "cpu":
            numbers += [repr(shard[(place,) * shard.ndim].item()) for place in (0, -1)]  # as text NaN equals NaN
    return count, *numbers


# -- reductions --------------------------------------------------------------------------------------------------------


class GroupFacts(NamedTuple):
    """Facts about a module that decide when its reduced gradients are read."""

    parameters: tuple[Tensor, ...]  # sharded, in the order in which FSDP2 flattens them
    original_dtype: torch.dtype | None  # of parameters that were trained at first; None before the first forward
    replicated: bool  # other ranks have the same shards (HSDP)
    is_partial: bool  # FSDP2 keeps the result, for an all-reduce in a later backward (set_requires_all_reduce)
    partial_sum: Tensor | None  # of such results of earlier backwards
    hooked: bool  # a hook of FSDPModule.set_all_reduce_hook gets the result
    offloads: bool  # gradients are copied to the CPU
    factor: float | None  # divisor of the sum over all ranks (set_gradient_divide_factor)


def facts_of(module: FSDPModule) -> GroupFacts:
    group = _group(module)
    replicated = hasattr(group.mesh_info, "replicate_process_group")
    return GroupFacts(
        parameters=tuple(param.sharded_param for param in group.fsdp_params),
        original_dtype=getattr(group, "_orig_dtype", None),
        replicated=replicated,
        is_partial=replicated and not group.all_reduce_grads,
        partial_sum=group._partial_reduce_output,
        hooked=group._all_reduce_hook is not None,
        offloads=any(param.offload_to_cpu for param in group.fsdp_params),
        factor=group.gradient_divide_factor,
    )


@dataclass(frozen=True)
class Column:
    """Range of one parameter in the memory that FSDP2 reduces; every rank's part has the same columns."""

    owner: nn.Module
    name: str  # of the parameter in its owner
    parameter: Tensor = field(compare=False)  # sharded
    start: int  # within the part of one rank
    stop: int  # padding may follow the rank's shard


def columns_of(module: FSDPModule) -> tuple[Column, ...]:
    """Return the columns of all trained parameters, as if all had gradients (foreach_reduce_scatter_copy_in)."""
    columns: list[Column] = []
    for param in (param for group in _groups(module) for param in group.fsdp_params):
        parameter, place = param.sharded_param, param._module_info
        if parameter.requires_grad:
            start = columns[-1].stop if columns else 0
            stop = start + param.padded_sharded_param_size.numel()
            columns.append(Column(place.module, place.param_name, parameter, start, stop))
    return tuple(columns)


def columns_in(module: FSDPModule, numel: int) -> tuple[Column, ...] | None:
    """Return :func:`columns_of`; None if ``numel`` elements are not a rank's part of all gradients."""
    columns = columns_of(module)
    return columns if columns and columns[-1].stop == numel else None


def whole_parameters_of(module: FSDPModule) -> tuple[Tensor, ...] | None:
    """Return the trained parameters as they are while the module runs, in the order of :func:`columns_of`.

    None before the first gather, and where ranks' parts of a gradient are not simply its rows.
    """
    trained = [param for param in _group(module).fsdp_params if param.sharded_param.requires_grad]
    for param in trained:
        if param.is_dtensor or param.fsdp_placement.dim != 0 or not hasattr(param, "_unsharded_param"):
            return None
    return tuple(param._unsharded_param for param in trained)


def reduces_in_this_backward(module: FSDPModule) -> bool:
    """Return True if the module's end reduces this backward's gradients, and no others.

    With ``set_requires_gradient_sync(False)`` FSDP2 reduces none, and later adds them to another backward's.
    """
    group = _group(module)
    added = any(param.unsharded_accumulated_grad is not None for param in group.fsdp_params)
    return not added and group.reduce_grads


def divisor_of(op: Any, gradients: Tensor, world_size: int) -> int:
    """Return the divisor of the sum that ``op`` asks for; multiply ``gradients`` in place by another factor."""
    if op == dist.ReduceOp.AVG:
        return world_size
    if op == dist.ReduceOp.SUM:
        return 1
    if op == dist.ReduceOp.PREMUL_SUM:  # set_gradient_divide_factor
        gradients.mul_(op.factor if hasattr(op, "factor") else op.__getstate__()[1])  # torch 2.11 has no attribute
        return 1
    raise NotImplementedError(f"gradients are reduced by sums and means, got {op}")
