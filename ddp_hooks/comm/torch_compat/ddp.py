"""``DistributedDataParallel``: the parameters it reduces, and the state that it does not show."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm.torch_compat import is_inside

_left_to_another: weakref.WeakKeyDictionary[DistributedDataParallel, set[str]] = weakref.WeakKeyDictionary()


def expects_sparse_gradient(module: torch.nn.Module) -> bool:
    """Return True if DDP will make a sparse bucket for the module's weight; it decides by type and attribute."""
    return isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse


def ignored_parameter_names(ddp: DistributedDataParallel) -> set[str]:
    """Return the names of parameters that DDP was told to leave alone."""
    return set(getattr(ddp, "parameters_to_ignore", ()))


def problem_of_reduced_set(ddp: DistributedDataParallel, state: str) -> str | None:
    """Return why the parameters that DDP reduces are not those that the model trains now; None if they are.

    DDP's reducer keeps the list that it was given when the model was wrapped. Messages name the class ``state``.
    """
    ignored = ignored_parameter_names(ddp)
    names = {id(p): name for name, p in ddp.module.named_parameters() if name not in ignored}
    trained = {id(p) for p in ddp.module.parameters() if p.requires_grad and id(p) in names}
    if ddp._get_ddp_logging_data()["num_parameter_tensors"] == len(trained):  # costs nothing, and is nearly always so
        return None
    reduced = {id(p) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()}
    frozen = [name for key, name in names.items() if key in reduced and key not in trained]
    added = [name for key, name in names.items() if key in trained and key not in reduced]
    if frozen:
        return (
            f"{shortened(frozen)} was frozen after the model was wrapped in DistributedDataParallel, which goes on to "
            f"reduce it: freeze it before wrapping, or after creating {state}, with find_unused_parameters=True"
        )
    if added:
        return (
            f"{shortened(added)} was added, thawed or parametrised after the model was wrapped in "
            f"DistributedDataParallel, which does not reduce it: do so before wrapping"
        )
    return None


def shortened(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names of a list, for a message."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def leave_to_another(ddp: DistributedDataParallel, names: set[str]) -> None:
    """Let :func:`managed_parameters` leave these out: a hook that hands buckets on reduces them by itself."""
    _left_to_another[ddp] = names


def sparse_parameters(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters for which DDP makes sparse buckets, by name."""
    sparse = {id(module.weight) for module in ddp.module.modules() if expects_sparse_gradient(module)}
    return {name: p for name, p in ddp.module.named_parameters() if id(p) in sparse and p.requires_grad}


def managed_parameters(ddp: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that DDP reduces, by name; shared ones once; without those left to another hook."""
    ignored = ignored_parameter_names(ddp) | _left_to_another.get(ddp, set())
    return {name: p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored}


def ddp_in_forward() -> DistributedDataParallel | None:
    """Return the DDP module whose forward runs, or None."""
    ddp = DistributedDataParallel._get_active_ddp_module()
    return ddp if isinstance(ddp, DistributedDataParallel) else None


def ddp_prepares_forward() -> bool:
    """Return True if DDP, on this thread, is about to call its module; it may make new buckets and copy gradients."""
    return is_inside(DistributedDataParallel.__module__, "_pre_forward")


def comm_hook_registered(ddp: DistributedDataParallel) -> bool:
    """Return True if the module has its one communication hook."""
    return bool(getattr(ddp, "_comm_hooks", []))


def delays_all_reduce(ddp: DistributedDataParallel) -> bool:
    """Return True if some parameters were set to bypass communication hooks."""
    return bool(getattr(ddp, "_delay_all_reduce_params", None))
