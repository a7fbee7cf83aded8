"""TopKState: what users hold of sparse all-reduce, and how a backward goes.

1. DDP hands over a bucket. Groups whose gradients are all there are submitted to the lanes, in one fixed order, where
   they are added to what earlier steps have left out, selected from, and exchanged.
2. Backward ends: just before DDP waits for its buckets, wait for the groups, and hear whether a rank had gradients that
   are not finite.
3. DDP has made the buckets the model's gradients.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import (
    Algorithm,
    Lanes,
    LaneSettings,
    Recorder,
    Stall,
    Work,
    agree,
    at_exit,
    compat,
    mebibytes,
)
from ddp_hooks.topk import checkpoint, checks
from ddp_hooks.topk.algorithms import Sparsity
from ddp_hooks.topk.bruck import bruck_all_gather
from ddp_hooks.topk.config import TopKConfig
from ddp_hooks.topk.groups import GradientGroup, Place, form_groups, runs_of
from ddp_hooks.topk.reduction import DenseReduction, Gradients, Reduction, SparseReduction
from ddp_hooks.topk.stats import TopKStats
from ddp_hooks.topk.variants import VariantChooser
from ddp_hooks.topk.wire import Wire

logger = logging.getLogger("ddp_hooks")


@dataclass
class _Backward:
    """One synchronised backward, from its first bucket on."""

    buffers: list[Tensor] = field(default_factory=list)  # of the buckets
    futures: list[torch.futures.Future[Tensor]] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)  # of parameters, in the buckets that are there
    reductions: list[Reduction] = field(default_factory=list)  # of the groups that are complete
    works: list[Work] = field(default_factory=list)
    verdict: Work | None = None
    spoilt_by: list[int] = field(default_factory=list)  # ranks with gradients that are not finite
    stale: list[int] = field(default_factory=list)  # parameters that this rank has not used, but with a gradient
    unused: set[int] = field(default_factory=set)  # parameters that no rank has used


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
    ) -> None:
        self.config = config = config if config is not None else TopKConfig()
        group = getattr(ddp, "process_group", None) or dist.group.WORLD
        assert group is not None, "torch.distributed is not initialised"
        problem = checks.find_problem(ddp, config, dist.get_world_size(group))
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        entries = checks.fingerprint(ddp, config, scaler is not None) if problem is None else {}
        agree(entries, problem, group, "the set-up of TopKState")

        managed = compat.managed_parameters(ddp)
        self._names = list(managed)
        self._parameters = list(managed.values())
        self._numels = [parameter.numel() for parameter in self._parameters]
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._scaler = scaler
        self._finds_unused = ddp.find_unused_parameters and dist.get_world_size(group) > 1
        self._ddp = weakref.proxy(ddp)  # the collector does not see that DDP's reducer holds the hook's state
        settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
        device = self._parameters[0].device
        self._recorder = Recorder(False)
        self._lanes = Lanes(group, config.lanes, device, settings, self._recorder)
        self._chooser = VariantChooser(config, self._lanes)
        self._order = list(reversed(range(len(self._parameters))))  # most backwards go this way
        self._groups: list[GradientGroup] = []
        self._group_anew()
        self._used: set[int] = set()  # parameters, since the last synchronised backward
        self._first_order: dict[int, None] | None = {}  # parameters, as the first backward reaches them
        self._watches = [p.register_post_accumulate_grad_hook(_noting(self, i)) for i, p in enumerate(self._parameters)]
        self._step = 0  # of those that were not skipped
        self._num_skipped = 0
        self._stats = TopKStats()
        self._stall = Stall()
        self._mark = (self._lanes.traffic, 0.0)
        self._closed = False
        self._backward = _Backward()
        ddp.join = ddp.join_hook = checks.refuse_join  # type: ignore[method-assign]
        if config.teams == self._lanes.world_size > 1 and self._lanes.rank == 0:
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

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps, to be saved by every rank for itself, between two steps. Not collective.

        Plain tensors, lists and numbers, so ``torch.load(..., weights_only=True)`` reads it. About as large as the
        gradients.
        """
        self._refuse_under_way("state_dict()")
        kept = checkpoint.kept_by_name(self._groups, self._parameters, self._names)
        chosen = self._chooser.chosen
        return {
            "rank": self._lanes.rank,
            "world_size": self._lanes.world_size,
            "step": self._step,
            "num_skipped": self._num_skipped,
            "order": [self._names[index] for index in self._order] if self._first_order is None else None,
            "chosen": [list(variant) for variant in chosen] if chosen is not None else None,
            "memories": [group.memory() for group in self._groups],
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
        dense = {self._names[index] for group in self._groups for index in group.members.dense}
        problem = checkpoint.find_problem(saved, rank if own else None, world_size, shapes, dense)
        entries = {} if problem is not None else {key: saved[0][key] for key in ("step", "order", "chosen")}
        agree(entries, problem, self._lanes.group, "the state of TopKState")
        first = saved[0]
        self._step, self._num_skipped = first["step"], first["num_skipped"]
        if first["order"] is not None:
            self._end_watch()
            index_of = {name: index for index, name in enumerate(self._names)}
            self._order = [index_of[name] for name in first["order"]]
        self._group_anew()
        mine = saved if own else [state for state in saved if state["rank"] % world_size == rank]
        checkpoint.restore(self._groups, self._parameters, self._names, mine, saved)
        same_groups = own and len(first["memories"]) == len(self._groups)
        self._chooser.begin(self._step, first["chosen"] if same_groups else None)
        for group, memories in zip(self._groups, first["memories"], strict=False):
            group.memories = dict(memories) if same_groups else {}

    def close(self) -> None:
        """Finish communication, let every rank do the same, and end the lanes. DDP cannot remove its hook."""
        if self._closed:
            return
        self._closed = True
        for handle in (*self._handles, *self._watches):
            handle.remove()
        self._lanes.close()

    # -- 1. a bucket is ready ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Submit the groups that are complete with this bucket; called by DDP, through the hook, during backward."""
        if self._closed:
            raise RuntimeError("TopKState was closed: wrap the model in a new DistributedDataParallel to train on")
        buffer = bucket.buffer()
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type != "cpu" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        backward = self._backward
        position, start = len(backward.buffers), 0
        backward.buffers.append(buffer)
        backward.futures.append(future)
        for parameter in bucket.parameters():
            index = self._index_of.get(id(parameter))
            if index is None:
                raise RuntimeError(
                    "DDP reduces a parameter that was frozen when TopKState was created: freeze it before wrapping the "
                    "model, or after creating the state"
                )
            backward.places[index] = Place(position, start)
            start += self._numels[index]
        self._submit_complete_groups(backward)
        if len(backward.places) == len(self._parameters):
            question = self._ask_all(backward)
            backward.verdict = self._lanes.run(question, "whether gradients are finite", after=backward.works)
            if self._ddp.static_graph and self._stats.step == 0:
                self._end_exchange()  # this is DDP's end-of-backward callback, which is about to wait for the futures
            else:  # it will be queued after ours
                compat.queue_engine_callback(self._end_exchange)
        return future

    def _submit_complete_groups(self, backward: _Backward) -> None:
        scale = self._scaler.get_scale() if self._scaler is not None else 1.0
        for number, group in enumerate(self._groups[len(backward.reductions) :], len(backward.reductions)):
            sparse, dense = group.members.sparse, group.members.dense
            if any(index not in backward.places for index in sparse + dense):
                return
            if self._finds_unused:
                left = [index for index in sparse + dense if index not in self._used]
                backward.stale += [index for index in left if self._part(backward, index).any()]
            gradients = Gradients(
                backward.buffers,
                runs_of(sparse, self._numels, backward.places),
                runs_of(dense, self._numels, backward.places),
                scale,
            )
            reduction = self._reduction_of(group, number, gradients)
            backward.reductions.append(reduction)
            backward.works.append(reduction.submit())

    def _reduction_of(self, group: GradientGroup, number: int, gradients: Gradients) -> Reduction:
        config = self.config
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

    def _ask_all(self, backward: _Backward) -> Algorithm:
        """Which ranks have gradients that are not finite, and which parameters nobody has used.

        Begins when this rank knows about its own.
        """
        finite = all(reduction.finite for reduction in backward.reductions)
        used = [index in self._used for index in range(len(self._parameters))] if self._finds_unused else []
        mine = torch.tensor([not finite, *used], dtype=torch.uint8, device=self._parameters[0].device)
        ranks = range(self._lanes.world_size)
        flags = yield from bruck_all_gather(mine, [mine.numel()] * len(ranks), ranks, self._lanes.rank)
        backward.spoilt_by = [rank for rank, flag in enumerate(flags) if flag[0].item()]
        by_anybody = torch.stack(flags)[:, 1:].any(0).tolist()
        backward.unused = {index for index, is_used in enumerate(by_anybody) if not is_used}

    # -- 2. the backward ends, but DDP has not waited for its buckets ------------------------------------------------

    def _end_exchange(self) -> None:
        backward = self._backward
        assert backward.verdict is not None
        for work in (*backward.works, backward.verdict):
            if not work.done:
                with self._stall.measure(self._recorder, work.label):
                    work.wait()
        if not backward.spoilt_by:
            if backward.unused:
                self._leave_out_unused(backward)
        else:
            for reduction in backward.reductions:
                reduction.give_back()
            if self._scaler is not None:
                for buffer in backward.buffers:
                    buffer.fill_(torch.inf)  # so that it skips the step, and scales less, on every rank
        for future, buffer in zip(backward.futures, backward.buffers, strict=True):
            future.set_result(buffer)
        # After DDP's own, also if that is not queued yet.
        compat.queue_engine_callback(lambda: compat.queue_engine_callback(self._end_backward))

    # -- 3. DDP has made the buckets the model's gradients ----------------------------------------------------------

    def _end_backward(self) -> None:
        backward, self._backward = self._backward, _Backward()
        self._used.clear()
        self._note_stats(backward.reductions)
        if backward.spoilt_by:
            self._refuse_or_skip(backward.spoilt_by)
            return
        stale = [self._names[index] for index in backward.stale if index in backward.unused]
        if stale:  # the same on every rank, because it was a mean over ranks
            raise RuntimeError(
                f"no rank has used {', '.join(stale[:5])} in this backward, and gradients of an earlier one are still "
                f"there, which would be added to what is left out: call zero_grad() for all parameters of the model "
                f"before a backward, also for those of other optimizers"
            )
        if self._first_order is not None:
            self._settle_order(self._first_order)
        pairs = zip(backward.reductions, backward.works, strict=True)
        times_s = [reduction.seconds(work) for reduction, work in pairs]
        self._chooser.stepped(self._step, times_s, [group.name for group in self._groups])
        self._step += 1

    def _leave_out_unused(self, backward: _Backward) -> None:
        """DDP leaves the gradients of parameters that no rank has used as they were: what came out for them stays."""
        for reduction in backward.reductions:
            for index, start in reduction.group.offsets.items():
                if index in backward.unused:
                    reduction.give_back(slice(start, start + self._numels[index]))
                    self._part(backward, index).zero_()  # which may be the gradient itself

    def _part(self, backward: _Backward, index: int) -> Tensor:
        """A parameter's part of its bucket, (numel,)."""
        bucket, start = backward.places[index]
        return backward.buffers[bucket][start : start + self._numels[index]]

    def _settle_order(self, seen: dict[int, None]) -> None:
        """Groups follow the first backward from now on, as the first rank has seen it."""
        order: list[list[int]] = [[*seen, *(index for index in self._order if index not in seen)]]
        dist.broadcast_object_list(order, group=self._lanes.group, group_src=0)
        self._end_watch()
        self._order = order[0]
        self._group_anew()

    def _end_watch(self) -> None:
        self._first_order = None
        for watch in [] if self._finds_unused else self._watches:
            watch.remove()

    def _group_anew(self) -> None:
        """Form groups in the present order; what was kept moves into them."""
        config, former = self.config, self._groups
        members = form_groups(self._order, self._parameters, mebibytes(config.group_mb), config.dense_below_numel)
        with_velocity = config.momentum is not None
        self._groups = [GradientGroup.of(m, self._parameters, self._names, with_velocity) for m in members]
        group_of = {i: group for group in self._groups for i in (*group.members.sparse, *group.members.dense)}
        for group in former:
            for kind, kept in group.kept().items():
                for index, values in kept.items():
                    group_of[index].keep(kind, index, values)

    def _refuse_or_skip(self, ranks: Sequence[int]) -> None:
        where = f"gradients were not finite on ranks {[dist.get_global_rank(self._lanes.group, r) for r in ranks]}"
        if self.config.on_nonfinite == "raise":
            raise RuntimeError(f"{where}, so no rank has any; what was finite is kept for the next step")
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

    def _note_stats(self, reductions: Sequence[Reduction]) -> None:
        before, now = self._mark, (self._lanes.traffic, self._stall.seconds)
        self._mark = now
        traffic = now[0] - before[0]
        self._stats = TopKStats(
            step=self._stats.step + 1,
            density=self.config.density_at(self._step),
            num_groups=len(reductions),
            num_dense_groups=sum(isinstance(reduction, DenseReduction) for reduction in reductions),
            num_lanes=len(self._lanes),
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=traffic.busy_s,
            stall_s=now[1] - before[1],
            skipped_steps=self._num_skipped,
        )

    # -- around it --------------------------------------------------------------------------------------------------

    def _refuse_under_way(self, what: str) -> None:
        if self._backward.buffers:
            raise RuntimeError(f"{what} in the middle of a backward: call it between two steps")

    def _before_forward(self, *_: Any) -> None:
        places = self._backward.places
        if not torch.is_grad_enabled() or not places:
            return
        missing = [name for index, name in enumerate(self._names) if index not in places]
        if not missing:
            raise RuntimeError("the last backward ended with an error in its exchange: wrap the model again")
        raise RuntimeError(
            f"the last backward ended without gradients for {', '.join(missing[:5])} or parameters of the same bucket, "
            f"so they were not reduced: pass find_unused_parameters=True to DistributedDataParallel; if it ended with "
            f"an exception, wrap the model again"
        )

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if output is None:
            self._lanes.annotate(sys.exc_info()[1], "forward")  # DDP's own broadcast of buffers names nobody

    def _abandon(self, error: BaseException) -> None:
        self._lanes.abandon(error)

    def _is_stuck(self) -> bool:
        return self._lanes.stuck

    def __deepcopy__(self, memo: Any) -> TopKState:
        raise TypeError("a DDP module with TopKState cannot be copied: the copy would lose its hook. Copy ddp.module")

    def __reduce__(self) -> Any:
        raise TypeError("a DDP module with TopKState cannot be pickled: save ddp.module.state_dict() instead")


def _noting(state: TopKState, index: int) -> Callable[[Tensor], None]:
    reference = weakref.ref(state)  # the collector does not see through a parameter's hooks

    def note(_: Tensor) -> None:
        alive = reference()
        if alive is None:
            return
        alive._used.add(index)
        if alive._first_order is not None:
            alive._first_order.setdefault(index)

    return note
