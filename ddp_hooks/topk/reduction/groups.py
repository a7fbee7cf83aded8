"""Groups of parameters whose gradients are selected from together, and the memory of each group.

Groups are runs of parameters in the order of the backward, up to a size; parameters that are summed in full have groups
of their own. Groups do not depend on DDP's buckets, which change after the first step and after a resume: a bucket only
says when gradients are ready. So residuals belong to parameters, and a selection does not depend on how DDP has packed
them.

On two levels the l-th local rank of every node has the residuals of the l-th range of every parameter, whatever the
groups are. So a group's vector begins with the first range of each of its parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import Lanes, LaneSettings, Nodes, Recorder, Stall, Work
from ddp_hooks.comm.torch_compat.ddp import managed_parameters
from ddp_hooks.sparse import SparseSum, Sparsity, range_counts
from ddp_hooks.topk.config import TopKConfig

Kept: TypeAlias = Literal["residual", "velocity"]
Place: TypeAlias = tuple[int, int]  # a bucket, and where a parameter's gradient begins in it


@dataclass
class Context:
    """Settings, model and lanes that all parts of one state share."""

    config: TopKConfig
    ddp: DistributedDataParallel  # a weak proxy: the collector does not see that DDP's reducer holds the hook's state
    parameters: list[torch.nn.Parameter]  # reduced by DDP, in a fixed order
    names: list[str]  # of the parameters
    numels: list[int]  # of the parameters
    lanes: Lanes  # groups are reduced here
    early: Lanes | None  # ranks exchange their flags here before any group is reduced; None: on ``lanes``, afterwards
    recorder: Recorder
    stall: Stall = field(default_factory=Stall)  # time that training has waited for the lanes

    @staticmethod
    def open(
        ddp: DistributedDataParallel, config: TopKConfig, group: dist.ProcessGroup, node_size: int
    ) -> Context:
        """Create the lanes; collective."""
        managed, recorder = managed_parameters(ddp), Recorder(False)
        parameters = list(managed.values())
        settings = LaneSettings(
            timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s, node_size=node_size
        )
        lanes = Lanes(group, config.lanes, parameters[0].device, settings, recorder)
        early = None
        if config.pipeline == "forward" and lanes.world_size > 1:
            early = Lanes(group, 1, parameters[0].device, settings, recorder)
        numels = [parameter.numel() for parameter in parameters]
        proxy = cast(DistributedDataParallel, weakref.proxy(ddp))
        return Context(config, proxy, parameters, list(managed), numels, lanes, early, recorder)

    def wait(self, work: Work) -> None:
        if not work.done:
            with self.stall.measure(self.recorder, work.label):
                work.wait()

    def abandon(self, error: BaseException) -> None:
        for lanes in self._all_lanes:
            lanes.abandon(error)

    def is_stuck(self) -> bool:
        return any(lanes.stuck for lanes in self._all_lanes)

    def close(self) -> None:
        """End the lanes; collective."""
        for lanes in self._all_lanes:
            lanes.close()

    @property
    def _all_lanes(self) -> list[Lanes]:
        return [self.lanes] if self.early is None else [self.lanes, self.early]


class Piece(NamedTuple):
    """Range of a parameter in a group's vector."""

    parameter: int  # its index
    start: int
    end: int


class Run(NamedTuple):
    """Elements that are neighbours in a bucket and in a group's vector."""

    bucket: int
    start: int  # in the bucket
    offset: int  # in the group's vector
    numel: int


class Members(NamedTuple):
    """Parameters of a group, by their index, in order."""

    indices: tuple[int, ...]
    is_dense: bool  # their gradients are always summed in full


def form_groups(
    order: Sequence[int], parameters: Sequence[Tensor], group_bytes: int, dense_below_numel: int
) -> list[Members]:
    """Cut ``order``, a permutation of all parameters, into groups of one type and at most ``group_bytes`` each.

    A larger parameter stands alone. Groups come in the order in which they are complete.
    """
    groups: list[Members] = []
    for is_dense in (False, True):
        members: list[list[int]] = []
        room, dtype = 0, None
        for index in (i for i in order if (parameters[i].numel() < dense_below_numel) == is_dense):
            parameter = parameters[index]
            if not members or parameter.dtype != dtype or parameter.nbytes > room:
                members.append([])
                room, dtype = group_bytes, parameter.dtype
            members[-1].append(index)
            room -= parameter.nbytes
        groups += [Members(tuple(each), is_dense) for each in members]
    position = {index: place for place, index in enumerate(order)}
    return sorted(groups, key=lambda group: position[group.indices[-1]])


def runs_of(pieces: Sequence[Piece], places: Mapping[int, Place]) -> list[Run]:
    """Return where the gradients of ``pieces``, one after the other, lie in buckets: as few runs as possible."""
    runs: list[Run] = []
    offset = 0
    for piece in pieces:
        bucket, start = places[piece.parameter]
        start, numel = start + piece.start, piece.end - piece.start
        last = runs[-1] if runs else None
        if last is not None and last.bucket == bucket and last.start + last.numel == start:
            runs[-1] = last._replace(numel=last.numel + numel)
        elif numel:
            runs.append(Run(bucket, start, offset, numel))
        offset += numel
    return runs


@dataclass
class GradientGroup:
    """Memory of one group. Residuals and velocities of 16-bit gradients are float32: 16 bits lose small summands."""

    members: tuple[int, ...]
    is_dense: bool  # see :class:`Members`
    pieces: tuple[Piece, ...]  # of the vector: by local rank, then by member
    nodes: Nodes
    dtype: torch.dtype
    device: torch.device
    name: str  # for messages
    residual: Tensor | None = None  # (own_numel,); None: nothing was left out
    velocity: Tensor | None = None  # (own_numel,), running sum of momentum correction; None without
    sums: dict[str, SparseSum] = field(default_factory=dict)  # algorithms in use, by name
    memories: dict[str, dict[str, Any]] = field(default_factory=dict)  # loaded, of algorithms that are not in use yet

    @staticmethod
    def of(members: Members, context: Context) -> GradientGroup:
        """Return a group without a residual, and with a velocity of zero if it has one."""
        indices, numels, nodes = members.indices, context.numels, context.lanes.nodes
        pieces = tuple(
            Piece(index, numels[index] * local // nodes.size, numels[index] * (local + 1) // nodes.size)
            for local in range(nodes.size)
            for index in indices
        )
        first, others = context.parameters[indices[0]], len(indices) - 1
        dtype = torch.promote_types(first.dtype, torch.float32)
        name = context.names[indices[0]] + (f" and {others} more" if others else "")
        if members.is_dense:
            name += ", in full"
        group = GradientGroup(indices, members.is_dense, pieces, nodes, dtype, first.device, name)
        if context.config.momentum is not None:
            group.velocity = group.zeros()
        return group

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Ranges of the local ranks in the vector: ascending offsets, from 0 to its length."""
        edges = (0, *itertools.accumulate(piece.end - piece.start for piece in self.pieces))
        return edges[:: len(self.members)]

    @property
    def numel(self) -> int:
        """Elements of the vector."""
        return self.bounds[-1]

    @property
    def own(self) -> slice:
        """This rank's range of the vector, with its residuals: all of it on one level."""
        return slice(self.bounds[self.nodes.local_rank], self.bounds[self.nodes.local_rank + 1])

    @property
    def own_numel(self) -> int:
        return self.own.stop - self.own.start

    @cached_property
    def own_pieces(self) -> dict[Piece, slice]:
        """Pieces of the own range, and where they lie in it; one per member."""
        first = self.nodes.local_rank * len(self.members)
        pieces = self.pieces[first : first + len(self.members)]
        ends = itertools.accumulate(piece.end - piece.start for piece in pieces)
        return {piece: slice(end - piece.end + piece.start, end) for piece, end in zip(pieces, ends, strict=True)}

    def zeros(self) -> Tensor:
        return torch.zeros(self.own_numel, dtype=self.dtype, device=self.device)

    def ensure_residual(self) -> Tensor:
        if self.residual is None:
            self.residual = self.zeros()
        return self.residual

    def sum_of(self, name: str, sparsity: Sparsity) -> SparseSum:
        """Return the algorithm with this name, for the own range of a vector of which ``sparsity.k`` entries travel.

        It keeps its memory as long as its settings stay the same.
        """
        nodes = self.nodes
        sparsity = replace(sparsity, k=range_counts(sparsity.k, self.bounds)[nodes.local_rank])
        present = self.sums.get(name)
        if present is None or present.sparsity != sparsity:
            present = self.sums[name] = SparseSum(sparsity, self.own_numel, nodes.node, nodes.num_nodes)
            present.load_state_dict(self.memories.pop(name, {}))
        return present

    def memory(self) -> dict[str, dict[str, Any]]:
        """Return the memory of the algorithms, by name, as plain numbers and lists."""
        return self.memories | {name: sums.state_dict() for name, sums in self.sums.items()}

    def kept(self) -> dict[Kept, dict[Piece, Tensor]]:
        """Return residuals and velocities by piece: views, (end - start,) each, in storage order."""
        return {"residual": self._split(self.residual), "velocity": self._split(self.velocity)}

    def clear(self) -> None:
        self.residual = None
        if self.velocity is not None:
            self.velocity.zero_()

    def keep(self, kind: Kept, piece: Piece, values: Tensor) -> None:
        """Copy (end - start,) into the memory of an own piece, if the group has such memory."""
        if kind == "residual" and not self.is_dense:
            self.ensure_residual()
        target = self.kept()[kind].get(piece)
        if target is not None:
            target.copy_(values)

    def _split(self, vector: Tensor | None) -> dict[Piece, Tensor]:
        return {} if vector is None else {piece: vector[place] for piece, place in self.own_pieces.items()}
