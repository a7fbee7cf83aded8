"""Steps: what follows a backward on every rank. Count it, note its cost, or skip it if gradients are not finite."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch.distributed as dist

from ddp_hooks.comm import see
from ddp_hooks.intercept import co_optimizers
from ddp_hooks.topk.choosing import VariantChooser
from ddp_hooks.topk.reduction.backward import Backward, Phase
from ddp_hooks.topk.reduction.group_reduction import DenseReduction
from ddp_hooks.topk.reduction.grouping import Grouping
from ddp_hooks.topk.reduction.groups import Context

logger = logging.getLogger("ddp_hooks")


@dataclass(frozen=True)
class TopKStats:
    """Cost of one synchronised backward, on this rank."""

    step: int = 0  #: its number, from 1; 0 before the first
    density: float = 1.0  #: part of the elements to keep
    num_groups: int = 0  #: groups of parameters
    num_dense_groups: int = 0  #: of them, groups that were summed in full
    num_lanes: int = 0  #: lanes that carried them
    group_mb: float = 0.0  #: largest group, in MiB, that is not a single parameter
    sent_bytes: int = 0  #: payload of all messages
    received_bytes: int = 0
    comm_s: float | None = 0.0
    """Seconds in which lanes were at work, selections among it, added over lanes. None on accelerators, where streams
    run ahead of the processor."""
    stall_s: float = 0.0  #: seconds for which training waited
    skipped_steps: int = 0  #: steps so far whose gradients were not finite


class Steps:
    def __init__(self, context: Context, grouping: Grouping, chooser: VariantChooser) -> None:
        self.step = 0  # number of steps that were not skipped
        self.num_skipped = 0
        self.stats = TopKStats()
        self.stalls = [context.stall]
        self._context = context
        self._grouping = grouping
        self._chooser = chooser
        self._before = context.lanes.traffic, 0.0  # bytes and stalls until the last step

    def approve(self, backward: Backward) -> bool:
        """Count a step, and return True, if the gradients of every rank are finite; collective."""
        if backward.phase is Phase.APPROVED:  # for a step that was interrupted
            return True
        backward.wait_nonfinite_flags()
        if backward.nonfinite_ranks:
            return False
        backward.refuse_stale()
        self.step += 1
        backward.phase = Phase.APPROVED
        return True

    def finish(self, backward: Backward) -> None:
        """End a backward whose gradients are in place: count it, unless it was, or skip it; collective."""
        self.note_cost(backward)
        if backward.nonfinite_ranks:
            self._refuse_or_skip(backward)
            return
        backward.refuse_stale()
        self._grouping.fix_order()
        pairs = zip(backward.reductions, backward.works, strict=True)
        times_s = [reduction.seconds(work) for reduction, work in pairs]
        self._chooser.stepped(backward.step, times_s, [group.name for group in self._grouping.groups])
        self.step += backward.phase is not Phase.APPROVED

    def note_cost(self, backward: Backward) -> None:
        lanes, (traffic_before, stall_before_s) = self._context.lanes, self._before
        self._before = lanes.traffic, sum(stall.seconds for stall in self.stalls)
        traffic = self._before[0] - traffic_before
        self.stats = TopKStats(
            step=self.stats.step + 1,
            density=self._context.config.density_at(backward.step),
            num_groups=len(backward.reductions),
            num_dense_groups=sum(isinstance(reduction, DenseReduction) for reduction in backward.reductions),
            num_lanes=len(lanes),
            group_mb=self._grouping.mb,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=None if lanes.native else traffic.busy_s,
            stall_s=self._before[1] - stall_before_s,
            skipped_steps=self.num_skipped,
        )

    def _refuse_or_skip(self, backward: Backward) -> None:
        group = self._context.lanes.group
        ranks = [dist.get_global_rank(group, rank) for rank in backward.nonfinite_ranks]
        where = f"gradients were not finite on ranks {ranks}"
        if self._context.config.on_nonfinite == "raise":
            raise RuntimeError(
                f"{where}, so no rank has any; finite gradients are kept for the next step"
                f"{see('gradients-are-not-finite')}"
            )
        self.num_skipped += 1
        self.stats = replace(self.stats, skipped_steps=self.num_skipped)
        if backward.scale is not None:
            return
        logger.warning(
            "%s, so gradients are taken away on all ranks and optimizer.step() changes nothing. If a GradScaler is in "
            "use, pass it: TopKState(ddp, config, scaler=scaler)",
            where,
        )
        for parameter in self._context.parameters:
            parameter.grad = None
        for co_optimizer in co_optimizers.co_optimizers_in(self._context.ddp.module):
            co_optimizer.zero_grad()
