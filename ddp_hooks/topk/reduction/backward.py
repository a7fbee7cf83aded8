"""One backward under sparse all-reduce: from DDP's buckets to groups on the lanes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Work, bruck_all_gather, see, without_messages
from ddp_hooks.topk.reduction.group_reduction import Gradients, GroupReduction
from ddp_hooks.topk.reduction.groups import Context, GradientGroup, Place, runs_of


class Phase(Enum):
    SUBMITTING = auto()  # its buckets arrive
    SUBMITTED = auto()  # all groups are on the lanes
    APPROVED = auto()  # every rank's gradients are finite, and the step is counted
    UPDATING = auto()  # the optimizer has stepped; updates run in the next forward


@dataclass
class Backward:
    """A synchronised backward; its buckets belong to the lanes until :meth:`wait_all` has returned."""

    context: Context
    step: int  # its number, from 0
    groups: Sequence[GradientGroup]  # submitted in this order
    used: Collection[int] | None  # parameters that this rank has used, filled meanwhile; None: it does not matter
    scale: float | None  # factor of the gradient scaler; None without
    reduction_of: Callable[[int, Gradients], GroupReduction]  # by the number of a group
    phase: Phase = Phase.SUBMITTING
    buffers: list[Tensor] = field(default_factory=list)  # of the buckets
    futures: list[torch.futures.Future[Tensor]] = field(default_factory=list)
    reductions: list[GroupReduction] = field(default_factory=list)  # of the groups that are ready
    works: list[Work] = field(default_factory=list)  # of the groups
    nonfinite_ranks: list[int] = field(default_factory=list)
    unused: set[int] = field(default_factory=set)  # parameters that no rank has used
    _places: dict[int, Place] = field(default_factory=dict)  # of parameters whose gradients are ready
    _stale: list[int] = field(default_factory=list)  # unused parameters with a gradient, on this rank
    _checks: list[Work] = field(default_factory=list)
    _flags: Work | None = None

    # -- submission -------------------------------------------------------------------------------------------------

    def add_bucket(self, indices: Sequence[int], buffer: Tensor, future: torch.futures.Future[Tensor]) -> None:
        """Submit the groups that are ready with this bucket, of the parameters ``indices``."""
        bucket, start = len(self.buffers), 0
        self.buffers.append(buffer)
        self.futures.append(future)
        for index in indices:
            self._places[index] = bucket, start
            start += self.context.numels[index]
        for number, group in enumerate(self.groups[len(self.reductions) :], len(self.reductions)):
            if any(index not in self._places for index in group.members):
                break
            self._submit(number, group)
        if len(self._places) == len(self.context.numels):
            early = self.context.early
            ask, after = (early, self._checks) if early is not None else (self.context.lanes, self.works)
            used = [index in self.used for index in range(len(self.context.numels))] if self.used is not None else []
            self._flags = ask.run(self._exchange_flags(used), "whether gradients are finite", after=after)
            self.phase = Phase.SUBMITTED

    @property
    def missing(self) -> list[str]:
        return [name for index, name in enumerate(self.context.names) if index not in self._places]

    def _submit(self, number: int, group: GradientGroup) -> None:
        if self.used is not None:
            unused = [index for index in group.members if index not in self.used]
            self._stale += [index for index in unused if self._part(index).any()]
        runs = runs_of(group.pieces, self._places)
        scale, early = self.scale if self.scale is not None else 1.0, self.context.early
        reduction = self.reduction_of(number, Gradients(self.buffers, runs, scale, self.context.config.momentum))
        self.reductions.append(reduction)
        check = []
        if early is not None:
            check = [early.run(without_messages(reduction.check), f"a look at {group.name}")]
            self._checks += check
        self.works.append(reduction.submit(after=check))

    def _exchange_flags(self, used: Sequence[bool]) -> Algorithm:
        """Exchange which ranks have gradients that are not finite, and which parameters nobody has used.

        Begins when this rank has checked its own gradients; ``used`` is of the moment of submission.
        """
        finite = all(reduction.finite for reduction in self.reductions)
        mine = torch.tensor([not finite, *used], dtype=torch.uint8, device=self.buffers[0].device)
        lanes = self.context.lanes
        ranks = range(lanes.world_size)
        flags = yield from bruck_all_gather(mine, [mine.numel()] * len(ranks), ranks, lanes.rank)
        self.nonfinite_ranks = [rank for rank, flag in enumerate(flags) if flag[0].item()]
        by_anybody = torch.stack(flags)[:, 1:].any(0).tolist()
        self.unused = {index for index, is_used in enumerate(by_anybody) if not is_used}

    # -- outcome ----------------------------------------------------------------------------------------------------

    def wait_nonfinite_flags(self) -> None:
        """Wait for the flags of every rank: :attr:`nonfinite_ranks` and :attr:`unused`, the same everywhere."""
        assert self._flags is not None
        self.context.wait(self._flags)

    def wait_all(self) -> None:
        """Wait for everything; results that nobody applies return to the residuals."""
        for work in self.works:
            self.context.wait(work)
        self.wait_nonfinite_flags()
        if self.nonfinite_ranks:
            for reduction in self.reductions:
                reduction.restore_residual(slice(0, reduction.group.own_numel))
        else:
            self.restore_unused(self.unused)

    def restore_unused(self, among: Collection[int]) -> None:
        """Return results of unused parameters ``among`` those that have arrived: DDP leaves their gradients alone."""
        for reduction in self.reductions if self.unused else []:
            for piece, place in reduction.group.own_pieces.items():
                if piece.parameter in self.unused and piece.parameter in among:
                    reduction.restore_residual(place)
                    self._part(piece.parameter).zero_()  # which may be the gradient itself

    def refuse_stale(self) -> None:
        """Raise on every rank if parameters that no rank has used still have gradients."""
        stale = [self.context.names[index] for index in self._stale if index in self.unused]
        if stale:  # the same on every rank, because it was a mean over ranks
            raise RuntimeError(
                f"no rank has used {', '.join(stale[:5])} in this backward, but gradients of an earlier backward are "
                f"still there: call zero_grad() for all parameters of the model before a backward, also for those of "
                f"other optimizers{see('late-gradients')}"
            )

    def _part(self, index: int) -> Tensor:
        """Return a parameter's part of its bucket, (numel,)."""
        bucket, start = self._places[index]
        return self.buffers[bucket][start : start + self.context.numels[index]]
