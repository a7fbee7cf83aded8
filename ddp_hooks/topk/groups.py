"""Which gradients are selected from together, and what each group keeps from step to step.

Groups are runs of parameters in the order in which backward reaches them, up to a size. They do not depend on DDP's
buckets, which change once and are other ones after a resume: a bucket only says when gradients are there. So residuals
belong to parameters, and what is selected does not depend on how DDP has packed them.
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
    """Where a parameter's gradient begins."""

    bucket: int
    start: int


@dataclass(frozen=True)
class Members:
    """The parameters of a group, by their index, in order.

    Args:
        sparse: of whose gradients the largest elements are summed.
        dense: whose gradients are summed in full.
    """

    sparse: tuple[int, ...]
    dense: tuple[int, ...]


def form_groups(
    order: Sequence[int], parameters: Sequence[Tensor], group_bytes: int, dense_below_numel: int
) -> list[Members]:
    """Cut ``order``, a permutation of all parameters, into groups of one type and at most ``group_bytes`` each.

    A parameter that is larger stands alone.
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
    """Where the gradients of ``members``, one after the other, lie in buckets: in as few pieces as possible."""
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
    """What one group keeps.

    Args:
        members: its parameters.
        offsets: where each of the sparse ones begins in the group's vector.
        dense_offsets: where the dense ones begin, one after the other.
        numel: of that vector.
        dtype, device: of what is kept.
        name: for messages.
        residual: (numel,), what has been left out so far; None: nothing.
        velocity: (numel,), the running sum of momentum correction; None without.
        dense_velocity: likewise, of the dense parameters, one after the other.
        sums: the algorithms in use, by their name.
        memories: what they remembered when a checkpoint was saved, as long as they are not in use.
    """

    members: Members
    offsets: dict[int, int]
    dense_offsets: dict[int, int]
    numel: int
    dtype: torch.dtype
    device: torch.device
    name: str
    residual: Tensor | None = None
    velocity: Tensor | None = None
    dense_velocity: Tensor | None = None
    sums: dict[str, SparseSum] = field(default_factory=dict)
    memories: dict[str, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(members: Members, parameters: Sequence[Tensor], names: Sequence[str], with_velocity: bool) -> GradientGroup:
        """A group that has left out nothing yet.

        What is kept of 16-bit gradients is float32: sums of many small parts would be lost in less.
        """
        offsets, numel = _offsets(members.sparse, parameters)
        dense_offsets, dense_numel = _offsets(members.dense, parameters)
        every = members.sparse + members.dense
        dtype = torch.promote_types(parameters[every[0]].dtype, torch.float32)
        name = names[every[0]] + (f" and {len(every) - 1} more" if len(every) > 1 else "")
        group = GradientGroup(members, offsets, dense_offsets, numel, dtype, parameters[every[0]].device, name)
        if with_velocity:
            group.velocity = group.zeros(numel)
            group.dense_velocity = group.zeros(dense_numel)
        return group

    def zeros(self, numel: int) -> Tensor:
        """Memory for something to keep."""
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def opened(self) -> Tensor:
        """The residual, of which there is one from now on."""
        if self.residual is None:
            self.residual = self.zeros(self.numel)
        return self.residual

    def sum_of(self, name: str, sparsity: Sparsity, rank: int, world_size: int) -> SparseSum:
        """An algorithm, by its name, with what it remembers of earlier steps with the same settings."""
        present = self.sums.get(name)
        if present is None or present.sparsity != sparsity:
            present = self.sums[name] = SparseSum(sparsity, self.numel, rank, world_size)
            present.load_state_dict(self.memories.pop(name, {}))
        return present

    def memory(self) -> dict[str, dict[str, Any]]:
        """What algorithms remember, by their name, as plain numbers and lists."""
        return self.memories | {name: sums.state_dict() for name, sums in self.sums.items()}

    def kept(self) -> dict[Kept, dict[int, Tensor]]:
        """What there is, by kind and parameter: views, (numel,) each, in storage order."""
        return {
            "residual": _pieces(self.residual, self.offsets),
            "velocity": _pieces(self.velocity, self.offsets) | _pieces(self.dense_velocity, self.dense_offsets),
        }

    def surrender(self) -> dict[Kept, dict[int, Tensor]]:
        """What there is, as :meth:`kept` has it, which is not kept here from now on: memory goes with the views."""
        kept = self.kept()
        self.residual = self.velocity = self.dense_velocity = None
        return kept

    def keep(self, kind: Kept, parameter: int, values: Tensor) -> None:
        """Let (numel,) be what is kept of a parameter, as far as its gradients are still treated in that way."""
        if kind == "residual" and parameter in self.offsets:
            self.opened()
        target = self.kept()[kind].get(parameter)
        if target is not None:
            target.copy_(values)


def _pieces(vector: Tensor | None, offsets: Mapping[int, int]) -> dict[int, Tensor]:
    if vector is None:
        return {}
    edges = [*offsets.values(), vector.numel()]
    return {index: vector[start:end] for index, start, end in zip(offsets, edges, edges[1:], strict=False)}


def _offsets(members: Sequence[int], parameters: Sequence[Tensor]) -> tuple[dict[int, int], int]:
    """Where each one begins if they lie one after the other, and where the last one ends."""
    offsets, end = {}, 0
    for index in members:
        offsets[index] = end
        end += parameters[index].numel()
    return offsets, end
