"""``torch.distributed.checkpoint``, whose ``state_dict`` asks optimizers for their state without saying for what."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch

from ddp_hooks.comm.torch_compat import frames_of, is_inside

_MODULE = "torch.distributed.checkpoint.state_dict"
_MAKES_STATE = "_init_optim_state"


class StateDictCall(NamedTuple):
    """Call of ``torch.distributed.checkpoint.state_dict`` that asks a model or an optimizer for its ``state_dict``."""

    name: str  # of the function that the user has called
    loads: bool  # the call loads a state and looks for shapes and devices only
    gathers: bool  # the call wants whole tensors
    on_first_rank: bool  # the call wants them on the first rank only

    @staticmethod
    def current() -> StateDictCall | None:
        """Return the call that is under way, or None."""
        frame = next(frames_of(_MODULE, "_get_optim_state_dict", "_get_model_state_dict"), None)
        info = frame.f_locals.get("info") if frame is not None else None
        if frame is None or info is None:
            return None
        loads = is_inside(_MODULE, "_load_optim_state_dict")
        return StateDictCall(_public_name(frame), loads, info.full_state_dict and not loads, info.cpu_offload)


def read_metadata(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], str | None]:
    """Return the metadata of every entry of a checkpoint by name, and the problem of reading them, or None.

    Every rank reads for itself, and one of them may find a damaged file: compare the problem over the ranks
    (:func:`~ddp_hooks.comm.agree`) before any collective.
    """
    from torch.distributed.checkpoint import FileSystemReader  # takes a while to import, and few need it

    try:
        return FileSystemReader(path).read_metadata().state_dict_metadata, None
    except Exception as error:  # absent, cut off in the middle, or of something else
        return {}, f"cannot read {os.path.join(path, '.metadata')}: {type(error).__name__}: {error}"


def inside_state_dict_api() -> bool:
    """Return True if a function of the module has called what runs; all ranks call these together."""
    return is_inside(_MODULE)


def optimizers_beside_model() -> tuple[str, tuple[torch.optim.Optimizer, ...]]:
    """Return ``get_state_dict`` or ``set_state_dict`` if one of them begins, and the optimizers that it was given."""
    frame = next(frames_of(_MODULE, "_verify_options"), None)
    if frame is None or frame.f_locals.get("optim_only", True):
        return "", ()
    return _public_name(frame), tuple(frame.f_locals.get("optims", ()))


def unflattens_state() -> bool:
    """Return True if the module asks for the names of an optimizer's entries."""
    return is_inside(_MODULE, "_unflatten_optim_state_dict")


def makes_state(kwargs: Mapping[str, Any]) -> bool:
    """Return True if a step makes the state of an optimizer that has none: gradients and learning rates are 0."""
    return "closure" in kwargs and inside_making_state()


def inside_making_state() -> bool:
    """Return True inside of such a step, and of what the module does around it: it also zeroes gradients."""
    return is_inside(_MODULE, _MAKES_STATE)


def undo_making_state(optimizer: torch.optim.Optimizer) -> None:
    """Restore gradients and learning rates when such a step is about to raise: torch would leave the rates at 0."""
    frame = next(frames_of(_MODULE, _MAKES_STATE), None)
    if frame is None or frame.f_locals.get("optim") is not optimizer:
        return
    rates = list(frame.f_locals.get("lrs", ()))
    for group in optimizer.param_groups:
        if rates and "lr" in group:
            group["lr"] = rates.pop(0)
        for parameter in group["params"]:
            parameter.grad = None


def _public_name(frame: FrameType) -> str:
    """Return the name of the function that the user has called."""
    return next(frames_of(_MODULE, *frame.f_globals["__all__"]), frame).f_code.co_name
