"""``torch.autocast``: functions that read tensors only through its casts, and where casts happen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

_class: Any = torch.Tensor
_METHODS = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm")
_CASTING: frozenset[Any] = frozenset(
    [F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]
    + [torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm]
    + [getattr(_class, name) for name in _METHODS]
)
"""Functions whose tensors autocast converts before anything else reads them, on CPUs and on GPUs."""
_PROJECTIONS = (5, 6, 11, 12)  # arguments of multi_head_attention_forward that it hands to F.linear, or parts of them
_MORE_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def reads_only_casts(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if ``function`` reads its tensors only as autocast has converted them, and writes none."""
    if function is F.multi_head_attention_forward:
        projections = [*(args[i : i + 1] for i in _PROJECTIONS), [kwargs.get(name) for name in _MORE_PROJECTIONS]]
        known = {id(each) for group in projections for each in group}
        return all(id(each) in known for each in (*args, *kwargs.values()) if isinstance(each, torch.nn.Parameter))
    return function in _CASTING and "out" not in kwargs


def casts_to(device_type: str, dtype: torch.dtype) -> bool:
    """Return True if autocast converts tensors of such a device to ``dtype`` here, where no tracer records them."""
    return (
        torch.is_autocast_enabled(device_type)
        and torch.get_autocast_dtype(device_type) == dtype
        and torch._C._get_tracing_state() is None
    )


def functions_are_overridden() -> bool:
    """Return True if functions ask ``__torch_function__`` of their arguments here, as they do by default."""
    enabled: bool = torch._C._is_torch_function_enabled()
    return enabled
