"""Parameters as views of flat memory, one run per atom, in the order of their storage.

With channels_last and other dense layouts a parameter's elements are not row-major in memory. DDP lays gradients out
with the parameter's strides, so gradients and parameters agree when both are read in storage order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.dear.layout import Layout


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one contiguous run of memory, each place once, in any order of dimensions."""
    expected = 1
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
    for stride, size in dims:
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def in_storage_order(tensor: Tensor) -> Tensor:
    """A 1-D view of a dense tensor's memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def in_order_of(values: Tensor, like: Tensor) -> Tensor:
    """``values`` as a 1-D tensor in the storage order of the dense tensor ``like``, which has the same shape."""
    if values.stride() != like.stride() or not is_dense(values):
        values = torch.empty_strided(like.shape, like.stride(), dtype=values.dtype, device=values.device).copy_(values)
    return in_storage_order(values)


def shaped_like(parameter: Tensor, flat: Tensor) -> Tensor:
    """``flat``, a 1-D tensor in the storage order of ``parameter``, copied into its shape and strides."""
    shaped = torch.empty_strided(parameter.shape, parameter.stride(), dtype=flat.dtype, device=flat.device)
    in_storage_order(shaped).copy_(flat)
    return shaped


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
            parameter.data = flat.as_strided(parameter.shape, stride, member.offset)
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
