"""FSDP2's private names, and torch's that only fsdp_ext needs; None where a version of torch lacks one.

Nothing is changed here. Without an answer a caller does what is always right (it waits), or what FSDP2 does by default.
Where a setting would then have no effect, ``extend`` raises (:func:`fsdp_ext.checks.find_problem`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter

# -- tensors and backwards ---------------------------------------------------------------------------------------------


def overrides_are_enabled() -> bool:
    """Return True if functions call ``__torch_function__``; a backward started from a tensor subclass disables it."""
    return torch._C._is_torch_function_enabled()


def version_of(tensor: Tensor) -> int:
    """Return how often PyTorch has counted a write to the memory of ``tensor``."""
    return tensor._version


def has_grad_ready_hooks(parameter: Tensor) -> bool:
    """Return True if the parameter has hooks of ``register_post_accumulate_grad_hook``."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def chunk_cat(gradients: Sequence[Tensor], output: Tensor) -> None:
    """Write rank r's rows of all gradients to ``output[r]``, (P, columns), as FSDP2 does."""
    torch._chunk_cat(list(gradients), dim=0, num_chunks=len(output), out=output)


# -- modules and their groups of parameters ----------------------------------------------------------------------------


def state_of(module: FSDPModule) -> object | None:
    """Return the state that modules wrapped together share."""
    get = getattr(module, "_get_fsdp_state", None)
    return None if get is None else get()


def _param_groups(module: FSDPModule) -> Sequence[Any] | None:
    state = state_of(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):  # torch 2.11 has at most one
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return None


def _param_group(module: FSDPModule) -> Any:
    """The module's only group; None if it has none or several, or torch does not tell."""
    groups = _param_groups(module)
    return groups[0] if groups is not None and len(groups) == 1 else None


def num_param_groups(module: FSDPModule) -> int | None:
    """Return the number of groups that communicate separately; 0 for a module without parameters of its own."""
    groups = _param_groups(module)
    return None if groups is None else len(groups)


def communication_of(module: FSDPModule) -> tuple[Any, Any] | None:
    """Return the module's all-gather and reduce-scatter objects."""
    groups = _param_groups(module)
    if not groups:
        return None
    gather = getattr(groups[0], "_all_gather_comm", None)
    scatter = getattr(groups[0], "_reduce_scatter_comm", None)
    return None if gather is None or scatter is None else (gather, scatter)


def num_shards(module: FSDPModule) -> int | None:
    """Return the number of ranks that shard the parameters outside of forward and backward."""
    groups = _param_groups(module)
    return getattr(groups[0].mesh_info, "shard_mesh_size", None) if groups else None


def is_replicated(module: FSDPModule) -> bool:
    """Return True if parameters are whole on every rank (replicate_with_fsdp)."""
    return any(getattr(group.mesh_info, "shard_mesh_dim", 0) is None for group in _param_groups(module) or ())


def replicas_of(module: FSDPModule) -> dist.ProcessGroup | None:
    """Return the ranks with the same shards as this one (HSDP)."""
    groups = _param_groups(module)
    return getattr(groups[0].mesh_info, "replicate_process_group", None) if groups else None


def num_ranks_around(mesh: DeviceMesh) -> int:
    """Return the size of the mesh that this one is a slice of."""
    get = getattr(mesh, "_get_root_mesh", None)
    root: DeviceMesh = mesh if get is None else get()
    return root.size()


def holds_other_modules(module: FSDPModule) -> bool:
    """Return True if FSDP modules are inside of this one, or inside of one wrapped together with it."""
    together: list[Any] = [module]
    for group in _param_groups(module) or ():
        together += getattr(group, "modules", ())
    states = {id(state_of(each)) for top in together for each in top.modules() if isinstance(each, FSDPModule)}
    return len(states) > 1


# -- gathers -----------------------------------------------------------------------------------------------------------


def keeps_parameters(module: FSDPModule) -> bool:
    """Return True if parameters stay whole between forward and backward."""
    return all(getattr(group, "post_forward_mesh_info", module) is None for group in _param_groups(module) or ())


def holds_a_gather(module: FSDPModule) -> bool:
    """Return True if parameters were gathered and not used so far."""
    return any(getattr(group, "_all_gather_result", True) is not None for group in _param_groups(module) or ())


def runs_forward(module: FSDPModule) -> bool:
    """Return True if the module is in its forward, or about to enter it."""
    states = (getattr(group, "_training_state", None) for group in _param_groups(module) or ())
    return any(getattr(state, "name", "") == "FORWARD" for state in states)


def forward_list(module: FSDPModule) -> list[object]:
    """Return the states of the modules to prefetch in forward."""
    return list(getattr(state_of(module), "_states_to_forward_prefetch", ()))


def backward_list(module: FSDPModule) -> list[object]:
    """Return the states of the modules to prefetch in backward."""
    return list(getattr(state_of(module), "_states_to_backward_prefetch", ()))


def shard_version(module: FSDPModule) -> tuple[object, ...] | None:
    """Return a value that differs after the module's shards were changed: PyTorch's counts, and some numbers.

    PyTorch does not count writes by ``.data``, foreach operations and fused optimizers.
    """
    facts = facts_of(module)
    if facts is None:
        return None
    # A write to a DTensor does not count for the tensor that it holds.
    shards = [getattr(parameter, "_local_tensor", parameter) for parameter in facts.parameters]
    count = sum(tensor._version for tensor in (*facts.parameters, *shards) if not tensor.is_inference())
    some = {0, len(shards) // 2, len(shards) - 1} if shards else set()
    return count, *(number for index in sorted(some) for number in _ends_of(shards[index]))


def _ends_of(tensor: Tensor) -> Iterator[str]:
    """The first and the last number, as text, so that NaN equals NaN."""
    if tensor.numel() and tensor.device.type == "cpu":
        for place in (0, -1):
            yield repr(tensor[(place,) * tensor.ndim].item())


# -- reductions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupFacts:
    """Facts about a module that decide when its reduced gradients are read.

    Args:
        parameters: sharded, in the order in which FSDP2 flattens them.
        original_dtype: of the sharded parameters that were trained at first; None if none was.
        replicated: True if other ranks have the same shards (HSDP).
        sums_replicas_at_once: True if, with replicas, an all-reduce of this result alone follows a reduce-scatter;
            False if FSDP2 adds several results first (set_requires_all_reduce).
        hooked: True if a hook of :meth:`FSDPModule.set_all_reduce_hook` gets the result.
        offloads: True if gradients are copied to the CPU.
        factor: divisor of the sum over all ranks (set_gradient_divide_factor), or None.
    """

    parameters: tuple[Tensor, ...]
    original_dtype: torch.dtype | None
    replicated: bool
    sums_replicas_at_once: bool
    hooked: bool
    offloads: bool
    factor: float | None


def facts_of(module: FSDPModule) -> GroupFacts | None:
    """See :class:`GroupFacts`."""
    group = _param_group(module)
    if group is None:
        return None
    try:
        return GroupFacts(
            parameters=tuple(param.sharded_param for param in group.fsdp_params),
            original_dtype=group._orig_dtype,
            replicated=hasattr(group.mesh_info, "replicate_process_group"),
            sums_replicas_at_once=group.all_reduce_grads and group._partial_reduce_output is None,
            hooked=group._all_reduce_hook is not None,
            offloads=any(param.offload_to_cpu for param in group.fsdp_params),
            factor=group.gradient_divide_factor,
        )
    except AttributeError:
        return None


@dataclass(frozen=True)
class Column:
    """Range of one parameter in the memory that FSDP2 reduces; every rank's part has the same columns.

    Args:
        owner, name: module of the parameter, and the parameter's name there.
        parameter: sharded.
        start, stop: elements within the part of one rank; padding may follow the rank's shard.
    """

    owner: nn.Module
    name: str
    parameter: Tensor = field(compare=False)
    start: int
    stop: int


def columns_of(module: FSDPModule) -> tuple[Column, ...] | None:
    """Return the columns of all trained parameters, as if all had gradients (foreach_reduce_scatter_copy_in)."""
    group = _param_group(module)
    if group is None:
        return None
    columns: list[Column] = []
    try:
        for param in group.fsdp_params:
            parameter, place = param.sharded_param, param._module_info
            if parameter.requires_grad:
                start = columns[-1].stop if columns else 0
                stop = start + param.padded_sharded_param_size.numel()
                columns.append(Column(place.module, place.param_name, parameter, start, stop))
    except AttributeError:
        return None
    return tuple(columns)


def columns_in(module: FSDPModule, numel: int) -> tuple[Column, ...] | None:
    """Return :func:`columns_of`; None if ``numel`` elements are not a rank's part of all gradients."""
    columns = columns_of(module)
    return columns if columns and columns[-1].stop == numel else None


def whole_parameters_of(module: FSDPModule) -> tuple[Tensor, ...] | None:
    """Return the trained parameters as they are while the module runs, in the order of :func:`columns_of`.

    None before the first gather, and where ranks' parts of a gradient are not simply its rows.
    """
    group = _param_group(module)
    if group is None:
        return None
    try:
        trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad]
        if any(param.is_dtensor or param.fsdp_placement.dim != 0 for param in trained):
            return None
        return tuple(param._unsharded_param for param in trained)
    except AttributeError:
        return None


def reduces_in_this_backward(module: FSDPModule) -> bool:
    """Return True if the module's end reduces this backward's gradients, and no others.

    With ``set_requires_gradient_sync(False)`` FSDP2 reduces none, and later adds them to another backward's.
    """
    groups = _param_groups(module) or ()
    try:
        params = [param for group in groups for param in group.fsdp_params]
        added = any(param.unsharded_accumulated_grad is not None for param in params)
        return not added and all(group.reduce_grads for group in groups)
    except AttributeError:
        return False


def divisor_of(op: Any, gradients: Tensor, world_size: int) -> int:
    """Return the divisor of the sum that ``op`` asks for; multiply ``gradients`` in place by another factor.

    Raises:
        NotImplementedError: ``op`` is neither a sum nor a mean.
    """
    if op == dist.ReduceOp.AVG:
        return world_size
    if op == dist.ReduceOp.SUM:
        return 1
    if op == dist.ReduceOp.PREMUL_SUM:  # set_gradient_divide_factor
        gradients.mul_(op.factor if hasattr(op, "factor") else op.__getstate__()[1])  # torch 2.11 has no attribute
        return 1
    raise NotImplementedError(f"gradients are reduced by sums and means, got {op}")


def predivision(factor: float) -> int:
    """Return FSDP2's divisor of gradients before it adds them in a type that overflows soon."""
    found = 1
    while factor % found == 0 and factor / found > found:
        found *= 2
    return found
