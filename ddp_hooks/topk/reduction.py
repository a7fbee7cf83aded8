"""One group's part in one backward: its gradients become the mean of what was kept of all ranks' gradients."""

from __future__ import annotations

import time
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
from ddp_hooks.topk.groups import GradientGroup, Run
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.sparse import SparseVector

_SLICE_NBYTES = 4 << 20  # of dense parts: bounds the memory for what others send
_GATHERED_NBYTES = 1 << 14  # of a rank: up to there, rounds cost more than bytes (0.2 to 0.4 ms, as 30 KB at 1 Gbit/s)


@dataclass(frozen=True)
class Gradients:
    """A group's gradients in DDP's buckets.

    Args:
        buffers: the buckets, (n,) each.
        sparse, dense: where the group's parameters lie in them; those of the sparse ones in the order of its vector.
        scale: by which they are multiplied, for the gradient scaler.
    """

    buffers: Sequence[Tensor]
    sparse: Sequence[Run]
    dense: Sequence[Run]
    scale: float

    def part(self, run: Run) -> Tensor:
        """(numel,), a view."""
        return self.buffers[run.bucket][run.start : run.start + run.numel]

    def are_finite(self) -> bool:
        """Whether no element is infinite or not a number (or so large that their sum is)."""
        totals = [self.part(run).sum(dtype=torch.float32) for run in (*self.sparse, *self.dense)]
        return bool(torch.isfinite(torch.stack(totals)).all()) if totals else True

    def add_to(self, vector: Tensor, runs: Sequence[Run]) -> None:
        """Add the parts, without their scale, to ``vector``, in place."""
        for run in runs:
            vector[run.offset : run.offset + run.numel].add_(self.part(run), alpha=1.0 / self.scale)


class Reduction:
    """Common to both kinds: submitted once, then :attr:`finite` on this rank and the means in the buckets.

    Args:
        group: keeps what is left out; belongs to the lanes, as the buckets do, until the work is complete.
        gradients: in the buckets; become the means.
        momentum: of momentum correction; None: there is none.
        lanes: where it runs.
    """

    def __init__(self, group: GradientGroup, gradients: Gradients, momentum: float | None, lanes: Lanes) -> None:
        self.group = group
        self.gradients = gradients
        self.finite = True  # this rank's gradients; known when they were checked
        self._is_checked = False
        self._begin_s = 0.0
        self._momentum = momentum
        self._lanes = lanes

    def check(self) -> None:
        """Look whether gradients are finite, unless that was done."""
        if not self._is_checked:
            self.finite = self.gradients.are_finite()
            self._is_checked = True

    def submit(self, after: Collection[Work] = ()) -> Work:
        """Begin when other work is complete."""
        raise NotImplementedError

    def give_back(self, part: slice | None = None) -> None:
        """What has come out is not used: keep it as residuals, every entry on one rank.

        Args:
            part: of the group's vector; None: all of it.
        """
        raise NotImplementedError

    def seconds(self, work: Work) -> float:
        """How long it took from its first moment on a lane, if ``work`` is complete; 0 on accelerators."""
        return max(0.0, work.finished_s - self._begin_s) if isinstance(work, ThreadWork) else 0.0

    def _build_up(self, velocity: Tensor, runs: Sequence[Run]) -> Tensor:
        """Momentum correction, ``v = m v + g``, in place."""
        assert self._momentum is not None
        velocity.mul_(self._momentum)
        self.gradients.add_to(velocity, runs)
        return velocity


class SparseReduction(Reduction):
    """The largest elements are summed; the rest stays in the residual (error feedback).

    Args:
        summation: the algorithm, with what it remembers.
    """

    def __init__(
        self,
        group: GradientGroup,
        gradients: Gradients,
        momentum: float | None,
        lanes: Lanes,
        summation: SparseSum,
    ) -> None:
        super().__init__(group, gradients, momentum, lanes)
        self._summation = summation
        self._result: SparseVector | None = None  # the sum over ranks
        self._velocity_before: Tensor | None = None  # where the result has entries

    def submit(self, after: Collection[Work] = ()) -> Work:
        """Begin; see :class:`Reduction`."""
        return self._lanes.run(self._exchange(), self.group.name, after=after)

    def _exchange(self) -> Algorithm:
        group, gradients = self.group, self.gradients
        self._begin_s = time.perf_counter()
        self.check()
        if group.numel:
            gradient = self._bring_in() if self.finite else None
            self._result = yield from self._summation.run(group.opened(), gradient)
            if group.velocity is not None:  # what has been sent begins anew (momentum factor masking)
                self._velocity_before = group.velocity.index_select(0, self._result.indices)
                group.velocity.index_fill_(0, self._result.indices, 0.0)
            self._write(self._result)
        if gradients.dense:
            yield from self._sum_dense()

    def _bring_in(self) -> Tensor | Scattered | None:
        """What is to be added to the residual in the pass that selects, (n,); None if it was added."""
        group, gradients = self.group, self.gradients
        if group.velocity is not None:
            return self._build_up(group.velocity, gradients.sparse)
        if gradients.scale == 1.0:
            return Scattered(tuple(gradients.part(run) for run in gradients.sparse))
        gradients.add_to(group.opened(), gradients.sparse)
        return None

    def _write(self, result: SparseVector) -> None:
        """The mean, into the buckets."""
        edges = [run.offset for run in self.gradients.sparse] + [self.group.numel]
        cuts = torch.searchsorted(result.indices, torch.tensor(edges, device=result.indices.device)).tolist()
        values = result.values / self._lanes.world_size
        if self.gradients.scale != 1.0:
            values *= self.gradients.scale
        for run, first, last in zip(self.gradients.sparse, cuts, cuts[1:], strict=False):
            part = self.gradients.part(run).zero_()
            part.index_copy_(0, result.indices[first:last] - run.offset, values[first:last].to(part.dtype))

    def _sum_dense(self) -> Generator[Round, None, None]:
        """The means of what travels in full."""
        gradients, world_size, rank = self.gradients, self._lanes.world_size, self._lanes.rank
        parts = [gradients.part(run) for run in gradients.dense]
        velocity, scale = self.group.dense_velocity, 1.0
        if velocity is None:
            flat = torch.cat(parts)
        else:  # in its type on every rank
            flat = self._build_up(velocity, gradients.dense).clone() if self.finite else torch.zeros_like(velocity)
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

    def give_back(self, part: slice | None = None) -> None:
        """See :class:`Reduction`."""
        if self._result is None:
            return
        indices, values = self._result.indices, self._result.values
        mine = indices % self._lanes.world_size == self._lanes.rank
        if part is not None:
            mine &= (indices >= part.start) & (indices < part.stop)
        self.group.opened().index_add_(0, indices[mine], values[mine])
        if self.group.velocity is not None and self._velocity_before is not None:
            again = slice(None) if part is None else (indices >= part.start) & (indices < part.stop)
            self.group.velocity.index_copy_(0, indices[again], self._velocity_before[again])


class DenseReduction(Reduction):
    """Everything is summed, with what is still left from steps in which it was not.

    In the order of the group's vector, wherever DDP's buckets have its parts. A group in one piece is not copied.
    """

    def __init__(self, group: GradientGroup, gradients: Gradients, momentum: float | None, lanes: Lanes) -> None:
        super().__init__(group, gradients, momentum, lanes)
        dense = [run._replace(offset=run.offset + group.numel) for run in gradients.dense]
        self._runs = [*gradients.sparse, *dense]
        self._flat = gradients.part(self._runs[0]) if len(self._runs) == 1 else self._room()
        self._bounds = aligned_bounds(self._flat.numel(), lanes.world_size, self._flat.element_size())
        self._carries = False

    def submit(self, after: Collection[Work] = ()) -> Work:
        """Begin; see :class:`Reduction`."""
        name = self.group.name
        lane = self._lanes.next_lane()  # the same one, so that each part follows the one before
        partitions = [Partition(self._flat, self._bounds)]
        lane.run(without_messages(self._prepare), name, after=after)
        lane.reduce_scatter(partitions, name, self._lanes.world_size)
        work = lane.all_gather(partitions, name)
        return work if len(self._runs) == 1 else lane.run(without_messages(self._copy_back), name)

    def give_back(self, part: slice | None = None) -> None:
        """See :class:`Reduction`; only if there was a residual in it."""
        if not self._carries:
            return
        rank, numel = self._lanes.rank, self.group.numel
        start, end = self._bounds[rank], min(self._bounds[rank + 1], numel)
        if part is not None:
            start, end = max(start, part.start), min(end, part.stop)
        residual = self.group.opened()
        if start < end:
            residual[start:end] += self._flat[start:end] * (self._lanes.world_size / self.gradients.scale)

    def _room(self) -> Tensor:
        if not self._runs:  # nothing but parameters without elements
            return self.group.zeros(0)
        buffer = self.gradients.buffers[self._runs[0].bucket]
        return buffer.new_empty(sum(run.numel for run in self._runs))

    def _part(self, run: Run) -> Tensor:
        return self._flat[run.offset : run.offset + run.numel]

    def _prepare(self) -> None:
        group, gradients = self.group, self.gradients
        self._begin_s = time.perf_counter()
        self.check()
        self._carries = group.residual is not None
        if len(self._runs) > 1:
            for run in self._runs:
                self._part(run).copy_(gradients.part(run))
        if not self.finite:
            if self._carries:  # others add their residuals, and want them back
                self._flat.zero_()
            return
        sparse, dense = self._flat[: group.numel], self._flat[group.numel :]
        for flat, velocity, runs in (
            (sparse, group.velocity, gradients.sparse),
            (dense, group.dense_velocity, gradients.dense),
        ):
            if velocity is not None:
                flat.copy_(self._build_up(velocity, runs)).mul_(gradients.scale)
        if group.residual is not None:
            sparse.add_(group.residual, alpha=gradients.scale)
            group.residual = None

    def _copy_back(self) -> None:
        for run in self._runs:
            self.gradients.part(run).copy_(self._part(run))
