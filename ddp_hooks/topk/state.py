"""TopKState: what users hold of sparse all-reduce, and how a backward goes.

1. DDP hands over a bucket. Groups whose gradients are all there are submitted to the lanes, in one fixed order, where
   they are added to what earlier steps have left out, selected from, and exchanged.
2. Backward ends: just before DDP waits for its buckets, wait for the groups, and hear whether a rank had gradients that
   are not finite.
3. DDP has made the buckets the model's gradients.

With ``pipeline="forward"`` nobody waits in step 2; see :mod:`~ddp_hooks.topk.forward`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import Lanes, LaneSettings, Recorder, Stall, Work, agree, at_exit, see, torch_compat
from ddp_hooks.intercept import co_optimizers
from ddp_hooks.intercept.causes import why_not_ended
from ddp_hooks.intercept.local_gradients import LocalGradients
from ddp_hooks.topk import checkpoint, checks
from ddp_hooks.topk.algorithms import Sparsity
from ddp_hooks.topk.backward import Backward
from ddp_hooks.topk.config import TopKConfig
from ddp_hooks.topk.forward import ForwardPipeline
from ddp_hooks.topk.grouping import Grouping
from ddp_hooks.topk.reduction import DenseReduction, Gradients, Reduction, SparseReduction
from ddp_hooks.topk.stats import TopKStats
from ddp_hooks.topk.tuned import begin_tuning
from ddp_hooks.topk.variants import VariantChooser
from ddp_hooks.topk.wire import Wire

logger = logging.getLogger("ddp_hooks")


class TopKState:
    """The state of :func:`~ddp_hooks.topk_hook`: sparse all-reduce with error feedback (zhao2024spardl).

    Of every group of gradients the largest elements of the sum over ranks travel; the others are kept, on the rank that
    has them, and added to the next gradient. Replicas stay equal, bit for bit. Gradients are averaged as DDP does.

    On one rank nothing travels, so nothing is left out.

    Args:
        ddp: the model.
        config: the settings.
        scaler: the ``torch.amp.GradScaler`` of the loop, if it has one: residuals are kept without its scale, which
            changes from step to step.
        optimizer: of all parameters, for ``TopKConfig(pipeline="forward")``, which runs its updates in forwards. With
            ``"backward"`` it is only checked: it has no momentum beside ``TopKConfig(momentum=...)``.

    Raises:
        ValueError: on every rank, before anything is changed, when this cannot be right, or when ranks differ.

    Creating a state is collective: all ranks of the DDP module's group do it.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        config: TopKConfig | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.config = config = config if config is not None else TopKConfig()
        group = getattr(ddp, "process_group", None) or dist.group.WORLD
        assert group is not None, "torch.distributed is not initialised"
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        problem = checks.find_problem(ddp, config, dist.get_world_size(group))
        problem = problem or checks.find_problem_of_pipeline(ddp, config, scaler, optimizer)
        entries = checks.fingerprint(ddp, config, scaler is not None) if problem is None else {}
        agree(entries, problem, group, "the set-up of TopKState", config)

        managed = torch_compat.managed_parameters(ddp)
        self._names = list(managed)
        self._parameters = list(managed.values())
        self._numels = [parameter.numel() for parameter in self._parameters]
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._scaler = scaler
        self._finds_unused = ddp.find_unused_parameters and dist.get_world_size(group) > 1
        # Weakly: the collector does not see that DDP's reducer holds the hook's state.
        self._ddp = cast(DistributedDataParallel, weakref.proxy(ddp))
        settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
        device = self._parameters[0].device
        self._recorder = Recorder(False)
        self._lanes = Lanes(group, config.lanes, device, settings, self._recorder)
        self._chooser = VariantChooser(config, self._lanes)
        self._pipeline: ForwardPipeline | None = None
        self._early_lane: Lanes | None = None
        if config.pipeline == "forward" and self._lanes.world_size > 1:
            assert optimizer is not None
            deferred = checks.updates_parameters(optimizer, config)
            self._pipeline = ForwardPipeline(ddp, optimizer, self._parameters, self._names, self._recorder, deferred)
            self._early_lane = Lanes(group, 1, device, settings, self._recorder)
            for co_optimizer in co_optimizers.co_optimizers_in(ddp.module):
                co_optimizer.follow(optimizer)  # after the pipeline, which may find that nobody is to step
        planned = self._pipeline.plan if self._pipeline is not None else None
        self._grouping = Grouping(config, self._parameters, self._names, self._finds_unused, planned)
        self.tuning = begin_tuning(config, self._lanes, self._parameters, self._names, self._grouping)
        """The search for a size of groups that ``config.tuner`` asks for; None without."""
        if self._is_tuning:
            self._chooser.postpone()
        self._step = 0  # of those that were not skipped
        self._num_skipped = 0
        self._stats = TopKStats()
        self._stall = Stall()
        self._mark = (self._lanes.traffic, 0.0)
        self._closed = False
        self._backward: Backward | None = None  # from its first bucket on
        self._local: LocalGradients | None = None
        if self._lanes.world_size > 1:
            self._local = LocalGradients(ddp, self._parameters, self._names, "TopKState", "topk_hook")
        ddp.join = ddp.join_hook = checks.refuse_join  # type: ignore[method-assign]
        has_teams = config.algorithm in ("spardl", "auto")
        if has_teams and config.teams == self._lanes.world_size > 1 and self._lanes.rank == 0:
            logger.warning(
                "as many teams as ranks: each reduces by itself, and more is left out; fewer teams lose less accuracy"
            )
        self._handles: list[Any] = [
            ddp.register_forward_pre_hook(self._before_forward),
            ddp.register_forward_hook(self._after_forward, always_call=True),
            at_exit(self.close, self._abandon, self._is_stuck),
        ]

    # -- what users call --------------------------------------------------------------------------------------------

    def stats(self) -> TopKStats:
        """What the last synchronised backward cost on this rank."""
        return self._stats

    def synchronize(self) -> None:
        """Wait for updates that are on their way. Communicates nothing itself: one rank alone may call it."""
        if self._pipeline is not None:
            self._pipeline.finish()

    def wait_for_gradients(self) -> None:
        """With ``pipeline="forward"``: let gradients arrive now, to be read, clipped or changed; all ranks call it.

        After a backward; the next ``optimizer.step()`` then updates at once, as with ``pipeline="backward"``, where
        this does nothing.
        """
        if self._pipeline is not None:
            self._pipeline.settle()

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps, to be saved by every rank for itself, between two steps. Not collective.

        Plain tensors, lists and numbers, so ``torch.load(..., weights_only=True)`` reads it. About as large as the
        gradients.
        """
        self._refuse_under_way("state_dict()")
        kept = checkpoint.kept_by_name(self._grouping.groups, self._parameters, self._names)
        chosen = self._chooser.chosen
        return {
            "rank": self._lanes.rank,
            "world_size": self._lanes.world_size,
            "step": self._step,
            "num_skipped": self._num_skipped,
            "order": self._grouping.order(),
            "chosen": [list(variant) for variant in chosen] if chosen is not None else None,
            "group_mb": self._grouping.mb,
            "lanes": len(self._lanes),
            "tuned": self.tuning is not None and self.tuning.finished,
            "memories": [group.memory() for group in self._grouping.groups],
            **kept,
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on where a run was when its states were saved; collective.

        Args:
            state: what this rank has saved: training goes on as if it had not stopped, bit for bit. Or, on any number
                of ranks, the states of all former ranks: the sum of residuals over the ranks is what it was.

        Raises:
            ValueError: on every rank, before anything is changed, if a state does not fit.
        """
        self._refuse_under_way("load_state_dict()")
        own = isinstance(state, Mapping)
        saved: list[Mapping[str, Any]] = [state] if isinstance(state, Mapping) else list(state)
        shapes = {name: p.shape for name, p in zip(self._names, self._parameters, strict=True)}
        rank, world_size = self._lanes.rank, self._lanes.world_size
        dense = {self._names[index] for group in self._grouping.groups for index in group.members.dense}
        problem = checkpoint.find_problem(saved, rank if own else None, world_size, shapes, dense)
        entries = {} if problem is not None else {key: saved[0][key] for key in ("step", "order", "chosen")}
        entries |= {key: saved[0].get(key) for key in ("group_mb", "lanes", "tuned")} if problem is None else {}
        entries |= {"what is loaded": "this rank's own state" if own else "a list of states"} if problem is None else {}
        agree(entries, problem, self._lanes.group, "the state of TopKState", self.config)
        first = saved[0]
        self._step, self._num_skipped = first["step"], first["num_skipped"]
        tuned = self.config.tuner is not None and "group_mb" in first
        self._grouping.restore(first["order"], first["group_mb"] if tuned else self.config.group_mb)
        if self.tuning is not None and tuned:
            finished = first["tuned"] and first["world_size"] == world_size
            self.tuning.resume(self._grouping.mb, first.get("lanes", len(self._lanes)), finished)
        mine = saved if own else [state for state in saved if state["rank"] % world_size == rank]
        checkpoint.restore(self._grouping.groups, self._parameters, self._names, mine, saved)
        same_groups = own and len(first["memories"]) == len(self._grouping.groups)
        self._chooser.begin(self._step, first["chosen"] if same_groups else None)
        if self._is_tuning:
            self._chooser.postpone()
        for group, memories in zip(self._grouping.groups, first["memories"], strict=False):
            group.memories = dict(memories) if same_groups else {}

    def close(self) -> None:
        """Finish communication, let every rank do the same, and end the lanes. DDP cannot remove its hook."""
        if self._closed:
            return
        self._closed = True
        if self.tuning is not None:
            self.tuning.close()
        try:
            if self._pipeline is not None:
                self._pipeline.close()
        finally:
            for handle in self._handles:
                handle.remove()
            if self._local is not None:
                self._local.close()
            self._grouping.close()
            self._lanes.close()
            if self._early_lane is not None:
                self._early_lane.close()

    # -- 1. a bucket is ready ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Submit the groups that are complete with this bucket; called by DDP, through the hook, during backward."""
        if self._closed:
            raise RuntimeError(
                "TopKState was closed: wrap the model in a new DistributedDataParallel to train on"
                f"{see('the-state-was-closed')}"
            )
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type != "cpu" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        indices = [self._index_of.get(id(parameter)) for parameter in bucket.parameters()]
        if None in indices:
            raise RuntimeError(
                "DDP reduces a parameter that was frozen, or not there, when TopKState was created: change the model "
                f"before wrapping it{see('set-up-changed-later')}"
            )
        if self._backward is None:
            self._backward = self._begin_backward()
        self._backward.add_bucket(cast(list[int], indices), buffer, future)
        if self._local is not None and self._backward.is_complete:
            self._local.all_reduced()
        if self._pipeline is not None:
            future.set_result(buffer)  # whose values come later
            if self._backward.is_complete:  # after DDP's own end of the backward
                torch_compat.queue_engine_callback(lambda: torch_compat.queue_engine_callback(self._leave_to_forward))
        elif self._backward.is_complete:
            if self._ddp.static_graph and self._stats.step == 0:
                self._end_exchange()  # this is DDP's end-of-backward callback, which is about to wait for the futures
            else:  # it will be queued after ours
                torch_compat.queue_engine_callback(self._end_exchange)
        return future

    def _begin_backward(self) -> Backward:
        if self._pipeline is not None:
            self._pipeline.refuse_unfinished()
        if self._is_tuning and self._grouping.is_settled and self._step >= self.config.warmup_steps:
            self._tune()
        return Backward(
            self._grouping.groups,
            self._numels,
            self._grouping.used if self._finds_unused else None,
            self._reduction_of,
            self._lanes,
            self._early_lane,
            self._scaler.get_scale() if self._scaler is not None else 1.0,
        )

    def _reduction_of(self, number: int, gradients: Gradients) -> Reduction:
        config, group = self.config, self._grouping.groups[number]
        density = config.density_at(self._step)
        variant = self._chooser.variant_of(number, self._step)
        if variant.algorithm == "dense" or density == 1.0 or self._lanes.world_size == 1:
            return DenseReduction(group, gradients, config.momentum, self._lanes)
        sparsity = Sparsity(
            variant.algorithm,
            max(1, round(density * group.numel)),
            Wire(config.wire, group.dtype),
            variant.teams,
            variant.sag,
            config.split,
            config.collection,
        )
        summation = group.sum_of(variant.name, sparsity, self._lanes.rank, self._lanes.world_size)
        return SparseReduction(group, gradients, config.momentum, self._lanes, summation)

    # -- 2. the backward ends, but DDP has not waited for its buckets ------------------------------------------------

    def _end_exchange(self) -> None:
        backward = self._backward
        assert backward is not None
        self._bring_home(backward)
        if backward.spoilt_by and self._scaler is not None:
            for buffer in backward.buffers:
                buffer.fill_(torch.inf)  # so that it skips the step, and scales less, on every rank
        for future, buffer in zip(backward.futures, backward.buffers, strict=True):
            future.set_result(buffer)
        # After DDP's own, also if that is not queued yet.
        torch_compat.queue_engine_callback(lambda: torch_compat.queue_engine_callback(self._end_backward))

    def _bring_home(self, backward: Backward) -> None:
        """Wait for everything; what is not used stays here."""
        backward.wait(self._stall, self._recorder)
        if backward.spoilt_by:
            backward.take_back()
        else:
            backward.leave_out_unused()

    # -- 3. DDP has made the buckets the model's gradients ----------------------------------------------------------

    def _end_backward(self) -> None:
        backward, self._backward = self._backward, None
        assert backward is not None
        self._grouping.used.clear()
        self._conclude(backward)

    def _conclude(self, backward: Backward, is_counted: bool = False) -> None:
        """Everything is there; collective. The step may have been counted, if it was interrupted."""
        self._note_stats(backward.reductions, self.config.density_at(self._step - is_counted))
        if backward.spoilt_by:
            self._refuse_or_skip(backward.spoilt_by)
            return
        self._refuse_stale(backward)
        self._grouping.settle(self._lanes.group)
        pairs = zip(backward.reductions, backward.works, strict=True)
        times_s = [reduction.seconds(work) for reduction, work in pairs]
        self._chooser.stepped(self._step, times_s, [group.name for group in self._grouping.groups])
        self._step += not is_counted

    def _refuse_stale(self, backward: Backward) -> None:
        stale = [self._names[index] for index in backward.stale if index in backward.unused]
        if stale:  # the same on every rank, because it was a mean over ranks
            raise RuntimeError(
                f"no rank has used {', '.join(stale[:5])} in this backward, and gradients of an earlier one are still "
                f"there, which would be added to what is left out: call zero_grad() for all parameters of the model "
                f"before a backward, also for those of other optimizers{see('late-gradients')}"
            )

    # -- or: they arrive in the next forward ------------------------------------------------------------------------

    def _leave_to_forward(self) -> None:
        backward, self._backward = self._backward, None
        assert backward is not None and self._pipeline is not None
        self._grouping.used.clear()
        if not self._grouping.is_settled or self._chooser.is_trying:
            self._bring_home(backward)
            self._conclude(backward)
        else:
            self._pipeline.hold(_OnItsWay(self, backward))

    @property
    def _is_tuning(self) -> bool:
        return self.tuning is not None and not self.tuning.finished

    def _tune(self) -> None:
        """A step has ended, and nothing of the next one is on its way."""
        assert self.tuning is not None
        self.tuning.stepped()
        if self.tuning.finished:
            self._chooser.begin(self._step, None)

    def _refuse_or_skip(self, ranks: Sequence[int]) -> None:
        where = f"gradients were not finite on ranks {[dist.get_global_rank(self._lanes.group, r) for r in ranks]}"
        if self.config.on_nonfinite == "raise":
            raise RuntimeError(
                f"{where}, so no rank has any; what was finite is kept for the next step"
                f"{see('gradients-are-not-finite')}"
            )
        self._num_skipped += 1
        self._stats = replace(self._stats, skipped_steps=self._num_skipped)
        if self._scaler is not None:
            return
        logger.warning(
            "%s, so gradients are taken away on all ranks and optimizer.step() changes nothing. If a GradScaler is in "
            "use, pass it: TopKState(ddp, config, scaler=scaler)",
            where,
        )
        for parameter in self._parameters:
            parameter.grad = None
        for co_optimizer in co_optimizers.co_optimizers_in(self._ddp.module):
            co_optimizer.zero_grad()

    def _note_stats(self, reductions: Sequence[Reduction], density: float) -> None:
        stall_s = self._stall.seconds + (self._pipeline.stall_s if self._pipeline is not None else 0.0)
        before, now = self._mark, (self._lanes.traffic, stall_s)
        self._mark = now
        traffic = now[0] - before[0]
        self._stats = TopKStats(
            step=self._stats.step + 1,
            density=density,
            num_groups=len(reductions),
            num_dense_groups=sum(isinstance(reduction, DenseReduction) for reduction in reductions),
            num_lanes=len(self._lanes),
            group_mb=self._grouping.mb,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=None if self._lanes.native else traffic.busy_s,
            stall_s=now[1] - before[1],
            skipped_steps=self._num_skipped,
        )

    # -- around it --------------------------------------------------------------------------------------------------

    def _refuse_under_way(self, what: str) -> None:
        if self._backward is not None:
            raise RuntimeError(
                f"{what} in the middle of a backward: call it between two steps{see('called-at-the-wrong-moment')}"
            )
        if self._pipeline is not None:
            self._pipeline.finish()
            if self._pipeline.is_holding:
                raise RuntimeError(
                    f"{what} between a backward and optimizer.step(): call it between two steps"
                    f"{see('called-at-the-wrong-moment')}"
                )

    def _before_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled() or self._backward is None:
            return
        missing = [name for index, name in enumerate(self._names) if index not in self._backward.places]
        if not missing:
            raise RuntimeError(
                "the last backward ended with an error in its exchange: wrap the model again"
                f"{see('a-backward-did-not-end')}"
            )
        cause = why_not_ended(self._ddp, self._parameters, self._names, missing)
        raise RuntimeError(f"gradients were not reduced over the ranks: {cause}{see('a-backward-did-not-end')}")

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if output is None:
            self._lanes.annotate(sys.exc_info()[1], "forward")  # DDP's own broadcast of buffers names nobody

    def _abandon(self, error: BaseException) -> None:
        for lanes in (self._lanes, self._early_lane):
            if lanes is not None:
                lanes.abandon(error)

    def _is_stuck(self) -> bool:
        return self._lanes.stuck or (self._early_lane is not None and self._early_lane.stuck)

    def __deepcopy__(self, memo: Any) -> TopKState:
        raise TypeError("a DDP module with TopKState cannot be copied: the copy would lose its hook. Copy ddp.module")

    def __reduce__(self) -> Any:
        raise TypeError("a DDP module with TopKState cannot be pickled: save ddp.module.state_dict() instead")


class _OnItsWay:
    """A backward that the forward pipeline waits for."""

    def __init__(self, state: TopKState, backward: Backward) -> None:
        self._state = state
        self._backward = backward
        self._is_counted = False
        self._density = state.config.density_at(state._step)

    @property
    def works(self) -> Sequence[Work]:
        """See :class:`~ddp_hooks.topk.forward.Reduced`."""
        return self._backward.works

    def approve(self) -> bool:
        """See :class:`~ddp_hooks.topk.forward.Reduced`."""
        state, backward = self._state, self._backward
        if self._is_counted:  # by a step that did not end
            return True
        backward.hear_verdict(state._stall, state._recorder)
        if backward.spoilt_by:
            return False
        state._refuse_stale(backward)
        state._step += 1
        self._is_counted = True
        return True

    def arrived(self, parameters: Sequence[int]) -> None:
        """See :class:`~ddp_hooks.topk.forward.Reduced`."""
        self._backward.leave_out_unused(parameters)

    def landed(self) -> None:
        """See :class:`~ddp_hooks.topk.forward.Reduced`."""
        self._state._note_stats(self._backward.reductions, self._density)

    def bring_home(self) -> None:
        """See :class:`~ddp_hooks.topk.forward.Reduced`."""
        self._state._bring_home(self._backward)

    def conclude(self) -> None:
        """See :class:`~ddp_hooks.topk.forward.Reduced`."""
        self._state._conclude(self._backward, self._is_counted)
