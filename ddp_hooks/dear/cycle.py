"""One training step under DeAR: ties DDP's buckets, the user's optimizer and the model's forwards together.

In the order of DESIGN.md's "public hooks and nothing else":

1. DDP hands over a bucket; its reduce-scatters start (:meth:`StepCycle.reduce_bucket`), on CPUs those of parts that
   are there even before (:class:`~ddp_hooks.dear.watch.GradientWatch`).
2. Backward ends; guards take the place of gradients that mean nothing now (:meth:`StepCycle._end_backward`).
3. The optimizer is about to step; every shard gets its reduced gradient (:meth:`StepCycle._before_step`).
4. The user's optimizer steps on this rank's shards.
5. It has stepped; the gathers of the updated parameters start (:meth:`StepCycle._after_step`).
6. Parameters wait by themselves, mostly in the next forward (:class:`~ddp_hooks.overlap.pipe.FeedPipe`).

With replicated updates the gathers of step 5 are those of gradients, and the optimizer's code runs in step 6
(:class:`~ddp_hooks.dear.replicated.ReplicatedOptimizer`).
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import (
    Recorder,
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
from ddp_hooks.dear.replicated import ReplicatedOptimizer
from ddp_hooks.dear.sharded import ShardedOptimizer
from ddp_hooks.dear.sizing import open_lanes
from ddp_hooks.dear.stats import DearStats, StatsLog
from ddp_hooks.dear.tuned import begin_tuning
from ddp_hooks.dear.watch import GradientWatch
from ddp_hooks.intercept import ELEMENTWISE
from ddp_hooks.intercept.causes import LatestForward, why_not_ended, why_not_reduced
from ddp_hooks.intercept.co_optimizers import CoOptimizer
from ddp_hooks.intercept.guards import refuse_unhooked_forward
from ddp_hooks.overlap import FeedPipe

logger = logging.getLogger("ddp_hooks")


class StepCycle:
    """What happens in a training step, as functions that hooks call: the inner half of ``DearState``.

    Args:
        ddp, optimizer, config: as for :class:`~ddp_hooks.DearState`, found to be right.
        group: of DDP.
    """

    _inspector: Inspector  # made by DearState, of which it asks for sums over ranks
    _co_optimizers: list[CoOptimizer]  # what is updated beside the parameters, found by DearState

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        config: DearConfig,
        group: dist.ProcessGroup,
    ) -> None:
        self.config = config
        self._co_optimizers = []
        # Weakly: DDP's reducer holds the hook's state out of the garbage collector's sight, and DDP the reducer.
        self._ddp = cast(DistributedDataParallel, weakref.proxy(ddp))
        self._root = ddp.module
        self._optimizer = optimizer
        managed = torch_compat.managed_parameters(ddp)
        self._names = list(managed)
        self._parameters = list(managed.values())
        self.device = self._parameters[0].device
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._recorder = Recorder(config.trace)
        model_bytes = sum(parameter.nbytes for parameter in self._parameters)
        replicates = checks.updates_whole_parameters(optimizer, config)
        self._lanes, atom_bytes, fusion_bytes, link = open_lanes(
            config, group, self.device, self._recorder, model_bytes, replicates
        )
        fusion_mb = config.fusion_mb if config.fusion_mb is not None else fusion_bytes / mebibytes(1)
        rule = FusionRule(config.fusion, fusion_mb, config.layers_per_group)
        on_cpus = self.device.type == "cpu" and self._lanes.world_size > 1
        self._watches = on_cpus and torch_compat.places_gradients_one_by_one(ddp)
        self._arrangement = Arrangement(
            self._parameters,
            self._names,
            ddp.module,
            self._lanes.world_size,
            rule,
            atom_bytes,
            self._watches,
        )
        self._replicated = self._replicate(optimizer) if replicates else None
        self._sharded = self._replicated or ShardedOptimizer(
            optimizer, self._parameters, self._names, self._lanes, config.master_dtype
        )
        self._checkpoint = OptimizerCheckpoint(
            optimizer, self._sharded, self._arrangement, self._parameters, self._names, group, config
        )
        self._keeper = GradientKeeper(self._parameters, self._names, self._sharded)
        arrived = self._replicated.arrived if self._replicated is not None else None
        gathers_under_forward = (
            self._replicated.deferred if self._replicated is not None else self._lanes.world_size > 1
        )
        self._pipe = FeedPipe(ddp.module, self._parameters, self._recorder, arrived, gathers_under_forward)
        self._watch = GradientWatch(self._parameters, self._advance)
        self._arrival = GradientArrival(self._sharded, self._keeper, self._recorder)

        self._reduction: Reduction | None = None  # from the first bucket of a backward until it is attached
        self._in_backward = False
        self._in_forward = False  # one that was called through DDP's hooks
        self._latest_forward: LatestForward = "none"
        self._inspects = config.max_grad_norm is not None or config.on_nonfinite is not None
        # Optimizers that look at one gradient after the other, and are seen to; or at none before the next forward.
        patient = type(optimizer) in ELEMENTWISE if self._replicated is None else self._replicated.deferred
        self._steps_early = patient and self.device.type == "cpu" and not self._inspects
        self.tuning = begin_tuning(
            config,
            self._arrangement,
            self._lanes,
            link,
            self._parameters,
            self._names,
            ddp.bucket_bytes_cap,
            self._regroup,
        )
        """The search for a fusion size that ``config.tuner`` asks for; None without."""
        self._makes_state = False  # whether the step under way only makes the optimizer's state
        self._gathers: list[Work] = []  # of gradients, inside of the step under way
        self._withheld = False  # whether the step under way has no gradients, because some were not finite
        self._stats = DearStats()
        self._log: StatsLog | None = None
        self._mark = _Mark(self._lanes.traffic, 0.0, 0.0, time.perf_counter())
        self._closed = False

    # -- 1. a bucket is ready ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Launch the reduce-scatters of a bucket; called by DDP, through the hook, during backward."""
        self._refuse_closed()
        if not self._in_backward:
            self._begin_backward()
        assert self._reduction is not None
        buffer = bucket.buffer()
        parameters = [self._index_of.get(id(p)) for p in bucket.parameters()]
        if None in parameters:
            raise RuntimeError(
                "DDP reduces a parameter that was frozen, or not there, when DearState was created: change the model "
                f"before wrapping it{see('set-up-changed-later')}"
            )
        self._reduction.add_bucket(tuple(cast(list[int], parameters)), buffer, bucket.is_last())
        if self._reduction.num_parameters == len(self._parameters):
            # Only now, as DDP does: earlier buckets may come inside of a recomputation's own backward. DDP queues its
            # end-of-backward callback after ours; a callback queued from a callback runs after both.
            torch_compat.queue_engine_callback(lambda: torch_compat.queue_engine_callback(self._end_backward))
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type != "cpu" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def _begin_backward(self) -> None:
        if self._latest_forward == "none" or self._reduction is not None:
            refuse_unhooked_forward()
        self._finish_gathers()  # parameters that the forward did not touch may still be in flight
        arranged = self._arrangement
        self._reduction = Reduction(
            self._lanes,
            arranged.schedule,
            arranged.cut,
            arranged.fuse_in_order,
            arranged.label,
            self._watch.ready,
            self.config.reduce_dtype,
        )
        self._in_backward = True

    def _advance(self) -> None:
        if not self._in_backward:
            self._begin_backward()
        assert self._reduction is not None
        self._reduction.advance()

    # -- 2. backward has ended --------------------------------------------------------------------------------------

    def _end_backward(self) -> None:
        self._in_backward = False
        self._latest_forward = "none"
        self._watch.arm(False)
        reduction = self._reduction
        assert reduction is not None
        reduction.flush()
        self._watch.remember(reduction.gradients)
        reduction.used = self._keeper.guard_model()
        self._keeper.keep_as_base()

    # -- 3. the optimizer is about to step --------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if torch_compat.is_inner_step(optimizer) or (self._replicated is not None and self._replicated.updating):
            return None
        if torch_compat.makes_state(kwargs):
            self._makes_state = True
            self._pipe.finish()
            self._sharded.enter_blank()
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
        """Every shard gets its gradient, clipped or withheld as the settings ask."""
        if self._replicated is not None:
            self._replicated.close_step()  # one that did not end
        self._finish_gathers()  # two steps without a forward between them
        from_last_backward = self._reduction is not None  # not shown to the user in between
        self._attach_gradients(stepping=True)
        if isinstance(self._sharded, ShardedOptimizer):
            self._sharded.read_masters()
        if self._inspects:
            self._withheld = not self._inspector.approve()
        self._sharded.enter()
        if self._withheld:
            self._keeper.clear()
        elif self._replicated is not None and self._arrangement.layout is not None:
            in_place = self._arrival.is_under_way or (from_last_backward and self._arrival.in_place)
            self._replicated.open_step(in_place)
            if not self._replicated.deferred:
                self._gather_gradients(self._replicated)

    def _attach_gradients(self, stepping: bool) -> None:
        """Give every shard its reduced gradient, as plain DDP would have left it.

        A known optimizer that is about to step gets gradients that it waits for one by one, so that it begins while
        the last ones travel. With replicated updates gathers wait for them, where nothing else is to be done.
        """
        self._refuse_unfinished_backward()
        self._refuse_unreduced()
        reduction = self._reduction
        if reduction is None:
            self._keeper.release()
            return
        self._arrangement.refuse_replaced_storage()
        layout = reduction.layout()
        if self._arrangement.layout != layout:
            self._adopt(layout, reduction)
        self._arrival.attach(reduction)
        if self._replicated is not None:
            self._replicated.use_memory(reduction.gradients)
        self._reduction = None
        if not (self._steps_early and stepping):
            self._arrival.settle()
        elif self._replicated is None:
            self._arrival.defer()
        elif not self._arrival.in_place:
            self._arrival.settle()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError(
                "DearState was closed: wrap the model in a new DistributedDataParallel to train on"
                f"{see('the-state-was-closed')}"
            )

    def _refuse_unfinished_backward(self) -> None:
        if self._in_backward and self._reduction is not None:
            seen = {parameter for bucket in self._reduction.buckets for parameter in bucket}
            missing = [name for index, name in enumerate(self._names) if index not in seen]
            cause = why_not_ended(self._ddp, self._parameters, self._names, missing)
            raise RuntimeError(f"gradients were not reduced over the ranks: {cause}{see('a-backward-did-not-end')}")

    def _refuse_unreduced(self) -> None:
        name = self._keeper.unreduced()
        if name is not None:
            cause = why_not_reduced(
                self._ddp,
                self._parameters,
                self._names,
                [name for name, parameter in zip(self._names, self._parameters, strict=True) if parameter.grad is None],
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
        names = {f"bucket {i}": [self._names[p] for p in bucket] for i, bucket in enumerate(layout.buckets)}
        agree({**names, "atoms": layout.atoms}, None, self._lanes.group, "the layout of buckets", self.config)
        old = self._arrangement.layout
        marks = self._keeper.marks()
        for shard in self._sharded.shards:  # what was kept from earlier backwards travels with the state
            shard.tensor.grad = self._keeper.unless_discarded(shard.interval.parameter, shard.base, marks)
        states = self._sharded.take_states(old, layout)
        self._arrangement.move_parameters(layout)
        self._sharded.install(layout, self._arrangement.flats, states)
        self._plan_groups(layout)
        self._keeper.keep_as_base()

    def _plan_groups(self, layout: Layout) -> None:
        self._pipe.plan(self._arrangement.plan(layout, self._common_order_of_need))
        if self._watches:
            self._watch.watch(layout)

    def _regroup(self, rule: FusionRule) -> None:
        """Let another rule say what travels together, from the next backward on; all ranks do it between steps."""
        self._arrangement.rule = rule
        if self._arrangement.layout is not None:
            self._finish_gathers()
            self._plan_groups(self._arrangement.layout)

    def _common_order_of_need(self) -> list[int]:
        mine = self._pipe.order_of_need()
        order: list[int] = self._lanes.broadcast_object(mine, "the layout of buckets, in backward")
        return order

    # -- 5. the optimizer has stepped -------------------------------------------------------------------------------

    def _after_step(self, *_: Any) -> None:
        if torch_compat.is_inner_step(self._optimizer) or (self._replicated is not None and self._replicated.updating):
            return
        self._sharded.leave()
        if self._makes_state:
            self._makes_state = False
            return
        if self._arrangement.layout is None:
            return
        if self._withheld:
            self._withheld = False
            return
        if self._replicated is None:
            self._arrival.settle()
        self._checkpoint.outdate()
        torch_compat.increment_versions(self._parameters)
        if isinstance(self._sharded, ShardedOptimizer):
            self._sharded.take_back_memory()
            self._sharded.write_masters()
            if self._lanes.world_size > 1:  # one rank has everything
                self._launch_gathers(self._arrangement.flats)
        else:
            self._sharded.close_step()
            if self._sharded.deferred:
                self._launch_gathers(self._sharded.memory)
            else:
                self._arrangement.take_back_memory(self._optimizer.state)
        for co_optimizer in self._co_optimizers:
            co_optimizer.yield_link_to(self._pipe.under_way)
        if not self.config.overlap_forward or self.config.check_replicas:
            self._pipe.finish(on_host=True)
        self._stats = self._next_stats()
        if self._log is not None:
            self._log.write(self._stats.step, self._latest_stats)
        if self.config.check_replicas:
            refuse_parted_replicas(self._parameters, self._names, self._stats.step, self._lanes.group, self.config)
        if self.tuning is not None:
            self.tuning.stepped()

    def _step_failed(self) -> None:
        """An exception is about to leave the optimizer's step."""
        self._sharded.leave()
        if self._makes_state:
            self._makes_state = False
            torch_compat.undo_making_state(self._optimizer)
        elif isinstance(self._sharded, ShardedOptimizer):
            self._sharded.take_back_memory()
        elif self._replicated is not None:
            self._replicated.close_step()
            if not self._replicated.deferred:
                self._arrangement.take_back_memory(self._optimizer.state)

    def _gather_gradients(self, replicated: ReplicatedOptimizer) -> None:
        """Gather whole gradients for an optimizer that looks at all of them at once."""
        arranged = self._arrangement
        gathers = zip(arranged.gathers(replicated.memory), arranged.gather_labels, strict=True)
        self._gathers = [self._lanes.all_gather(*gather) for gather in gathers]
        self._await_gathers()
        replicated.arrived(range(len(self._parameters)))

    def _await_gathers(self) -> None:
        """Wait for gathers inside of a step; they are still known if an exception ends this."""
        while self._gathers:
            work = self._gathers[0]
            if not work.done:
                with self._arrival.stall.measure(self._recorder, work.label):
                    work.wait()
            self._gathers.pop(0)

    def _launch_gathers(self, memory: Sequence[Tensor]) -> None:
        arranged = self._arrangement
        after = [self._arrival.under_way(group) for group in arranged.gather_groups]
        gathers = zip(arranged.gathers(memory), arranged.gather_labels, after, strict=True)
        self._pipe.launched([self._lanes.all_gather(*gather) for gather in gathers])

    def _finish_gathers(self) -> None:
        self._pipe.finish()
        self._await_gathers()
        self._arrival.settle()  # what gathers have followed

    def _latest_stats(self) -> DearStats:
        norm = self._inspector.grad_norm
        return replace(
            self._stats,
            grad_norm=norm.item() if norm is not None else None,
            skipped_steps=self._inspector.skipped_steps,
        )

    def _next_stats(self) -> DearStats:
        self._recorder.end_step()
        before = self._mark
        self._mark = _Mark(
            self._lanes.traffic, self._arrival.stall.seconds, self._pipe.stall.seconds, time.perf_counter()
        )
        traffic = self._mark.traffic - before.traffic
        return DearStats(
            step=self._stats.step + 1,
            num_groups=len(self._arrangement.schedule.groups) if self._arrangement.schedule is not None else 0,
            num_lanes=len(self._lanes),
            fusion_mb=self._arrangement.rule.mb if self._arrangement.rule.fusion == "size" else None,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=None if self._lanes.native else traffic.busy_s,
            step_stall_s=self._mark.step_stall_s - before.step_stall_s,
            forward_stall_s=self._mark.forward_stall_s - before.forward_stall_s,
            wall_s=self._mark.time_s - before.time_s,
        )

    # -- 6. a forward through DDP -----------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        self._in_forward = True
        if not torch.is_grad_enabled():
            self._pipe.begin_forward(training=False)
            return
        self._latest_forward = "synchronised" if self._ddp.require_backward_grad_sync else "no_sync"
        if self._replicated is not None:
            self._replicated.close_step()  # one that did not end
        if self._reduction is not None:
            self._attach_gradients(stepping=False)
        if not self._pipe.in_flight:
            if self._replicated is not None:
                self._replicated.leave_buckets()
            self._arrival.settle()  # of a step that did not end
        self._keeper.make_room(self._arrival.settle)
        self._pipe.begin_forward(self._ddp.training and self.config.overlap_forward)

    def _before_model(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not self._in_forward:
            ddp = torch_compat.ddp_in_forward()
            if ddp is not None and ddp.module is self._root:
                refuse_unhooked_forward()
        self._keeper.guard_kept(self._ddp.require_backward_grad_sync)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        self._in_forward = False
        self._pipe.end_forward()
        if self._replicated is not None:
            self._finish_gathers()  # into the memory that the coming backward will write
        if torch.is_grad_enabled():
            self._watch.arm(output is not None and self._ddp.require_backward_grad_sync)
        error = sys.exc_info()[1] if output is None else None
        self._lanes.annotate(error, "forward")  # DDP's own broadcast of buffers names nobody

    # -- parts ------------------------------------------------------------------------------------------------------

    def _replicate(self, optimizer: torch.optim.Optimizer) -> ReplicatedOptimizer:
        parameterwise = checks.updates_parameters(optimizer, self.config)
        if self.config.update == "auto" and self._lanes.rank == 0:
            logger.info(
                "%s looks at whole parameters, so updates are replicated%s",
                type(optimizer).__name__,
                ""
                if parameterwise
                else ", and step() waits for all gradients (see DearConfig(assume_parameterwise=True))",
            )
        deferred = parameterwise and self._lanes.world_size > 1  # one rank has nothing to wait for
        return ReplicatedOptimizer(
            optimizer, self._parameters, self._names, self._lanes, deferred, lambda: self._pipe.finish()
        )

    def _zero_grad(self, set_to_none: bool) -> None:
        if self._arrangement.layout is not None:  # until then the optimizer holds the parameters themselves
            self._keeper.zero_grad(set_to_none)
            if self._replicated is not None:
                self._replicated.zero_marks(set_to_none)


class _Mark:
    """Running totals at the end of a step."""

    def __init__(self, traffic: Traffic, step_stall_s: float, forward_stall_s: float, time_s: float) -> None:
        self.traffic = traffic
        self.step_stall_s = step_stall_s
        self.forward_stall_s = forward_stall_s
        self.time_s = time_s
