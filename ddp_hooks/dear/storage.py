"""Parameters as views of flat memory, one run per atom, in the order of their storage.

With channels_last and other dense layouts a parameter's elements are not row-major in memory. DDP lays gradients out
with the parameter's strides, so gradients and parameters agree when both are read in storage order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.comm import in_storage_order, is_dense
from ddp_hooks.dear.layout import Layout


@torch.no_grad()
def flatten(layout: Layout, parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """Make the parameters of every atom neighbours in memory; returns one 1-D tensor per atom.

    Changes ``parameter.data`` in place of storage, not value. A parameter that has atoms to itself keeps its memory;
    the others move atom by atom, so that at most one atom exists twice.
    """
    flats = []
    for atom in layout.atoms:
        if len(atom.members) == 1:
            member = atom.members[0]
            parameter = parameters[member.parameter]
            if not is_dense(parameter):
                parameter.data = parameter.data.contiguous()
            flats.append(in_storage_order(parameter.data)[member.start : member.end])
            continue
        first = parameters[atom.members[0].parameter]
        flat = torch.empty(atom.numel, dtype=first.dtype, device=first.device)
        for member in atom.members:
            parameter = parameters[member.parameter]
            if not is_dense(parameter):
                parameter.data = parameter.data.contiguous()
            stride = parameter.stride()
            flat[member.offset : member.offset + parameter.numel()].copy_(in_storage_order(parameter.data))
            parameter.data = _apart(flat.as_strided(parameter.shape, stride, member.offset))
        flats.append(flat)
    return flats


@torch.no_grad()
def unflatten(layout: Layout, parameters: Sequence[torch.nn.Parameter], flats: list[Tensor]) -> None:
    """Undo :func:`flatten`, atom by atom: every parameter gets memory of its own again, and ``flats`` is emptied."""
    for atom in reversed(layout.atoms):
        flats.pop()
        if len(atom.members) > 1:
            for member in atom.members:
                parameters[member.parameter].data = parameters[member.parameter].data.clone()


def _apart(view: Tensor) -> Tensor:
    """The same memory as a storage of its own.

    Whoever saves tensors takes those with a common storage for copies of one (safetensors, Accelerate, which leaves all
    but one of them out), or saves all of the storage with each.
    """
    return torch.from_dlpack(view).as_strided(view.shape, view.stride(), 0) if view.numel() else view


def overlapping(parameters: Sequence[Tensor]) -> tuple[int, int] | None:
    """Indices of two parameters that share memory, or None."""
    extents = []
    for index, parameter in enumerate(parameters):
        span = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        start = parameter.data_ptr()
        if parameter.numel():
            extents.append((start, start + (span + 1) * parameter.element_size(), index))
    extents.sort()
    for (_, end, index), (start, _, other) in itertools.pairwise(extents):
        if start < end:
            return index, other
    return None
