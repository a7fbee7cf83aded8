"""Reduction of one group in one backward: its gradients become the mean over ranks of the kept gradients."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass

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
    bruck_all_gather,
    ring_all_gather,
    without_messages,
)
from ddp_hooks.comm.executors.slices import reduce_scatter_slices
from ddp_hooks.topk.algorithms import SparseSum
from ddp_hooks.topk.reduction.groups import GradientGroup, Run
from ddp_hooks.topk.selection import ChunkedGradient, SparseVector

_SLICE_NBYTES = 4 << 20  # of dense parts: bounds the memory for slices of other ranks
_GATHERED_NBYTES = 1 << 14  # of a rank: up to there, rounds cost more than bytes (0.2 to 0.4 ms, as 30 KB at 1 Gbit/s)


@dataclass(frozen=True)
class Gradients:
    """A group's gradients in DDP's buckets."""

    buffers: Sequence[Tensor]  # the buckets, (n,) each
    sparse: Sequence[Run]  # in the order of the group's vector
    dense: Sequence[Run]
    scale: float  # factor of the gradient scaler
    momentum: float | None  # of momentum correction; None without

    def part(self, run: Run) -> Tensor:
        """Return (numel,), a view."""
        return self.buffers[run.bucket][run.start : run.start + run.numel]

    def are_finite(self) -> bool:
        """False if an element is infinite or NaN (or so large that their sum is)."""
        totals = [self.part(run).sum(dtype=torch.float32) for run in (*self.sparse, *self.dense)]
        return bool(torch.isfinite(torch.stack(totals)).all()) if totals else True

    def add_to(self, vector: Tensor, runs: Sequence[Run]) -> None:
        """Add the parts, without their scale, to ``vector``, in place."""
        for run in runs:
            vector[run.offset : run.offset + run.numel].add_(self.part(run), alpha=1.0 / self.scale)

    def add_to_velocity(self, velocity: Tensor, runs: Sequence[Run]) -> Tensor:
        """Apply momentum correction, ``v = m v + g``, in place; returns ``velocity``."""
        assert self.momentum is not None
        velocity.mul_(self.momentum)
        self.add_to(velocity, runs)
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
    def restore_residual(self, part: slice | None = None) -> None:
        """Return the result to the residuals; each entry is kept by exactly one rank.

        Args:
            part: of the group's vector; None: all of it.
        """

    def seconds(self, work: Work) -> float:
        """Return the time from its first moment on a lane to the end of ``work``; 0 on accelerators."""
        return max(0.0, work.finished_s - self._begin_s) if isinstance(work, ThreadWork) else 0.0


class SparseReduction(GroupReduction):
    """Sum of the largest elements; the rest stays in the residual (error feedback)."""

    def __init__(self, group: GradientGroup, gradients: Gradients, lanes: Lanes, summation: SparseSum) -> None:
        super().__init__(group, gradients, lanes)
        self._summation = summation
        self._result: SparseVector | None = None  # the sum over ranks
        self._velocity_before: Tensor | None = None  # at the entries of the result

    def submit(self, after: Collection[Work] = ()) -> Work:
        return self._lanes.run(self._exchange(), self.group.name, after=after)

    def restore_residual(self, part: slice | None = None) -> None:
        if self._result is None:
            return
        indices, values = self._result.indices, self._result.values
        within = slice(None) if part is None else (indices >= part.start) & (indices < part.stop)
        mine = indices % self._lanes.world_size == self._lanes.rank
        if isinstance(within, Tensor):
            mine &= within
        self.group.ensure_residual().index_add_(0, indices[mine], values[mine])
        if self.group.velocity is not None and self._velocity_before is not None:
            self.group.velocity.index_copy_(0, indices[within], self._velocity_before[within])

    def _exchange(self) -> Algorithm:
        group, gradients = self.group, self.gradients
        self._begin_s = time.perf_counter()
        self.check()
        if group.numel:
            gradient = self._gradient() if self.finite else None
            self._result = yield from self._summation.run(group.ensure_residual(), gradient)
            if group.velocity is not None:  # sent entries begin anew (momentum factor masking)
                self._velocity_before = group.velocity.index_select(0, self._result.indices)
                group.velocity.index_fill_(0, self._result.indices, 0.0)
            self._write(self._result)
        if gradients.dense:
            yield from self._sum_dense()

    def _gradient(self) -> Tensor | ChunkedGradient | None:
        """Return the vector to add to the residual in the pass that selects, (n,); None if it was added."""
        group, gradients = self.group, self.gradients
        if group.velocity is not None:
            return gradients.add_to_velocity(group.velocity, gradients.sparse)
        if gradients.scale == 1.0:
            return ChunkedGradient(tuple(gradients.part(run) for run in gradients.sparse))
        gradients.add_to(group.ensure_residual(), gradients.sparse)
        return None

    def _write(self, result: SparseVector) -> None:
        """Write the mean into the buckets."""
        edges = [run.offset for run in self.gradients.sparse] + [self.group.numel]
        cuts = torch.searchsorted(result.indices, torch.tensor(edges, device=result.indices.device)).tolist()
        values = result.values / self._lanes.world_size
        if self.gradients.scale != 1.0:
            values *= self.gradients.scale
        for run, first, last in zip(self.gradients.sparse, cuts, cuts[1:], strict=False):
            part = self.gradients.part(run).zero_()
            part.index_copy_(0, result.indices[first:last] - run.offset, values[first:last].to(part.dtype))

    def _sum_dense(self) -> Generator[Round, None, None]:
        """Replace the gradients of dense parameters by their means."""
        gradients, world_size, rank = self.gradients, self._lanes.world_size, self._lanes.rank
        parts = [gradients.part(run) for run in gradients.dense]
        velocity, scale = self.group.dense_velocity, 1.0
        if velocity is None:
            flat = torch.cat(parts)
        else:  # in its type on every rank
            if self.finite:
                flat = gradients.add_to_velocity(velocity, gradients.dense).clone()
            else:
                flat = torch.zeros_like(velocity)
            scale = gradients.scale
        if flat.nbytes <= _GATHERED_NBYTES:
            everyone = yield from bruck_all_gather(flat, [flat.numel()] * world_size, range(world_size), rank)
            total = everyone[0].to(torch.promote_types(flat.dtype, torch.float32), copy=True)
            for other in everyone[1:]:  # in the order of ranks, as below
                total += other
            flat = (total / world_size).to(flat.dtype)
        else:
            partition = Partition(flat, aligned_bounds(flat.numel(), world_size, flat.element_size()))
            for piece in reduce_scatter_slices([partition], rank, _SLICE_NBYTES, world_size):
                yield from piece.start(flat.new_empty(piece.scratch_numel))
            yield from ring_all_gather(partition.ranges, rank)
        for part, mean in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(mean if scale == 1.0 else mean * scale)


class DenseReduction(GroupReduction):
    """Sum of all elements, with the residuals of steps that left some out.

    In the order of the group's vector, wherever the parts lie in buckets. A group in one run is not copied.
    """

    def __init__(self, group: GradientGroup, gradients: Gradients, lanes: Lanes) -> None:
        super().__init__(group, gradients, lanes)
        dense = [run._replace(offset=run.offset + group.numel) for run in gradients.dense]
        self._runs = [*gradients.sparse, *dense]
        if len(self._runs) == 1:
            self._flat = gradients.part(self._runs[0])
        elif self._runs:
            buffer = gradients.buffers[self._runs[0].bucket]
            self._flat = buffer.new_empty(sum(run.numel for run in self._runs))
        else:  # nothing but parameters without elements
            self._flat = group.zeros(0)
        self._bounds = aligned_bounds(self._flat.numel(), lanes.world_size, self._flat.element_size())
        self._had_residual = False

    def submit(self, after: Collection[Work] = ()) -> Work:
        name = self.group.name
        lane = self._lanes.next_lane()  # the same one, so that each part follows the one before
        partitions = [Partition(self._flat, self._bounds)]
        lane.run(without_messages(self._prepare), name, after=after)
        lane.reduce_scatter(partitions, name, self._lanes.world_size)
        work = lane.all_gather(partitions, name)
        return work if len(self._runs) == 1 else lane.run(without_messages(self._copy_back), name)

    def restore_residual(self, part: slice | None = None) -> None:
        """See :class:`GroupReduction`; without effect if there was no residual."""
        if not self._had_residual:
            return
        rank, numel = self._lanes.rank, self.group.numel
        start, end = self._bounds[rank], min(self._bounds[rank + 1], numel)
        if part is not None:
            start, end = max(start, part.start), min(end, part.stop)
        residual = self.group.ensure_residual()
        if start < end:
            residual[start:end] += self._flat[start:end] * (self._lanes.world_size / self.gradients.scale)

    def _part(self, run: Run) -> Tensor:
        return self._flat[run.offset : run.offset + run.numel]

    def _prepare(self) -> None:
        group, gradients = self.group, self.gradients
        self._begin_s = time.perf_counter()
        self.check()
        self._had_residual = group.residual is not None
        if len(self._runs) > 1:
            for run in self._runs:
                self._part(run).copy_(gradients.part(run))
        if not self.finite:
            if self._had_residual:  # other ranks add their residuals, and take them back
                self._flat.zero_()
            return
        sparse, dense = self._flat[: group.numel], self._flat[group.numel :]
        for flat, velocity, runs in (
            (sparse, group.velocity, gradients.sparse),
            (dense, group.dense_velocity, gradients.dense),
        ):
            if velocity is not None:
                flat.copy_(gradients.add_to_velocity(velocity, runs)).mul_(gradients.scale)
        if group.residual is not None:
            sparse.add_(group.residual, alpha=gradients.scale)
            group.residual = None

    def _copy_back(self) -> None:
        for run in self._runs:
            self.gradients.part(run).copy_(self._part(run))
