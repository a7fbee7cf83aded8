"""Reduction of one group in one backward: its gradients become the mean over ranks of the kept gradients.

On two levels nodes take the place of ranks: residuals and velocities are those of the node's sum of gradients.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_hooks.comm import (
    Algorithm,
    Lanes,
    Partition,
    Round,
    ThreadWork,
    Work,
    aligned_bounds,
    sum_within_node,
    without_messages,
)
from ddp_hooks.sparse import ChunkedGradient, SparseSum, SparseVector, sum_between_nodes
from ddp_hooks.sparse.common import even_bounds
from ddp_hooks.topk.reduction.groups import GradientGroup, Run


@dataclass(frozen=True)
class Gradients:
    """A group's gradients in DDP's buckets."""

    buffers: Sequence[Tensor]  # the buckets, (n,) each
    runs: Sequence[Run]  # in the order of the group's vector
    scale: float  # factor of the gradient scaler
    momentum: float | None  # of momentum correction; None without

    def part(self, run: Run) -> Tensor:
        return self.buffers[run.bucket][run.start : run.start + run.numel]

    def of(self, vectors: Sequence[Tensor]) -> Gradients:
        """Return other gradients, (n_i,) each, one after the other, with the same factors."""
        offsets = itertools.accumulate((each.numel() for each in vectors), initial=0)
        runs = [Run(i, 0, offset, each.numel()) for i, (offset, each) in enumerate(zip(offsets, vectors, strict=False))]
        return replace(self, buffers=vectors, runs=runs)

    def by_range(self, bounds: Sequence[int], dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
        """Return the gradients in each range of the vector: where they lie, or copies if they are of other types."""
        gradient = ChunkedGradient(tuple(self.part(run).to(dtype) for run in self.runs))
        return [gradient.cut(start, end).parts for start, end in itertools.pairwise(bounds)]

    def are_finite(self) -> bool:
        """False if an element is infinite or NaN (or so large that their sum is)."""
        totals = [self.part(run).sum(dtype=torch.float32) for run in self.runs]
        return bool(torch.isfinite(torch.stack(totals)).all()) if totals else True

    def add_to(self, vector: Tensor) -> None:
        """Add the gradients, without their scale, to ``vector``, in place."""
        for run in self.runs:
            vector[run.offset : run.offset + run.numel].add_(self.part(run), alpha=1.0 / self.scale)

    def add_to_velocity(self, velocity: Tensor) -> Tensor:
        """Apply momentum correction, ``v = m v + g``, in place; returns ``velocity``."""
        assert self.momentum is not None
        velocity.mul_(self.momentum)
        self.add_to(velocity)
        return velocity


class GroupReduction(ABC):
    """Reduction of one group; when it is complete, the means are in the buckets.

    Group and buckets belong to the lanes from :meth:`submit` until its work is complete.
    """

    def __init__(self, group: GradientGroup, gradients: Gradients, lanes: Lanes) -> None:
        self.group = group
        self.gradients = gradients
        self.finite: bool | None = None  # this rank's gradients are; None: not checked yet
        self._begin_s = 0.0
        self._lanes = lanes

    def check(self) -> None:
        """Set :attr:`finite`, once."""
        if self.finite is None:
            self.finite = self.gradients.are_finite()

    @abstractmethod
    def submit(self, after: Collection[Work] = ()) -> Work:
        """Begin when other work is complete."""

    @abstractmethod
    def restore_residual(self, place: slice) -> None:
        """Return a part of this rank's range of the result to the residuals; exactly one node keeps each entry."""

    def seconds(self, work: Work) -> float:
        """Return the time from its first moment on a lane to the end of ``work``; 0 on accelerators."""
        return max(0.0, work.finished_s - self._begin_s) if isinstance(work, ThreadWork) else 0.0


class SparseReduction(GroupReduction):
    """Sum of the largest elements; the rest stays in the residual (error feedback)."""

    def __init__(self, group: GradientGroup, gradients: Gradients, lanes: Lanes, summation: SparseSum) -> None:
        super().__init__(group, gradients, lanes)
        self._summation = summation
        self._own: SparseVector | None = None  # the sum over ranks, of the own range
        self._result: SparseVector | None = None  # and of the whole vector
        self._velocity_before: Tensor | None = None  # at the entries of the own range

    def submit(self, after: Collection[Work] = ()) -> Work:
        lane, name = self._lanes.next_lane(), self.group.name
        lane.run(self._exchange(), name, after=after)
        return lane.run(without_messages(self._write), name)  # buckets may travel until the exchange ends

    def restore_residual(self, place: slice) -> None:
        if self._own is None:
            return
        edges = torch.tensor([place.start, place.stop], device=self._own.indices.device)
        within = slice(*torch.searchsorted(self._own.indices, edges).tolist())
        entries, nodes = self._own.at(within), self.group.nodes
        mine = entries.at(entries.indices % nodes.num_nodes == nodes.node)
        self.group.ensure_residual().index_add_(0, mine.indices, mine.values)
        if self.group.velocity is not None and self._velocity_before is not None:
            self.group.velocity.index_copy_(0, entries.indices, self._velocity_before[within])

    def _exchange(self) -> Algorithm:
        group = self.group
        self._begin_s = time.perf_counter()
        self.check()
        if not group.numel:
            return
        gradients = (yield from self._sum_within_node()) if group.nodes.size > 1 else self.gradients
        gradient = self._prepared(gradients) if self.finite or group.nodes.size > 1 else None
        self._own, self._result = yield from sum_between_nodes(
            self._summation, group.ensure_residual(), gradient, group.bounds, group.nodes
        )
        if group.velocity is not None:  # sent entries begin anew (momentum factor masking)
            self._velocity_before = group.velocity.index_select(0, self._own.indices)
            group.velocity.index_fill_(0, self._own.indices, 0.0)

    def _sum_within_node(self) -> Generator[Round, None, Gradients]:
        """Return the sum over this node's ranks that have finite gradients, of the own range."""
        group = self.group
        ranges = self.gradients.by_range(group.bounds, group.dtype)
        for part in itertools.chain(*ranges) if not self.finite else ():
            part.zero_()
        yield from sum_within_node(ranges, group.nodes)
        return self.gradients.of(ranges[group.nodes.local_rank])

    def _prepared(self, gradients: Gradients) -> Tensor | ChunkedGradient | None:
        """Return the vector to add to the residual in the pass that selects, (n,); None if it was added."""
        group = self.group
        if group.velocity is not None:
            return gradients.add_to_velocity(group.velocity)
        if gradients.scale == 1.0:
            return ChunkedGradient(tuple(gradients.part(run) for run in gradients.runs))
        gradients.add_to(group.ensure_residual())
        return None

    def _write(self) -> None:
        result, runs = self._result, self.gradients.runs
        if result is None:  # the group has no elements
            return
        edges = [run.offset for run in runs] + [self.group.numel]
        cuts = torch.searchsorted(result.indices, torch.tensor(edges, device=result.indices.device)).tolist()
        values = result.values / self._lanes.world_size
        if self.gradients.scale != 1.0:
            values *= self.gradients.scale
        for run, first, last in zip(runs, cuts, cuts[1:], strict=False):
            part = self.gradients.part(run).zero_()
            part.index_copy_(0, result.indices[first:last] - run.offset, values[first:last].to(part.dtype))


class DenseReduction(GroupReduction):
    """Sum of all elements, with the residuals of steps that left some out.

    In the order of the group's vector, wherever the parts lie in buckets. A group in one run is not copied, unless
    velocities are summed, which are more precise than 16-bit gradients.
    """

    def __init__(self, group: GradientGroup, gradients: Gradients, lanes: Lanes) -> None:
        super().__init__(group, gradients, lanes)
        runs = gradients.runs
        like = gradients.buffers[runs[0].bucket] if runs else group.zeros()  # or nothing has elements
        dtype = group.dtype if group.velocity is not None else like.dtype
        self._in_place = len(runs) == 1 and dtype == like.dtype
        self._flat = gradients.part(runs[0]) if self._in_place else like.new_empty(group.numel, dtype=dtype)
        self._bounds = aligned_bounds(group.numel, lanes.world_size, self._flat.element_size())
        self._had_residual = False
        self._sums_within_node = group.velocity is not None and group.nodes.size > 1

    def submit(self, after: Collection[Work] = ()) -> Work:
        group, name = self.group, self.group.name
        lane = self._lanes.next_lane()  # the same one, so that each part follows the one before
        partitions = [Partition(self._flat, self._bounds)]
        lane.run(without_messages(self._prepare), name, after=after)
        if self._sums_within_node:
            ranges = [[each] for each in Partition(self._flat, group.bounds).ranges]
            lane.run(sum_within_node(ranges, group.nodes), name)
        lane.run(without_messages(self._add_kept), name)
        lane.reduce_scatter(partitions, name, self._lanes.world_size)
        work = lane.all_gather(partitions, name)
        return work if self._in_place else lane.run(without_messages(self._copy_back), name)

    def restore_residual(self, place: slice) -> None:
        if not self._had_residual:
            return
        group, nodes = self.group, self.group.nodes
        kept = even_bounds(group.own_numel, nodes.num_nodes)
        first, last = max(place.start, kept[nodes.node]), min(place.stop, kept[nodes.node + 1])
        if first < last:
            values = self._flat[group.own][first:last]
            group.ensure_residual()[first:last] += values * (self._lanes.world_size / self.gradients.scale)

    def _part(self, run: Run) -> Tensor:
        return self._flat[run.offset : run.offset + run.numel]

    def _prepare(self) -> None:
        group, gradients = self.group, self.gradients
        self._begin_s = time.perf_counter()
        self.check()
        self._had_residual = group.residual is not None
        if not self._in_place:
            for run in gradients.runs:
                self._part(run).copy_(gradients.part(run))
        if not self.finite and (self._had_residual or group.nodes.size > 1):
            self._flat.zero_()  # other ranks add their residuals, and take them back

    def _add_kept(self) -> None:
        """Add residuals and velocities to the own range."""
        group, gradients = self.group, self.gradients
        own = self._flat[group.own]
        if not self.finite and not self._sums_within_node:
            return
        if group.velocity is not None:
            if self._sums_within_node:  # other ranges are those of other ranks
                self._flat[: group.own.start].zero_()
                self._flat[group.own.stop :].zero_()
            own.copy_(gradients.of([own]).add_to_velocity(group.velocity)).mul_(gradients.scale)
        if group.residual is not None:
            own.add_(group.residual, alpha=gradients.scale)
            group.residual = None

    def _copy_back(self) -> None:
        for run in self.gradients.runs:
            self.gradients.part(run).copy_(self._part(run))
