"""Memory of parameters: views of flat tensors, one per atom, in the order of their storage.

With channels_last and other dense layouts a parameter's elements are not row-major in memory. DDP lays gradients out
with the parameter's strides, so gradients and parameters agree when both are read in storage order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import in_storage_order, is_dense, see
from ddp_hooks.comm.torch_compat.overrides import without_overrides
from ddp_hooks.dear.layout.parameters import ManagedParameters
from ddp_hooks.dear.layout.placement import Layout
from ddp_hooks.overlap import take_back


class ParameterMemory:
    """Memory of the parameters under the layout in force; changes where they lie.

    Args:
        parameters: the parameters that DDP reduces.
    """

    def __init__(self, parameters: ManagedParameters) -> None:
        self.flats: list[Tensor] = []  # per atom, (numel,)
        self._parameters = parameters
        self._given: list[Tensor] = []  # per parameter, the memory that it was given

    def move(self, old: Layout | None, new: Layout) -> None:
        """Make the parameters of every atom neighbours in memory."""
        self._given = []  # a reference would keep the old memory
        if old is not None:
            unflatten(old, self._parameters.tensors, self.flats)
        self.flats = flatten(new, self._parameters.tensors)
        self._given = [parameter.detach() for parameter in self._parameters.tensors]

    def refuse_replaced_storage(self) -> None:
        """Raise RuntimeError if a parameter has other memory than it was given."""
        for index in self._replaced():
            raise RuntimeError(
                f"the memory of {self._parameters.names[index]} was replaced (by .to() or .data = ...), so the "
                f"optimizer would update memory that the model no longer reads: convert the model before wrapping it"
                f"{see('storage-was-replaced')}"
            )

    def take_back(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Copy the values of parameters whose ``.data`` the optimizer has assigned into the memory they were given."""
        for index in self._replaced():
            parameter, memory = self._parameters.tensors[index], self._given[index]
            take_back(parameter, memory, states.get(parameter))
            parameter.data = memory

    def _replaced(self) -> list[int]:
        with without_overrides():
            parameters = self._parameters.tensors
            return [i for i, own in enumerate(self._given) if parameters[i].data_ptr() != own.data_ptr()]


@torch.no_grad()
def flatten(layout: Layout, parameters: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    """Make the parameters of every atom neighbours in memory; return one 1-D tensor per atom.

    Changes the memory of ``parameter.data``, not its values. A parameter that has atoms to itself keeps its memory;
    other parameters move atom by atom, so that at most one atom exists twice.
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
    """Return the same memory as a storage of its own.

    Libraries that save tensors take tensors of one storage for copies (safetensors, and Accelerate, which saves one of
    them), or save the whole storage with each.
    """
    return torch.from_dlpack(view).as_strided(view.shape, view.stride(), 0) if view.numel() else view


def overlapping(parameters: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the indices of two parameters that share memory, or None."""
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
