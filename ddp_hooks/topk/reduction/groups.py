"""Groups of parameters whose gradients are selected from together, and the memory of each group.

Groups are runs of parameters in the order of the backward, up to a size. They do not depend on DDP's buckets, which
change after the first step and after a resume: a bucket only says when gradients are ready. So residuals belong to
parameters, and a selection does not depend on how DDP has packed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ddp_hooks.topk.algorithms import SparseSum, Sparsity

Kept: TypeAlias = Literal["residual", "velocity"]


class Run(NamedTuple):
    """Elements that are neighbours in a bucket and in a group's vector."""

    bucket: int
    start: int  # in the bucket
    offset: int  # in the group's vector
    numel: int


class Place(NamedTuple):
    """Beginning of a parameter's gradient."""

    bucket: int
    start: int


@dataclass(frozen=True)
class Members:
    """Parameters of a group, by their index, in order."""

    sparse: tuple[int, ...]  # the largest elements of their gradients are summed
    dense: tuple[int, ...]  # their gradients are summed in full

    @property
    def all(self) -> tuple[int, ...]:
        return self.sparse + self.dense


def form_groups(
    order: Sequence[int], parameters: Sequence[Tensor], group_bytes: int, dense_below_numel: int
) -> list[Members]:
    """Cut ``order``, a permutation of all parameters, into groups of one type and at most ``group_bytes`` each.

    A larger parameter stands alone.
    """
    groups: list[list[int]] = []
    room, dtype = 0, None
    for index in order:
        parameter = parameters[index]
        if not groups or parameter.dtype != dtype or parameter.nbytes > room:
            groups.append([])
            room, dtype = group_bytes, parameter.dtype
        groups[-1].append(index)
        room -= parameter.nbytes
    return [
        Members(
            tuple(i for i in group if parameters[i].numel() >= dense_below_numel),
            tuple(i for i in group if parameters[i].numel() < dense_below_numel),
        )
        for group in groups
    ]


def runs_of(members: Sequence[int], numels: Sequence[int], places: Mapping[int, Place]) -> list[Run]:
    """Return where the gradients of ``members``, one after the other, lie in buckets: as few runs as possible."""
    runs: list[Run] = []
    offset = 0
    for index in members:
        bucket, start = places[index]
        last = runs[-1] if runs else None
        if last is not None and last.bucket == bucket and last.start + last.numel == start:
            runs[-1] = last._replace(numel=last.numel + numels[index])
        elif numels[index]:
            runs.append(Run(bucket, start, offset, numels[index]))
        offset += numels[index]
    return runs


@dataclass
class GradientGroup:
    """Memory of one group. Residuals and velocities of 16-bit gradients are float32: 16 bits lose small summands."""

    members: Members
    offsets: dict[int, int]  # sparse parameter -> beginning in the group's vector
    dense_offsets: dict[int, int]  # dense parameter -> beginning, one after the other
    numel: int  # of the vector
    dtype: torch.dtype
    device: torch.device
    name: str  # for messages
    residual: Tensor | None = None  # (numel,); None: nothing was left out
    velocity: Tensor | None = None  # (numel,), running sum of momentum correction; None without
    dense_velocity: Tensor | None = None  # the same, of the dense parameters
    sums: dict[str, SparseSum] = field(default_factory=dict)  # algorithms in use, by name
    memories: dict[str, dict[str, Any]] = field(default_factory=dict)  # loaded, of algorithms that are not in use yet

    @staticmethod
    def of(members: Members, parameters: Sequence[Tensor], names: Sequence[str], with_velocity: bool) -> GradientGroup:
        """Return a group without a residual, and with velocities of zero if it has some."""
        offsets, numel = _offsets(members.sparse, parameters)
        dense_offsets, dense_numel = _offsets(members.dense, parameters)
        first, others = members.all[0], len(members.all) - 1
        dtype = torch.promote_types(parameters[first].dtype, torch.float32)
        name = names[first] + (f" and {others} more" if others else "")
        group = GradientGroup(members, offsets, dense_offsets, numel, dtype, parameters[first].device, name)
        if with_velocity:
            group.velocity, group.dense_velocity = group.zeros(numel), group.zeros(dense_numel)
        return group

    def zeros(self, numel: int) -> Tensor:
        """Return (numel,) zeros in the type and on the device of the memory."""
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def ensure_residual(self) -> Tensor:
        """Return the residual; create it if there is none."""
        if self.residual is None:
            self.residual = self.zeros(self.numel)
        return self.residual

    def sum_of(self, name: str, sparsity: Sparsity, rank: int, world_size: int) -> SparseSum:
        """Return the algorithm with this name; it keeps its memory as long as its settings stay the same."""
        present = self.sums.get(name)
        if present is None or present.sparsity != sparsity:
            present = self.sums[name] = SparseSum(sparsity, self.numel, rank, world_size)
            present.load_state_dict(self.memories.pop(name, {}))
        return present

    def memory(self) -> dict[str, dict[str, Any]]:
        """Return the memory of the algorithms, by name, as plain numbers and lists."""
        return self.memories | {name: sums.state_dict() for name, sums in self.sums.items()}

    def kept(self) -> dict[Kept, dict[int, Tensor]]:
        """Return residuals and velocities by parameter: views, (numel,) each, in storage order."""
        return {
            "residual": _split(self.residual, self.offsets),
            "velocity": _split(self.velocity, self.offsets) | _split(self.dense_velocity, self.dense_offsets),
        }

    def release(self) -> dict[Kept, dict[int, Tensor]]:
        """Return :meth:`kept`, and give the memory up: it goes with the views."""
        kept = self.kept()
        self.residual = self.velocity = self.dense_velocity = None
        return kept

    def clear(self) -> None:
        """Forget the residual, and set velocities to zero."""
        self.residual = None
        for velocity in (self.velocity, self.dense_velocity):
            if velocity is not None:
                velocity.zero_()

    def keep(self, kind: Kept, parameter: int, values: Tensor) -> None:
        """Copy (numel,) into the memory of a parameter, if the group has such memory for it."""
        if kind == "residual" and parameter in self.offsets:
            self.ensure_residual()
        target = self.kept()[kind].get(parameter)
        if target is not None:
            target.copy_(values)


def _split(vector: Tensor | None, offsets: Mapping[int, int]) -> dict[int, Tensor]:
    if vector is None:
        return {}
    edges = [*offsets.values(), vector.numel()]
    return {index: vector[start:end] for index, start, end in zip(offsets, edges, edges[1:], strict=False)}


def _offsets(members: Sequence[int], parameters: Sequence[Tensor]) -> tuple[dict[int, int], int]:
    """Return the beginning of each member if they lie one after the other, and the end of the last one."""
    offsets, end = {}, 0
    for index in members:
        offsets[index] = end
        end += parameters[index].numel()
    return offsets, end
