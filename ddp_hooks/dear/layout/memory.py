"""Parameters that DDP reduces, and their memory: views of flat tensors, one per atom, in the order of their storage.

With channels_last and other dense layouts a parameter's elements are not row-major in memory. DDP lays gradients out
with the parameter's strides, so gradients and parameters agree when both are read in storage order.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hooks.comm import in_storage_order, is_dense, see
from ddp_hooks.comm.torch_compat.overrides import without_overrides
from ddp_hooks.dear.layout.placement import Layout
from ddp_hooks.overlap import take_back


class ManagedParameters:
    """Parameters that DDP reduces, in the same order on every rank; code that knows them speaks of them by index."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        self.names = list(named)
        self.tensors = list(named.values())
        self.numels = tuple(parameter.numel() for parameter in self.tensors)
        self.device = self.tensors[0].device
        self.flats: list[Tensor] = []  # per atom of the layout in force, (numel,): the memory of parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(self.tensors)}
        self._given: list[Tensor] = []  # per parameter, the memory that it was given

    def __len__(self) -> int:
        return len(self.tensors)

    def index_of(self, tensor: object) -> int | None:
        return self._index_of.get(id(tensor))

    def gradients(self) -> list[Tensor | None]:
        """Return every ``.grad``, guards included, without waiting for parameters in flight."""
        with without_overrides():
            return [parameter.grad for parameter in self.tensors]

    def move(self, old: Layout | None, new: Layout) -> None:
        """Make the parameters of every atom neighbours in memory."""
        self._given = []  # a reference would keep the old memory
        if old is not None:
            unflatten(old, self.tensors, self.flats)
        self.flats = flatten(new, self.tensors)
        self._given = [parameter.detach() for parameter in self.tensors]

    def refuse_replaced_storage(self) -> None:
        for index in self._replaced():
            raise RuntimeError(
                f"the memory of {self.names[index]} was replaced (by .to() or .data = ...), so the "
                f"optimizer would update memory that the model no longer reads: convert the model before wrapping it"
                f"{see('storage-was-replaced')}"
            )

    def take_back(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Copy the values of parameters whose ``.data`` the optimizer has assigned into the memory they were given."""
        for index in self._replaced():
            parameter, memory = self.tensors[index], self._given[index]
            take_back(parameter, memory, states.get(parameter))
            parameter.data = memory

    def _replaced(self) -> list[int]:
        with without_overrides():
            return [i for i, own in enumerate(self._given) if self.tensors[i].data_ptr() != own.data_ptr()]


@torch.no_grad()
def flatten(layout: Layout, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Make the parameters of every atom neighbours in memory; return one 1-D tensor per atom.

    A parameter that has atoms to itself keeps its memory; others move atom by atom, so that at most one exists twice.
    """
    flats = []
    for atom in layout.atoms:
        for member in atom.members:
            parameter = parameters[member.parameter]
            if not is_dense(parameter):
                parameter.data = parameter.data.contiguous()
        first = parameters[atom.members[0].parameter]
        if len(atom.members) == 1:
            flats.append(in_storage_order(first.data)[atom.members[0].start : atom.members[0].end])
            continue
        flat = torch.empty(atom.numel, dtype=first.dtype, device=first.device)
        for member in atom.members:
            parameter = parameters[member.parameter]
            flat[member.offset : member.offset + parameter.numel()].copy_(in_storage_order(parameter.data))
            parameter.data = _apart(flat.as_strided(parameter.shape, parameter.stride(), member.offset))
        flats.append(flat)
    return flats


@torch.no_grad()
def unflatten(layout: Layout, parameters: Sequence[nn.Parameter], flats: list[Tensor]) -> None:
    """Undo :func:`flatten`, atom by atom: every parameter gets memory of its own again, and ``flats`` is emptied."""
    for atom in reversed(layout.atoms):
        flats.pop()
        if len(atom.members) > 1:
            for member in atom.members:
                parameters[member.parameter].data = parameters[member.parameter].data.clone()


def _apart(view: Tensor) -> Tensor:
    # Libraries that save tensors take tensors of one storage for copies (safetensors, and Accelerate, which saves one
    # of them), or save the whole storage with each.
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
