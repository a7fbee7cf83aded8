"""What FSDP2 does not tell publicly, read in one place; where a version of torch has it otherwise, None.

Everything is only read. Without an answer the caller does what is always right (it waits), or what FSDP2's own default
is; where a setting would then have no effect, ``extend`` raises (:func:`fsdp_ext.checks.find_problem`).
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


@dataclass(frozen=True)
class GroupFacts:
    """What decides whether a module's reduced gradients are read before the backward ends.

    Args:
        parameters: sharded, in the order in which FSDP2 flattens them.
        original_dtype: of the sharded parameters that were trained at first; None if none was.
        replicated: whether other ranks have the same shards (HSDP).
        sums_replicas_at_once: whether, with replicas, an all-reduce of just this result follows a reduce-scatter; else
            several are added first (set_requires_all_reduce).
        hooked: whether a hook of :meth:`FSDPModule.set_all_reduce_hook` is given the result.
        offloads: whether gradients are copied to the CPU.
        factor: what the user has said that the sum over all ranks is divided by (set_gradient_divide_factor), or None.
    """

    parameters: tuple[Tensor, ...]
    original_dtype: torch.dtype | None
    replicated: bool
    sums_replicas_at_once: bool
    hooked: bool
    offloads: bool
    factor: float | None


def state_of(module: FSDPModule) -> object | None:
    """What modules that were wrapped together share."""
    get = getattr(module, "_get_fsdp_state", None)
    return None if get is None else get()


def _param_groups(module: FSDPModule) -> Sequence[Any] | None:
    state = state_of(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):  # before several were possible
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return None


def num_param_groups(module: FSDPModule) -> int | None:
    """Groups of parameters that the module communicates separately; 0 if it has no parameters of its own."""
    groups = _param_groups(module)
    return None if groups is None else len(groups)


def facts_of(module: FSDPModule) -> GroupFacts | None:
    """See :class:`GroupFacts`."""
    groups = _param_groups(module)
    if groups is None or len(groups) != 1:
        return None
    try:
        (group,) = groups
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


def num_ranks_around(mesh: DeviceMesh) -> int:
    """Ranks of the mesh that this one is a part of."""
    get = getattr(mesh, "_get_root_mesh", None)
    root: DeviceMesh = mesh if get is None else get()
    return root.size()


def num_shards(module: FSDPModule) -> int | None:
    """Ranks that its parameters are sharded over outside of its forward and backward."""
    groups = _param_groups(module)
    return getattr(groups[0].mesh_info, "shard_mesh_size", None) if groups else None


def is_replicated(module: FSDPModule) -> bool:
    """Whether its parameters are whole on every rank (replicate_with_fsdp)."""
    groups = _param_groups(module)
    return any(getattr(group.mesh_info, "shard_mesh_dim", 0) is None for group in groups or ())


def mark_of(module: FSDPModule) -> tuple[object, ...] | None:
    """Another one when its shards were changed: how often, and some of their numbers.

    PyTorch does not count what is done by ``.data``, foreach operations and fused optimizers.
    """
    facts = facts_of(module)
    if facts is None:
        return None
    # What is done to a DTensor does not count for the tensor that it holds.
    shards = [getattr(parameter, "_local_tensor", parameter) for parameter in facts.parameters]
    count = sum(tensor._version for tensor in (*facts.parameters, *shards) if not tensor.is_inference())
    some = {0, len(shards) // 2, len(shards) - 1} if shards else set()
    return count, *(number for index in sorted(some) for number in _ends_of(shards[index]))


def _ends_of(tensor: Tensor) -> Iterator[str]:
    """Its first and last number, as text, in which those that are none are equal."""
    if tensor.numel() and tensor.device.type == "cpu":
        for place in (0, -1):
            yield repr(tensor[(place,) * tensor.ndim].item())


def communication_of(module: FSDPModule) -> tuple[Any, Any] | None:
    """The module's all-gather and reduce-scatter objects."""
    groups = _param_groups(module)
    if not groups:
        return None
    gather = getattr(groups[0], "_all_gather_comm", None)
    scatter = getattr(groups[0], "_reduce_scatter_comm", None)
    return None if gather is None or scatter is None else (gather, scatter)


def prefetches_by_itself(module: FSDPModule) -> bool:
    """Whether the user has set lists of modules to prefetch."""
    groups = _param_groups(module)
    if groups is None:
        return False
    state = module._get_fsdp_state()
    return bool(
        getattr(state, "_states_to_forward_prefetch", ()) or getattr(state, "_states_to_backward_prefetch", ())
    )


def runs_forward(module: FSDPModule) -> bool:
    """Whether it is in its forward, or about to be."""
    states = (getattr(group, "_training_state", None) for group in _param_groups(module) or ())
    return any(getattr(state, "name", "") == "FORWARD" for state in states)


def backward_list_is(module: FSDPModule, others: Sequence[FSDPModule]) -> bool:
    """Whether its list of modules to gather ahead in backward is this one."""
    found = getattr(state_of(module), "_states_to_backward_prefetch", ())
    return list(map(id, found)) == [id(state_of(other)) for other in others]


def has_forward_list(module: FSDPModule) -> bool:
    """Whether it has a list of modules to gather ahead in forward."""
    return bool(getattr(state_of(module), "_states_to_forward_prefetch", ()))


def keeps_parameters(module: FSDPModule) -> bool:
    """Whether parameters stay whole between forward and backward."""
    return all(getattr(group, "post_forward_mesh_info", module) is None for group in _param_groups(module) or ())


def holds_a_gather(module: FSDPModule) -> bool:
    """Whether parameters were gathered that the module has not used so far."""
    return any(getattr(group, "_all_gather_result", True) is not None for group in _param_groups(module) or ())


@dataclass(frozen=True)
class Column:
    """One parameter's place in what FSDP2 reduces, of which every rank's part has the same columns.

    Args:
        owner, name: the module that has the parameter, and its name there.
        parameter: sharded.
        start, stop: elements within the part of one rank; behind the rank's shard there may be padding.
    """

    owner: nn.Module
    name: str
    parameter: Tensor = field(compare=False)
    start: int
    stop: int


def columns_in(module: FSDPModule, numel: int) -> tuple[Column, ...] | None:
    """Of a module's trained parameters; None if so many elements are not a rank's part of all of their gradients."""
    columns = columns_of(module)
    return columns if columns and columns[-1].stop == numel else None


def columns_of(module: FSDPModule) -> tuple[Column, ...] | None:
    """Of a module's trained parameters, if all of them have gradients (foreach_reduce_scatter_copy_in)."""
    groups = _param_groups(module)
    if groups is None or len(groups) != 1:
        return None
    columns: list[Column] = []
    try:
        for param in groups[0].fsdp_params:
            parameter, place = param.sharded_param, param._module_info
            if parameter.requires_grad:
                start = columns[-1].stop if columns else 0
                stop = start + param.padded_sharded_param_size.numel()
                columns.append(Column(place.module, place.param_name, parameter, start, stop))
    except AttributeError:
        return None
    return tuple(columns)


def whole_parameters_of(module: FSDPModule) -> tuple[Tensor, ...] | None:
    """A module's trained parameters as they are while it runs, in the order of :func:`columns_of`.

    None before they were gathered for the first time, and where ranks' parts of a gradient are not simply its rows.
    """
    groups = _param_groups(module)
    if groups is None or len(groups) != 1:
        return None
    try:
        trained = [param for param in groups[0].fsdp_params if param.sharded_param.requires_grad]
        if any(param.is_dtensor or param.fsdp_placement.dim != 0 for param in trained):
            return None
        return tuple(param._unsharded_param for param in trained)
    except AttributeError:
        return None


def reduces_in_this_backward(module: FSDPModule) -> bool:
    """Whether its gradients are reduced when it ends, and are all that is reduced then.

    With ``set_requires_gradient_sync(False)`` they are not; after it those of other backwards may be added first.
    """
    groups = _param_groups(module) or ()
    try:
        params = [param for group in groups for param in group.fsdp_params]
        added = any(param.unsharded_accumulated_grad is not None for param in params)
        return not added and all(group.reduce_grads for group in groups)
    except AttributeError:
        return False


def holds_other_modules(module: FSDPModule) -> bool:
    """Whether there are FSDP modules inside of it, or of one that was wrapped together with it."""
    together: list[Any] = [module]
    for group in _param_groups(module) or ():
        together += getattr(group, "modules", ())
    states = {id(state_of(each)) for top in together for each in top.modules() if isinstance(each, FSDPModule)}
    return len(states) > 1


def replicas_of(module: FSDPModule) -> dist.ProcessGroup | None:
    """The ranks that have the same shards as this one (HSDP)."""
    groups = _param_groups(module)
    return getattr(groups[0].mesh_info, "replicate_process_group", None) if groups else None


def factor_of(op: Any) -> float:
    """What gradients are multiplied by before they are summed (PREMUL_SUM)."""
    factor: float = op.factor if hasattr(op, "factor") else op.__getstate__()[1]  # before it was an attribute
    return factor
