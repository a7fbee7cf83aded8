"""One training step under DeAR: ties DDP's buckets, the user's optimizer and the model's forwards together.

In the order of DESIGN.md's "public hooks and nothing else":

1. DDP hands over a bucket; its reduce-scatters start (:meth:`StepDriver.reduce_bucket`), on CPUs some of them before
   the bucket is complete (:class:`~ddp_hooks.dear.watch.GradientWatch`).
2. Backward ends; guards take the place of gradients (:meth:`StepDriver._end_backward`).
3. The optimizer is about to step; every shard gets its reduced gradient (:meth:`StepDriver.before_step`).
4. The user's optimizer steps, as the update has it (:class:`~ddp_hooks.dear.update.Update`).
5. It has stepped; gathers of parameters, or of gradients, start (:meth:`StepDriver.after_step`).
6. Parameters wait by themselves, mostly in the next forward (:class:`~ddp_hooks.overlap.pipe.FeedPipe`).
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import (
    Recorder,
    Stall,
    Traffic,
    Work,
    agree,
    mebibytes,
    see,
    torch_compat,
)
from ddp_hooks.dear import checks
from ddp_hooks.dear.arrangement import Arrangement
from ddp_hooks.dear.arrival import GradientArrival
from ddp_hooks.dear.backpipe import Reduction
from ddp_hooks.dear.checkpoint import OptimizerCheckpoint
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.gradients import GradientKeeper
from ddp_hooks.dear.inspection import Inspector
from ddp_hooks.dear.layout import FusionRule, Layout
from ddp_hooks.dear.replicas import refuse_parted_replicas
from ddp_hooks.dear.replicated import ReplicatedUpdate
from ddp_hooks.dear.sharded import ShardedUpdate
from ddp_hooks.dear.sizing import open_lanes
from ddp_hooks.dear.stats import DearStats, StatsLog
from ddp_hooks.dear.tuned import begin_tuning
from ddp_hooks.dear.update import Update
from ddp_hooks.dear.watch import GradientWatch
from ddp_hooks.intercept.causes import LatestForward, why_not_ended, why_not_reduced
from ddp_hooks.intercept.co_optimizers import CoOptimizer
from ddp_hooks.intercept.guards import refuse_unhooked_forward
from ddp_hooks.overlap import FeedPipe

logger = logging.getLogger("ddp_hooks")


class Phase(Enum):
    """Progress of the backward."""

    OPEN = "no backward runs"
    BACKWARD = "DDP hands over buckets"
    CLOSED = "the state was closed"


class StepKind(Enum):
    """Kind of the step that the optimizer runs."""

    NONE = "no step runs"
    UPDATE = "an update with reduced gradients"
    SKIPPED = "gradients were not finite, so the optimizer has none"
    STATE_ONLY = "torch makes the optimizer's state without an update"


_NEXT_PHASE = {
    Phase.OPEN: (Phase.BACKWARD, Phase.CLOSED),
    Phase.BACKWARD: (Phase.OPEN, Phase.CLOSED),
    Phase.CLOSED: (),
}


class StepDriver:
    """Functions of a training step that hooks call; :class:`~ddp_hooks.DearState` installs the hooks.

    Args:
        ddp, optimizer, config: valid arguments of :class:`~ddp_hooks.DearState`.
        group: process group of DDP.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        config: DearConfig,
        group: dist.ProcessGroup,
    ) -> None:
        self.config = config
        self.group = group
        # Weakly: DDP's reducer holds the hook's state out of the garbage collector's sight, and DDP the reducer.
        self._ddp = cast(DistributedDataParallel, weakref.proxy(ddp))
        self._root = ddp.module
        self.optimizer = optimizer
        managed = torch_compat.managed_parameters(ddp)
        self.names = list(managed)
        self.parameters = list(managed.values())
        self.device = self.parameters[0].device
        self.index_of = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self.recorder = Recorder(config.trace)
        self.co_optimizers: list[CoOptimizer] = []  # optimizers of tables, which step beside this one
        self.step_stall = Stall()  # waits for reduce-scatters and sums over ranks

        self._open(ddp)
        self.keeper = GradientKeeper(self.parameters, self.names, self.update)
        self.pipe = FeedPipe(
            ddp.module, self.parameters, self.recorder, self.update.on_arrival, self.update.gathers_under_forward
        )
        self.watch = GradientWatch(self.parameters, self._advance)
        self._arrival = GradientArrival(self.update, self.keeper, self.recorder, self.step_stall)
        self._inspector = Inspector(self, group, self.update, self.names, config, self.device, self.co_optimizers)
        self._inspects = config.max_grad_norm is not None or config.on_nonfinite is not None
        # Where the update reads gradients one by one, it begins while the last ones travel.
        self._steps_early = self.update.reads_one_by_one and self.device.type == "cpu" and not self._inspects

        self.phase = Phase.OPEN
        self._step = StepKind.NONE
        self.reduction: Reduction | None = None  # from the first bucket of a backward until it is attached
        self._in_forward = False  # inside of a forward through DDP's hooks
        self._latest_forward: LatestForward = "none"
        self._gathers: list[Work] = []  # gathers of gradients inside of the step under way
        self._stats = DearStats()
        self.log: StatsLog | None = None
        self._mark = _Mark(self.lanes.traffic, 0.0, 0.0, time.perf_counter())

    def _open(self, ddp: DistributedDataParallel) -> None:
        """Open lanes, and make layout, update, checkpoint and tuner; collective."""
        config, optimizer = self.config, self.optimizer
        model_bytes = sum(parameter.nbytes for parameter in self.parameters)
        replicates = checks.updates_whole_parameters(optimizer, config)
        self.lanes, atom_bytes, fusion_bytes, link = open_lanes(
            config, self.group, self.device, self.recorder, model_bytes, replicates
        )
        fusion_mb = config.fusion_mb if config.fusion_mb is not None else fusion_bytes / mebibytes(1)
        rule = FusionRule(config.fusion, fusion_mb, config.layers_per_group)
        on_cpus = self.device.type == "cpu" and self.lanes.world_size > 1
        self._watches = on_cpus and torch_compat.places_gradients_one_by_one(ddp)
        self.layout = Arrangement(
            self.parameters, self.names, ddp.module, self.lanes.world_size, rule, atom_bytes, self._watches
        )
        self.update: Update
        if replicates:
            self.update = self._replicate(optimizer)
        else:
            self.update = ShardedUpdate(optimizer, self.parameters, self.names, self.lanes, config.master_dtype)
        self.checkpoint = OptimizerCheckpoint(
            optimizer, self.update, self.layout, self.parameters, self.names, self.group, config
        )
        self.tuning = begin_tuning(
            config,
            self.layout,
            self.lanes,
            link,
            self.parameters,
            self.names,
            ddp.bucket_bytes_cap,
            self.regroup,
        )

    def _replicate(self, optimizer: torch.optim.Optimizer) -> ReplicatedUpdate:
        parameterwise = checks.updates_parameters(optimizer, self.config)
        if self.config.update == "auto" and self.lanes.rank == 0:
            logger.info(
                "%s looks at whole parameters, so updates are replicated%s",
                type(optimizer).__name__,
                ""
                if parameterwise
                else ", and step() waits for all gradients (see DearConfig(assume_parameterwise=True))",
            )
        return ReplicatedUpdate(
            optimizer, self.parameters, self.names, self.lanes, parameterwise, lambda: self.pipe.finish()
        )

    def _enter(self, phase: Phase) -> None:
        assert phase in _NEXT_PHASE[self.phase], f"{phase} follows {self.phase}"
        self.phase = phase

    # -- 1. a bucket is ready ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Launch the reduce-scatters of a bucket; called by DDP, through the hook, during backward."""
        self.refuse_closed()
        if self.phase is not Phase.BACKWARD:
            self._begin_backward()
        assert self.reduction is not None
        buffer = bucket.buffer()
        parameters = [self.index_of.get(id(p)) for p in bucket.parameters()]
        if None in parameters:
            raise RuntimeError(
                "DDP reduces a parameter that was frozen, or not there, when DearState was created: change the model "
                f"before wrapping it{see('set-up-changed-later')}"
            )
        self.reduction.add_bucket(tuple(cast(list[int], parameters)), buffer, bucket.is_last())
        if self.reduction.num_parameters == len(self.parameters):
            # Only now, as DDP does: earlier buckets may come inside of a recomputation's own backward. DDP queues its
            # end-of-backward callback after ours; a callback queued from a callback runs after both.
            torch_compat.queue_engine_callback(lambda: torch_compat.queue_engine_callback(self._end_backward))
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type != "cpu" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def _begin_backward(self) -> None:
        if self._latest_forward == "none" or self.reduction is not None:
            refuse_unhooked_forward()
        self.finish_gathers()  # parameters that the forward did not touch may still be in flight
        self.reduction = Reduction(self.lanes, self.layout, self.watch.ready, self.config.reduce_dtype)
        self._enter(Phase.BACKWARD)

    def _advance(self) -> None:
        if self.phase is not Phase.BACKWARD:
            self._begin_backward()
        assert self.reduction is not None
        self.reduction.advance()

    # -- 2. backward has ended --------------------------------------------------------------------------------------

    def _end_backward(self) -> None:
        if self.phase is Phase.BACKWARD:  # not closed meanwhile
            self._enter(Phase.OPEN)
        self._latest_forward = "none"
        self.watch.arm(False)
        reduction = self.reduction
        assert reduction is not None
        reduction.flush()
        self.watch.remember(reduction.gradients)
        reduction.used = self.keeper.guard_model()
        self.keeper.keep_as_base()

    # -- 3. the optimizer is about to step --------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if torch_compat.is_inner_step(optimizer) or self.update.is_updating:
            return None
        if torch_compat.makes_state(kwargs):
            self._step = StepKind.STATE_ONLY
            self.pipe.finish()
            self.update.enter_blank()
            return None
        if torch_compat.inside_compiled_region():
            raise RuntimeError(
                "optimizer.step() was called from compiled code, which cannot wait for gradients: compile the model "
                f"alone, and call optimizer.step() outside{see('how-step-is-called')}"
            )
        replaced = torch_compat.with_closure(args, kwargs, self._attaching)
        if replaced is None:
            self._prepare_step()
        return replaced

    def _attaching(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure; gradients are attached when it has made them."""
        return torch_compat.evaluated_once(closure, self._prepare_step, "DeAR supports")

    def _prepare_step(self) -> None:
        """Give every shard its gradient, clipped or dropped as the settings ask."""
        self.update.end_interrupted_step()
        self.finish_gathers()  # two steps without a forward between them
        from_last_backward = self.reduction is not None  # not shown to the user in between
        self.attach_gradients(stepping=True)
        self.update.read_masters()
        self._step = StepKind.SKIPPED if self._inspects and not self._inspector.approve() else StepKind.UPDATE
        self.update.enter()
        if self._step is StepKind.SKIPPED:
            self.keeper.clear()
        elif self.layout.layout is not None:
            in_place = self._arrival.is_under_way or (from_last_backward and self._arrival.in_place)
            to_gather = self.update.open_step(in_place)
            if to_gather is not None:
                self._gather_gradients(to_gather)

    def attach_gradients(self, stepping: bool) -> None:
        """Give every shard its reduced gradient, as plain DDP would have left it.

        A known optimizer that is about to step gets gradients that it waits for one by one, so that it begins while
        the last ones travel. With replicated updates gathers wait for them, where nothing else is to be done.
        """
        self._refuse_unfinished_backward()
        self._refuse_unreduced()
        reduction = self.reduction
        if reduction is None:
            self.keeper.release()
            return
        self.layout.refuse_replaced_storage()
        layout = reduction.layout()
        if self.layout.layout != layout:
            self._adopt(layout, reduction)
        self._arrival.attach(reduction)
        self.update.use_memory(reduction.gradients)
        self.reduction = None
        if self._steps_early and stepping:
            self.update.step_before_arrival(self._arrival)
        else:
            self._arrival.settle()

    def refuse_closed(self) -> None:
        if self.phase is Phase.CLOSED:
            raise RuntimeError(
                "DearState was closed: wrap the model in a new DistributedDataParallel to train on"
                f"{see('the-state-was-closed')}"
            )

    def _refuse_unfinished_backward(self) -> None:
        if self.phase is Phase.BACKWARD and self.reduction is not None:
            seen = {parameter for bucket in self.reduction.buckets for parameter in bucket}
            missing = [name for index, name in enumerate(self.names) if index not in seen]
            cause = why_not_ended(self._ddp, self.parameters, self.names, missing)
            raise RuntimeError(f"gradients were not reduced over the ranks: {cause}{see('a-backward-did-not-end')}")

    def _refuse_unreduced(self) -> None:
        name = self.keeper.unreduced()
        if name is not None:
            cause = why_not_reduced(
                self._ddp,
                self.parameters,
                self.names,
                [name for name, parameter in zip(self.names, self.parameters, strict=True) if parameter.grad is None],
                self._latest_forward,
                "DearState",
                "dear_hook",
                "change gradients in `with state.reduced_gradients() as shards:`",
            )
            raise RuntimeError(
                f"the gradient of {name} was not reduced over the ranks: {cause}{see('gradients-were-not-reduced')}"
            )

    # -- layouts ----------------------------------------------------------------------------------------------------

    def _adopt(self, layout: Layout, reduction: Reduction) -> None:
        """Make ``layout`` the one in force: move parameters, optimizer state and kept gradients to where it says."""
        reduction.wait()
        names = {f"bucket {i}": [self.names[p] for p in bucket] for i, bucket in enumerate(layout.buckets)}
        agree({**names, "atoms": layout.atoms}, None, self.lanes.group, "the layout of buckets", self.config)
        old = self.layout.layout
        marks = self.keeper.marks()
        for shard in self.update.shards:  # what was kept from earlier backwards travels with the state
            shard.tensor.grad = self.keeper.unless_discarded(shard.interval.parameter, shard.base, marks)
        states = self.update.take_states(old, layout)
        self.layout.move_parameters(layout)
        self.update.install(layout, self.layout.flats, states)
        self._plan_groups(layout)
        self.keeper.keep_as_base()

    def _plan_groups(self, layout: Layout) -> None:
        self.pipe.plan(self.layout.plan(layout, self._common_order_of_need))
        if self._watches:
            self.watch.watch(layout)

    def regroup(self, rule: FusionRule) -> None:
        """Let another rule say what travels together, from the next backward on; all ranks do it between steps."""
        self.layout.rule = rule
        if self.layout.layout is not None:
            self.finish_gathers()
            self._plan_groups(self.layout.layout)

    def _common_order_of_need(self) -> list[int]:
        mine = self.pipe.order_of_need()
        order: list[int] = self.lanes.broadcast_object(mine, "the layout of buckets, in backward")
        return order

    # -- 5. the optimizer has stepped -------------------------------------------------------------------------------

    def after_step(self, *_: Any) -> None:
        """Launch the gathers that follow an update; called by the optimizer."""
        if torch_compat.is_inner_step(self.optimizer) or self.update.is_updating:
            return
        self.update.leave()
        kind, self._step = self._step, StepKind.NONE
        if kind in (StepKind.STATE_ONLY, StepKind.SKIPPED) or self.layout.layout is None:
            return
        self.checkpoint.outdate()
        torch_compat.increment_versions(self.parameters)
        to_gather = self.update.close_step(self._arrival, self.layout)
        if to_gather is not None:
            self._launch_gathers(to_gather)
        for co_optimizer in self.co_optimizers:
            co_optimizer.yield_link_to(self.pipe.under_way)
        if not self.config.overlap_forward or self.config.check_replicas:
            self.pipe.finish(on_host=True)
        self._stats = self._next_stats()
        if self.log is not None:
            self.log.write(self._stats.step, self.latest_stats)
        if self.config.check_replicas:
            refuse_parted_replicas(self.parameters, self.names, self._stats.step, self.group, self.config)
        if self.tuning is not None:
            self.tuning.stepped()

    def step_failed(self) -> None:
        """Restore gradients and memory when an exception is about to leave the optimizer's step."""
        self.update.leave()
        kind, self._step = self._step, StepKind.NONE
        if kind is StepKind.STATE_ONLY:
            torch_compat.undo_making_state(self.optimizer)
        else:
            self.update.step_failed(self.layout)

    def _gather_gradients(self, memory: Sequence[Tensor]) -> None:
        """Gather whole gradients for an optimizer that looks at all of them at once."""
        gathers = zip(self.layout.gathers(memory), self.layout.gather_labels, strict=True)
        self._gathers = [self.lanes.all_gather(*gather) for gather in gathers]
        self._await_gathers()
        assert self.update.on_arrival is not None
        self.update.on_arrival(range(len(self.parameters)))

    def _await_gathers(self) -> None:
        """Wait for gathers inside of a step; they are still known if an exception ends this."""
        while self._gathers:
            work = self._gathers[0]
            if not work.done:
                with self.step_stall.measure(self.recorder, work.label):
                    work.wait()
            self._gathers.pop(0)

    def _launch_gathers(self, memory: Sequence[Tensor]) -> None:
        layout = self.layout
        after = [self._arrival.under_way(group) for group in layout.gather_groups]
        gathers = zip(layout.gathers(memory), layout.gather_labels, after, strict=True)
        self.pipe.launched([self.lanes.all_gather(*gather) for gather in gathers])

    def finish_gathers(self) -> None:
        self.pipe.finish()
        self._await_gathers()
        self._arrival.settle()  # what gathers have followed

    def latest_stats(self) -> DearStats:
        norm = self._inspector.grad_norm
        return replace(
            self._stats,
            grad_norm=norm.item() if norm is not None else None,
            skipped_steps=self._inspector.skipped_steps,
        )

    def _next_stats(self) -> DearStats:
        self.recorder.end_step()
        before = self._mark
        self._mark = _Mark(
            self.lanes.traffic, self.step_stall.seconds, self.pipe.stall.seconds, time.perf_counter()
        )
        traffic = self._mark.traffic - before.traffic
        return DearStats(
            step=self._stats.step + 1,
            num_groups=len(self.layout.schedule.groups) if self.layout.schedule is not None else 0,
            num_lanes=len(self.lanes),
            fusion_mb=self.layout.rule.mb if self.layout.rule.fusion == "size" else None,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=None if self.lanes.native else traffic.busy_s,
            step_stall_s=self._mark.step_stall_s - before.step_stall_s,
            forward_stall_s=self._mark.forward_stall_s - before.forward_stall_s,
            wall_s=self._mark.time_s - before.time_s,
        )

    # -- 6. a forward through DDP -----------------------------------------------------------------------------------

    def before_forward(self, *_: Any) -> None:
        self._in_forward = True
        if not torch.is_grad_enabled():
            self.pipe.begin_forward(training=False)
            return
        self._latest_forward = "synchronised" if self._ddp.require_backward_grad_sync else "no_sync"
        self.update.end_interrupted_step()
        if self.reduction is not None:
            self.attach_gradients(stepping=False)
        if not self.pipe.in_flight:
            self.update.leave_buckets()
            self._arrival.settle()  # of a step that did not end
        self.keeper.make_room(self._arrival.settle)
        self.pipe.begin_forward(self._ddp.training and self.config.overlap_forward)

    def before_model(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._in_forward:
            ddp = torch_compat.ddp_in_forward()
            if ddp is not None and ddp.module is self._root:
                refuse_unhooked_forward()
        self.keeper.guard_kept(self._ddp.require_backward_grad_sync)

    def after_forward(self, module: Any, args: Any, output: Any) -> None:
        self._in_forward = False
        self.pipe.end_forward()
        if self.update.gathers_into_buckets:
            self.finish_gathers()  # into the memory that the coming backward will write
        if torch.is_grad_enabled():
            self.watch.arm(output is not None and self._ddp.require_backward_grad_sync)
        error = sys.exc_info()[1] if output is None else None
        self.lanes.annotate(error, "forward")  # DDP's own broadcast of buffers names nobody

    def zero_grad(self, set_to_none: bool) -> None:
        if self.layout.layout is not None:  # until then the optimizer holds the parameters themselves
            self.keeper.zero_grad(set_to_none)
            self.update.zero_marks(set_to_none)

    # -- gradients between backward and step (see GradientShards) ---------------------------------------------------

    @contextmanager
    def reduced_gradients(self) -> Iterator[list[torch.nn.Parameter]]:
        """See :meth:`ddp_hooks.DearState.reduced_gradients`."""
        self.refuse_closed()
        if self.update.is_stepping:
            raise RuntimeError(
                "gradients were asked for inside of optimizer.step(), when they are already on their way: clip or "
                f"change them before step(), or use DearConfig(max_grad_norm=...){see('gradients-are-guarded')}"
            )
        if self.update.gathers_into_buckets:
            self.finish_gathers()  # an update of the last step may still need the gradients as they are
        self.attach_gradients(stepping=False)
        self.keeper.release()
        self.keeper.forget_zeroing()
        try:
            yield [shard.tensor for shard in self.update.shards]
        finally:
            self.keeper.withdraw()

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a small tensor over the ranks, on :attr:`device`; collective."""
        with self.step_stall.measure(self.recorder, "a scalar over the ranks"):
            return self.lanes.reduce_small(value.to(self.device), "sum_over_ranks()")

    def largest_over_ranks(self, value: Tensor) -> Tensor:
        """Return the largest values of a small tensor over the ranks, on :attr:`device`; collective."""
        with self.step_stall.measure(self.recorder, "a scalar over the ranks"):
            return self.lanes.reduce_small(value.to(self.device), "largest_over_ranks()", largest=True)

    def close(self) -> None:
        """Finish communication, restore parameters and gradients, and end the lanes; the second call does nothing."""
        in_backward = self.phase is Phase.BACKWARD
        self._enter(Phase.CLOSED)
        if self.tuning is not None:
            self.tuning.close()
        try:
            if self.reduction is not None and not in_backward:
                self.reduction.wait()
            self.finish_gathers()
        finally:
            self.reduction = None
            self.update.end_interrupted_step()
            self.update.leave()
            self.pipe.close()
            self.watch.close()
            self.keeper.close()


class _Mark:
    """Running totals at the end of a step."""

    def __init__(self, traffic: Traffic, step_stall_s: float, forward_stall_s: float, time_s: float) -> None:
        self.traffic = traffic
        self.step_stall_s = step_stall_s
        self.forward_stall_s = forward_stall_s
        self.time_s = time_s
