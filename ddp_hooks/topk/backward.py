"""One backward under sparse all-reduce: from DDP's buckets to groups on the lanes, and what ranks tell each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, Lanes, Recorder, Stall, Work, bruck_all_gather, without_messages
from ddp_hooks.topk.groups import GradientGroup, Place, runs_of
from ddp_hooks.topk.reduction import Gradients, Reduction


@dataclass
class Backward:
    """A synchronised backward; its buckets belong to the lanes until :meth:`wait` has returned.

    Args:
        groups: to be submitted in this order.
        numels: of the parameters.
        used: parameters that this rank has used, filled meanwhile; None: whether one is used does not matter.
        reduction_of: makes the reduction of a group, by its number.
        lanes: where groups are reduced.
        early_lane: where ranks tell each other whether gradients are finite before any group is reduced; None: they do
            so afterwards, where groups are reduced.
        scale: of the gradients, for the gradient scaler.
    """

    groups: Sequence[GradientGroup]
    numels: Sequence[int]
    used: Collection[int] | None
    reduction_of: Callable[[int, Gradients], Reduction]
    lanes: Lanes
    early_lane: Lanes | None
    scale: float
    buffers: list[Tensor] = field(default_factory=list)  # of the buckets
    futures: list[torch.futures.Future[Tensor]] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)  # of parameters, in the buckets that are there
    reductions: list[Reduction] = field(default_factory=list)  # of the groups that are complete
    works: list[Work] = field(default_factory=list)
    verdict: Work | None = None
    spoilt_by: list[int] = field(default_factory=list)  # ranks with gradients that are not finite
    stale: list[int] = field(default_factory=list)  # parameters that this rank has not used, but with a gradient
    unused: set[int] = field(default_factory=set)  # parameters that no rank has used
    _checks: list[Work] = field(default_factory=list)

    # -- submission -------------------------------------------------------------------------------------------------

    def add_bucket(self, indices: Sequence[int], buffer: Tensor, future: torch.futures.Future[Tensor]) -> None:
        """Submit the groups that are complete with this bucket, of the parameters ``indices``."""
        position, start = len(self.buffers), 0
        self.buffers.append(buffer)
        self.futures.append(future)
        for index in indices:
            self.places[index] = Place(position, start)
            start += self.numels[index]
        for number, group in enumerate(self.groups[len(self.reductions) :], len(self.reductions)):
            if any(index not in self.places for index in (*group.members.sparse, *group.members.dense)):
                break
            self._submit(number, group)
        if self.is_complete:
            ask = self.early_lane or self.lanes
            after = self.works if self.early_lane is None else self._checks
            used = [index in self.used for index in range(len(self.numels))] if self.used is not None else []
            self.verdict = ask.run(self._ask_all(used), "whether gradients are finite", after=after)

    @property
    def is_complete(self) -> bool:
        """Whether all buckets are there."""
        return len(self.places) == len(self.numels)

    def _submit(self, number: int, group: GradientGroup) -> None:
        sparse, dense = group.members.sparse, group.members.dense
        if self.used is not None:
            left = [index for index in (*sparse, *dense) if index not in self.used]
            self.stale += [index for index in left if self.part(index).any()]
        in_sparse, in_dense = (runs_of(members, self.numels, self.places) for members in (sparse, dense))
        reduction = self.reduction_of(number, Gradients(self.buffers, in_sparse, in_dense, self.scale))
        self.reductions.append(reduction)
        if self.early_lane is None:
            self.works.append(reduction.submit())
            return
        check = self.early_lane.run(without_messages(reduction.check), f"a look at {group.name}")
        self._checks.append(check)
        self.works.append(reduction.submit(after=[check]))

    def _ask_all(self, used: Sequence[bool]) -> Algorithm:
        """Which ranks have gradients that are not finite, and which parameters nobody has used.

        Begins when this rank knows whether its own are finite.
        """
        finite = all(reduction.finite for reduction in self.reductions)
        mine = torch.tensor([not finite, *used], dtype=torch.uint8, device=self.buffers[0].device)
        ranks = range(self.lanes.world_size)
        flags = yield from bruck_all_gather(mine, [mine.numel()] * len(ranks), ranks, self.lanes.rank)
        self.spoilt_by = [rank for rank, flag in enumerate(flags) if flag[0].item()]
        by_anybody = torch.stack(flags)[:, 1:].any(0).tolist()
        self.unused = {index for index, is_used in enumerate(by_anybody) if not is_used}

    # -- outcome ----------------------------------------------------------------------------------------------------

    def hear_verdict(self, stall: Stall, recorder: Recorder) -> None:
        """Wait until every rank has told; :attr:`spoilt_by` and :attr:`unused` are known then, the same everywhere."""
        assert self.verdict is not None
        _wait(self.verdict, stall, recorder)

    def wait(self, stall: Stall, recorder: Recorder) -> None:
        """Wait for everything."""
        for work in self.works:
            _wait(work, stall, recorder)
        self.hear_verdict(stall, recorder)

    def take_back(self) -> None:
        """Nothing of what has come out is used."""
        for reduction in self.reductions:
            reduction.give_back()

    def leave_out_unused(self, among: Collection[int] | None = None) -> None:
        """DDP leaves the gradients of parameters that no rank has used as they were: what came out for them stays.

        Args:
            among: parameters of groups that are complete; None: all.
        """
        for reduction in self.reductions if self.unused else []:
            for index, start in reduction.group.offsets.items():
                if index in self.unused and (among is None or index in among):
                    reduction.give_back(slice(start, start + self.numels[index]))
                    self.part(index).zero_()  # which may be the gradient itself

    def part(self, index: int) -> Tensor:
        """A parameter's part of its bucket, (numel,)."""
        bucket, start = self.places[index]
        return self.buffers[bucket][start : start + self.numels[index]]


def _wait(work: Work, stall: Stall, recorder: Recorder) -> None:
    if not work.done:
        with stall.measure(recorder, work.label):
            work.wait()
