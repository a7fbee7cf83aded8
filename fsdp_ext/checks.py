"""Refusals before anything is changed, with the module's name and a way out; agreement of ranks about the set-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import agree, see
from fsdp_ext import compat
from fsdp_ext.config import ExtConfig

ROOT = "the root module"
"""Name in messages of the module without a name."""

_OURS = ("Lane", "Native")  # beginnings of names of communication objects
_STOCK = (compat.DefaultAllGather, compat.DefaultReduceScatter)


def fsdp_modules(model: nn.Module) -> Iterator[tuple[str, FSDPModule]]:
    """Yield the FSDP modules of ``model`` with names; the name of ``model`` is empty.

    Of modules wrapped together, ``fully_shard([first, second])``, the first one stands for all.
    """
    seen = set()
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and compat.state_of(module) not in seen:
            seen.add(compat.state_of(module))
            yield name, module


def is_on_cpu(module: FSDPModule) -> bool:
    assert isinstance(module, nn.Module)
    sharded = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    return all(parameter.device_mesh.device_type == "cpu" for parameter in sharded)


def find_problem(model: object, config: object, extended: bool = False) -> str | None:
    """Return a reason against extending ``model``, or None; ``extended``: the whole model has been before."""
    if not isinstance(config, ExtConfig):
        return f"config must be an ExtConfig(...), got {type(config).__name__}"
    if not isinstance(model, nn.Module):
        return f"extend(...) takes a module, got {type(model).__name__}"
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            return (
                f"{name or ROOT} is wrapped by FSDP1 (FullyShardedDataParallel), which cannot be extended: wrap with "
                f'torch.distributed.fsdp.fully_shard instead; in Trainer\'s fsdp_config set "fsdp_version": 2, in '
                f"Accelerate FullyShardedDataParallelPlugin(fsdp_version=2)"
            )
        missing = compat.find_missing_name(module) if isinstance(module, FSDPModule) else None
        if missing is not None:
            return (
                f"torch {torch.__version__} keeps facts about {name or ROOT} where fsdp_ext does not find them "
                f"({missing}): install a version of fsdp_ext that knows this torch, or torch 2.11 to 2.14"
            )
    modules = list(fsdp_modules(model))
    if not modules:
        return (
            f"no module of {type(model).__name__} is wrapped by FSDP2: call fully_shard(module) on its blocks and on "
            f"itself first, then extend(model, ...)"
        )
    if isinstance(config.density, Mapping):
        names = [name for name, _ in modules]
        for pattern in config.density:
            if not any(fnmatchcase(name, pattern) for name in names):
                return f"density names {pattern!r}, which fits none of the modules that FSDP2 wraps: {names}"
    problems = (_problem_of(name or ROOT, module, config, extended) for name, module in modules)
    return next(filter(None, problems), None)


def _problem_of(name: str, module: FSDPModule, config: ExtConfig, extended: bool) -> str | None:
    groups = compat.num_param_groups(module)
    if groups > 1:
        return (
            f"{name} has {groups} groups of parameters, on meshes of their own (shard_placement_fn): FSDP2 takes one "
            f"communication object per module. Wrap the parts by themselves with fully_shard(...), so that each "
            f"module has one mesh"
        )
    if compat.is_replicated(module):
        return (
            f"{name} is not sharded, but replicated (replicate_with_fsdp), so nothing of it is gathered or "
            f"reduce-scattered: wrap it with fully_shard(...), or extend only sharded modules"
        )
    if config.reduce_scatter == "sparse" and not is_on_cpu(module):
        return (
            f"{name} is on an accelerator, where reduce_scatter='sparse' is not supported: take 'int4', 'int8' or "
            f"'bf16', or DistributedDataParallel with TopKState if the model fits on one device"
        )
    for communication in compat.communication_of(module) or ():
        kind = type(communication).__name__
        if kind.startswith("SymmMem"):
            return (
                f"{name} communicates through symmetric memory (set_symm_mem_for_comm), which needs FSDP2's own "
                f"communication: leave that call out, or do not extend this model"
            )
        if kind.startswith("ProcessGroupAlloc"):
            return (
                f"{name} takes memory from its process group (set_allocate_memory_from_process_group_for_comm), which "
                f"needs FSDP2's own communication: call it with False first, or do not extend this model"
            )
        if kind.startswith(_OURS) and not extended:
            return (
                f"{name} is extended already, with another module: call restore(...) with that one first, or extend "
                f"only the outermost module, which covers all modules inside of it"
            )
        if not kind.startswith(_OURS) and type(communication) not in _STOCK:
            return (
                f"{name} already has a communication object of its own, {kind}: leave its set_custom_... call out, or "
                f"do not extend this model"
            )
    return None


def find_problem_of_state(state: Mapping[str, object], kept: Mapping[str, DTensor]) -> str | None:
    """Return a reason against loading ``state`` in the place of the residuals ``kept``, or None."""
    if state.keys() != kept.keys():
        name = min(state.keys() ^ kept.keys())
        where = "kept only now" if name in kept else "only in this state"
        return (
            f"the residual of {name} is {where}: extend(...) the model with the settings of the run that has saved it "
            f"(reduce_scatter, density, error_feedback), or go on without its state"
        )
    for name, own in kept.items():
        expected, found = _describe(own), _describe(state[name])
        if found != expected:
            return (
                f"the residual of {name} must be {expected}, as extension.state_dict() has it, but this state has "
                f"{found}: load the state of a model of the same shapes into extension.state_dict() by "
                f"torch.distributed.checkpoint.load, which divides it among these ranks, and pass that"
            )
    return None


def _describe(value: object) -> str:
    if not isinstance(value, DTensor):
        return f"a plain tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    mesh = value.device_mesh
    return (
        f"a DTensor of shape {tuple(value.shape)} with {value.placements} on {mesh.device_type}, ranks "
        f"{mesh.mesh.tolist()}"
    )


# -- agreement ---------------------------------------------------------------------------------------------------------


def agree_to_extend(model: nn.Module, config: ExtConfig, extended: str) -> None:
    """Raise ValueError on all ranks with these parameters if the model cannot be extended, or if ranks differ.

    ``extended`` says how the model was extended before.
    """
    problem = find_problem(model, config, extended != "no")
    if not dist.is_initialized():
        raise ValueError(problem or "torch.distributed is not initialised" + see("set-up-is-refused"))
    entries: dict[str, object] = {}
    if problem is None:
        modules = [name for name, _ in fsdp_modules(model)]
        entries = {"torch": torch.__version__, "config": config, "modules": modules}
        for name, parameter in model.named_parameters():
            entries[name] = (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
    entries["extended already"] = extended
    failure = None
    for group in _groups_of(model):
        try:
            agree(entries, problem, group, "the set-up of fsdp_ext.extend", config)
        except ValueError as error:  # ranks of the mesh's other dimensions are to hear of it, too
            failure = failure or error
            problem = problem or str(error)
    if failure is not None:
        raise failure


def _groups_of(model: object) -> Iterator[dist.ProcessGroup]:
    """The group of all ranks, if a mesh is part of one that has them all; else all dimensions of the meshes."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    meshes = dict.fromkeys(parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor))
    if not meshes or any(compat.num_ranks_around(mesh) == dist.get_world_size() for mesh in meshes):
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
        return
    for mesh in meshes:
        yield from mesh.get_all_groups()
