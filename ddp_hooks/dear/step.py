"""One training step under DeAR: ties DDP's buckets, the user's optimizer and the model's forwards together.

1. DDP hands over a bucket; its reduce-scatters start (:meth:`StepDriver.reduce_bucket`), on CPUs those of atoms that
   are ready even before (:class:`~ddp_hooks.dear.reduction.grad_ready_tracker.GradReadyTracker`).
2. Backward ends; guards take the place of the model's gradients (:meth:`StepDriver._end_backward`).
3. The optimizer is about to step; every shard gets its reduced gradient (:meth:`StepDriver.before_step`).
4. The user's optimizer steps, as the :class:`~ddp_hooks.dear.update.base.Update` has prepared it.
5. It has stepped; gathers start (:meth:`StepDriver.after_step`).
6. Parameters wait by themselves, mostly in the next forward (:class:`~ddp_hooks.overlap.pipe.FeedPipe`).
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import LinkProfile, Recorder, Work, agree, mebibytes, see
from ddp_hooks.comm.rounding_warning import RoundingWarning
from ddp_hooks.comm.torch_compat.autograd import queue_engine_callback
from ddp_hooks.comm.torch_compat.compiler import inside_compiled_region
from ddp_hooks.comm.torch_compat.ddp import ddp_in_forward, managed_parameters
from ddp_hooks.comm.torch_compat.optimizer import evaluated_once, is_inner_step, with_closure
from ddp_hooks.comm.torch_compat.state_dict import makes_state, undo_making_state
from ddp_hooks.dear import checks
from ddp_hooks.dear.checkpoint.optimizer_checkpoint import OptimizerCheckpoint
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.model_layout import ModelLayout
from ddp_hooks.dear.layout.placement import Layout
from ddp_hooks.dear.phase import STEPS, Phase
from ddp_hooks.dear.reduction.grad_ready_tracker import GradReadyTracker
from ddp_hooks.dear.reduction.model_gradients import ModelGradients
from ddp_hooks.dear.reduction.reduction import Reduction
from ddp_hooks.dear.reduction.shard_gradients import ShardGradients
from ddp_hooks.dear.reduction.wires import ReductionWires
from ddp_hooks.dear.rounding import Rounding
from ddp_hooks.dear.sizing import open_lanes
from ddp_hooks.dear.stats import DearStats, StatsLog, StepMeter
from ddp_hooks.dear.update.base import Update
from ddp_hooks.dear.update.clipping import GradCheck
from ddp_hooks.dear.update.replicated import ReplicatedUpdate
from ddp_hooks.dear.update.sharded import ShardedUpdate
from ddp_hooks.intercept.buckets import future_of, indices_of
from ddp_hooks.intercept.causes import LatestForward, why_not_ended, why_not_reduced
from ddp_hooks.intercept.co_optimizers import CoOptimizer
from ddp_hooks.intercept.guards import refuse_unhooked_forward
from ddp_hooks.overlap import FeedPipe
from ddp_hooks.planning.atoms import FusionRule
from ddp_hooks.tuning import Groups, Tuning, begin, job_of

logger = logging.getLogger("ddp_hooks")

_LAYERS = 4  # of a group, with fusion="layers"


class StepDriver:
    """Runs a training step: its methods are hooks of DDP, the optimizer and the model."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        config: DearConfig,
        group: dist.ProcessGroup,
    ) -> None:
        self.config = config
        self.root = ddp.module
        self.optimizer = optimizer
        self.parameters = ManagedParameters(managed_parameters(ddp))
        self.recorder = Recorder(config.trace)
        self.co_optimizers: list[CoOptimizer] = []  # sharded tables that step with the optimizer
        # Weakly: DDP's reducer holds the hook's state out of the garbage collector's sight, and DDP the reducer.
        self._ddp = cast(DistributedDataParallel, weakref.proxy(ddp))
        device, on_cpu = self.parameters.device, self.parameters.device.type == "cpu"
        replicates = checks.updates_whole_parameters(optimizer, config)
        model_bytes = sum(parameter.nbytes for parameter in self.parameters.tensors)
        self.lanes, atom_bytes, fusion_bytes, link = open_lanes(
            config, group, device, self.recorder, model_bytes, replicates
        )
        at_once = ddp.static_graph or getattr(ddp, "batched_grad_copy", False)  # DDP fills a bucket in one go
        self._tracks = on_cpu and self.lanes.world_size > 1 and not at_once
        fusion_mb = config.fusion_mb if config.fusion_mb is not None else fusion_bytes / mebibytes(1)
        rule = FusionRule(config.fusion, fusion_mb, config.fusion_layers or _LAYERS)
        self.layout = ModelLayout(self.parameters, ddp.module, self.lanes.world_size, rule, atom_bytes, self._tracks)
        self.update = self._choose_update(replicates)
        self.checkpoint = OptimizerCheckpoint(optimizer, self.update, self.parameters, group, config)
        self.model_gradients = ModelGradients(self.parameters, self.update.shards)
        self.gradients = ShardGradients(self.update.shards, self.model_gradients, self.recorder)
        self.wires = ReductionWires(config, self.lanes, self.parameters.tensors)
        rounds = config.gather_dtype is not None and self.lanes.world_size > 1
        self.rounding = Rounding(config, self.parameters, self.lanes, self.layout) if rounds else None
        self._warning = RoundingWarning('wire="int4"', 'wire="int8"') if config.wire == "int4" else None
        self.tracker = GradReadyTracker(self.parameters.tensors, self._advance)
        self.pipe = FeedPipe(
            ddp.module,
            self.parameters.tensors,
            self.recorder,
            self.update.gathered,
            self.update.gathers_under_forward,
            self.rounding.rounded if self.rounding is not None else None,
        )
        self.grad_check = GradCheck(
            self.update, self.sum_over_ranks, group, self.parameters, config, self.co_optimizers
        )
        self._may_wait = self.update.waits_one_by_one and on_cpu and not self.grad_check.is_wanted
        self.tuning = self._begin_tuning(link, ddp.bucket_bytes_cap)
        self.phase = Phase.IDLE
        self.reduction: Reduction | None = None  # in BACKWARD and REDUCING
        self.log: StatsLog | None = None
        self._before_blank = Phase.IDLE
        self._in_forward = False  # one that was called through DDP's hooks
        self._latest_forward: LatestForward = "none"
        self._gathers: list[Work] = []  # inside of the step under way
        self._meter = StepMeter(self.lanes, self.gradients.stall, self.pipe.stall)

    def _choose_update(self, replicates: bool) -> Update:
        optimizer, config = self.optimizer, self.config
        if not replicates:
            return ShardedUpdate(optimizer, self.parameters, self.lanes, config.master_dtype, config.rounds_to)
        parameterwise = checks.updates_parameters(optimizer, config)
        if config.update == "auto" and self.lanes.rank == 0:
            waits = ", and step() waits for all gradients (see DearConfig(assume_parameterwise=True))"
            logger.info(
                "%s looks at whole parameters, so updates are replicated%s",
                type(optimizer).__name__,
                "" if parameterwise else waits,
            )
        return ReplicatedUpdate(optimizer, self.parameters, self.lanes, parameterwise, lambda: self.pipe.finish())

    def _begin_tuning(self, link: LinkProfile | None, bucket_bytes: int) -> Tuning | None:
        tuner, parameters = self.config.tuner, self.parameters
        if tuner is None:
            return None
        settings = f"{replace(self.config, tuner=None, trace=False)}, buckets of {bucket_bytes} bytes"
        goodput_bytes_s = link.goodput_bytes_s if link is not None else None
        job = job_of("dear", parameters.tensors, parameters.names, self.lanes, settings, goodput_bytes_s)
        return begin(tuner, self, self.lanes, self.layout.rule.mb, job, parameters.device)

    def _enter(self, phase: Phase) -> None:
        self.phase = self.phase.followed_by(phase)

    # -- 1. a bucket is ready ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Launch the reduce-scatters of a bucket; called by DDP, through the hook, during backward."""
        self.refuse_closed()
        reduction, buffer = self._begin_backward(), bucket.buffer()
        parameters = indices_of(bucket, self.parameters.index_of, "DearState")
        reduction.add_bucket(parameters, buffer, bucket.is_last())
        if reduction.num_parameters == len(self.parameters):
            # Only now, as DDP does: earlier buckets may come inside of a recomputation's own backward. DDP queues its
            # end-of-backward callback after ours; a callback queued from a callback runs after both.
            queue_engine_callback(lambda: queue_engine_callback(self._end_backward))
        future = future_of(buffer)
        future.set_result(buffer)
        return future

    def _advance(self) -> None:
        """Launch reduce-scatters of atoms that are ready before their bucket."""
        self._begin_backward().advance()

    def _begin_backward(self) -> Reduction:
        """Return the reduction of the backward under way; begin one, unless it has begun."""
        if self.phase is Phase.BACKWARD and self.reduction is not None:
            return self.reduction
        self._end_step_phase()
        if self._latest_forward == "none" or self.phase is Phase.REDUCING:
            refuse_unhooked_forward()
        self._wait_for_gathers()  # parameters that the forward did not touch may still be in flight
        reduction = Reduction(
            self.lanes, self.layout, self.tracker.ready, self.config.reduce_dtype, self.wires, self._warning
        )
        self._enter(Phase.BACKWARD)
        self.reduction = reduction
        return reduction

    # -- 2. backward has ended --------------------------------------------------------------------------------------

    def _end_backward(self) -> None:
        self.refuse_closed()
        self._enter(Phase.REDUCING)
        self._latest_forward = "none"
        self.tracker.arm(False)
        reduction = self.reduction
        assert reduction is not None
        reduction.flush()
        self.tracker.remember(reduction.gradients)
        reduction.used = self.model_gradients.guard_model()
        self.model_gradients.keep_as_base()

    # -- 3. the optimizer is about to step --------------------------------------------------------------------------

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Attach gradients, before the optimizer's step, or once its closure has made them; a step pre-hook."""
        if is_inner_step(optimizer) or self.update.is_updating:
            return None
        if makes_state(kwargs):
            self._leave_step()
            self._before_blank = self.phase
            self._enter(Phase.BLANK_STEP)
            self.pipe.finish()
            self.update.begin_blank_step()
            return None
        if inside_compiled_region():
            raise RuntimeError(
                "optimizer.step() was called from compiled code, which cannot wait for gradients: compile the model "
                f"alone, and call optimizer.step() outside{see('how-step-is-called')}"
            )
        replaced = with_closure(args, kwargs, lambda f: evaluated_once(f, self._begin_step, "DeAR supports"))
        if replaced is None:
            self._begin_step()
        return replaced

    def _begin_step(self) -> None:
        self.refuse_closed()
        self._leave_step()
        self._wait_for_gathers()  # two steps without a forward between them
        from_last_backward = self.reduction is not None  # not shown to the user in between
        self.attach_gradients(may_wait=self._may_wait)
        if self.grad_check.is_wanted and not self.grad_check.approve():
            self._enter(Phase.SKIPPED_STEP)
            self.update.begin_skipped_step()
            self.model_gradients.clear()
            return
        self._enter(Phase.STEP)
        memory = self.update.begin_step(self.gradients, from_last_backward)
        if memory is not None:
            self._gathers = self._submit_gathers(memory)
            self._wait_for_step_gathers()
            self.update.gathered(range(len(self.parameters)))

    def attach_gradients(self, may_wait: bool = False) -> None:
        """Give every shard its reduced gradient, as plain DDP would have left it."""
        self._refuse_unreduced()
        reduction = self.reduction
        if reduction is None:
            self.gradients.wait()  # an exception may have ended an earlier wait
            self.model_gradients.release()
            return
        self.parameters.refuse_replaced_storage()
        layout = reduction.layout()
        if self.layout.current != layout:
            self._adopt(layout, reduction)
        self.gradients.attach(reduction)
        self.reduction = None  # before any wait, which may raise: gradients are attached once
        if self.phase is Phase.BLANK_STEP:
            self._before_blank = Phase.IDLE
        else:
            self._enter(Phase.IDLE)
        self.update.take_gradients(self.gradients, reduction.gradients, may_wait)

    def refuse_closed(self) -> None:
        if self.phase is Phase.CLOSED:
            raise RuntimeError(
                "DearState was closed: wrap the model in a new DistributedDataParallel to train on"
                f"{see('the-state-was-closed')}"
            )

    def _refuse_unreduced(self) -> None:
        parameters, names = self.parameters.tensors, self.parameters.names
        if self.phase is Phase.BACKWARD and self.reduction is not None:
            seen = {parameter for bucket in self.reduction.buckets for parameter in bucket}
            missing = [name for index, name in enumerate(names) if index not in seen]
            cause = why_not_ended(self._ddp, parameters, names, missing)
            raise RuntimeError(f"gradients were not reduced over the ranks: {cause}{see('a-backward-did-not-end')}")
        name = self.model_gradients.unreduced()
        if name is not None:
            cause = why_not_reduced(
                self._ddp,
                parameters,
                names,
                [name for name, parameter in zip(names, parameters, strict=True) if parameter.grad is None],
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
        """Put ``layout`` in force: move parameters, optimizer state and kept gradients to where it says."""
        reduction.wait()
        names = {f"bucket {i}": [self.parameters.names[p] for p in bucket] for i, bucket in enumerate(layout.buckets)}
        agree({**names, "atoms": layout.atoms}, None, self.lanes.group, "the layout of buckets", self.config)
        marks = self.model_gradients.marks()
        for shard in self.update.shards:  # gradients of earlier backwards travel with the state
            shard.tensor.grad = self.model_gradients.apply_zero_grad(shard.range.parameter, shard.base, marks)
        self.pipe.make_whole()
        states = self.update.take_states(layout)
        self.parameters.move(self.layout.current, layout)
        self.update.install(layout, states)
        self._plan_groups(layout)
        self.model_gradients.keep_as_base()

    def _plan_groups(self, layout: Layout) -> None:
        needed = self.lanes.broadcast_object(self.pipe.order_of_need(), "the layout of buckets, in backward")
        self.pipe.plan(self.layout.plan(layout, needed))
        if self.rounding is not None:
            self.rounding.choose()
        if self._tracks:
            self.tracker.track(layout)

    def regroup(self, rule: FusionRule) -> None:
        """Use another fusion rule from the next backward on; all ranks do it between steps."""
        self.layout.rule = rule
        if self.layout.current is not None:
            self._wait_for_gathers()
            self._plan_groups(self.layout.current)

    # -- what a tuner searches (Tunable) ----------------------------------------------------------------------------

    def groups_of(self, mb: float) -> Groups:
        """Return the groups for a size: their number is that of reduce-scatters, and gathers tell sizes apart, too."""
        reduced, gathered = self.layout.groups_with(replace(self.layout.rule, mb=mb))
        return Groups(len(reduced), (tuple(reduced), tuple(gathered)))

    def apply(self, mb: float) -> None:
        self.regroup(replace(self.layout.rule, mb=mb))

    # -- 5. the optimizer has stepped -------------------------------------------------------------------------------

    def after_step(self, *_: Any) -> None:
        """Launch gathers, and complete the step's statistics; a step post-hook."""
        if is_inner_step(self.optimizer) or self.update.is_updating:
            return
        phase = self.phase
        self._leave_step()
        if phase in (Phase.BLANK_STEP, Phase.SKIPPED_STEP) or self.layout.current is None:
            return
        memory = self.update.end_step(self.gradients)
        self.checkpoint.invalidate()
        torch.autograd.graph.increment_version(self.parameters.tensors)
        if memory is not None:
            rounded = self.rounding.begin_gathers() if self.rounding is not None else frozenset[int]()
            self.pipe.launched(self._submit_gathers(memory), rounded)
        for co_optimizer in self.co_optimizers:
            co_optimizer.yield_link_to(self.pipe.under_way)
        if not self.config.overlap_forward or self.config.check_replicas:
            self.pipe.finish(on_host=True)
        self._end_of_step()

    def step_failed(self) -> None:
        """Undo preparations of a step that an exception ends."""
        phase = self.phase
        self._leave_step()
        if phase is Phase.BLANK_STEP:
            undo_making_state(self.optimizer)
        else:
            self.update.take_back_memory()

    def _leave_step(self) -> None:
        """End the step under way, if there is one: also one of which no hook has heard the end."""
        self.update.leave()
        self._end_step_phase()

    def _end_step_phase(self) -> None:
        if self.phase in STEPS:
            self._enter(self._before_blank if self.phase is Phase.BLANK_STEP else Phase.IDLE)

    def _submit_gathers(self, memory: Sequence[Tensor]) -> list[Work]:
        work_of = self.gradients.works_by_atom()
        after = [{work_of[atom] for atom in group if atom in work_of} for group in self.layout.gather_groups]
        partitions = self.layout.gathers(memory, self.update.wires)
        gathers = zip(partitions, self.layout.gather_labels, after, strict=True)
        return [self.lanes.all_gather(*gather) for gather in gathers]

    def _wait_for_step_gathers(self) -> None:
        """Wait for gathers inside of a step; the list keeps them if an exception ends this."""
        while self._gathers:
            work = self._gathers[0]
            if not work.done:
                with self.gradients.stall.measure(self.recorder, work.label):
                    work.wait()
            self._gathers.pop(0)

    def _wait_for_gathers(self) -> None:
        """Wait for all gathers, and for the reduce-scatters that they follow."""
        self.pipe.finish()
        self._wait_for_step_gathers()
        self.gradients.wait()

    def stats(self) -> DearStats:
        norm = self.grad_check.grad_norm
        return replace(
            self._meter.latest,
            grad_norm=norm.item() if norm is not None else None,
            skipped_steps=self.grad_check.skipped_steps,
        )

    def _end_of_step(self) -> None:
        self.recorder.end_step()
        rule = self.layout.rule
        self._meter.end_step(len(self.layout.scatter_groups), rule.mb if rule.fusion == "size" else None)
        step = self._meter.latest.step
        if self.log is not None:
            self.log.write(step, self.stats)
        if self.config.check_replicas:
            parameters, group = self.parameters, self.lanes.group
            checks.refuse_different_replicas(parameters.tensors, parameters.names, step, group, self.config)
        if self.tuning is not None:
            self.tuning.stepped()

    def sum_over_ranks(self, value: Tensor, what: str = "sum_over_ranks()", largest: bool = False) -> Tensor:
        """Return the sum, or the largest values, of a small tensor over the ranks; collective."""
        with self.gradients.stall.measure(self.recorder, "a scalar over the ranks"):
            return self.lanes.reduce_small(value.to(self.parameters.device), what, largest=largest)

    # -- 6. a forward through DDP -----------------------------------------------------------------------------------

    def before_forward(self, *_: Any) -> None:
        """Save gradients that the coming backward would overwrite; a forward pre-hook of DDP."""
        self._in_forward = True
        if not torch.is_grad_enabled():
            self.pipe.begin_forward(training=False)
            return
        self._latest_forward = "synchronised" if self._ddp.require_backward_grad_sync else "no_sync"
        self._leave_step()
        if self.reduction is not None:
            self.attach_gradients()
        if not self.pipe.in_flight:
            self.update.before_forward()
            self.gradients.wait()  # of a step that did not end
        self.model_gradients.save_and_clear(self.gradients.wait)
        self.pipe.begin_forward(self._ddp.training and self.config.overlap_forward)

    def before_model(self, *_: Any) -> None:
        """Guard gradients that were kept; a forward pre-hook of the module inside DDP."""
        if torch.is_grad_enabled() and not self._in_forward:
            ddp = ddp_in_forward()
            if ddp is not None and ddp.module is self.root:
                refuse_unhooked_forward()
        try:
            synchronised = self._ddp.require_backward_grad_sync
        except ReferenceError:  # DDP is gone, and with it all backwards that it would reduce
            return
        self.model_gradients.guard_kept(synchronised)

    def after_forward(self, module: Any, args: Any, output: Any) -> None:
        """End the forward; a forward hook of DDP that is always called."""
        self._in_forward = False
        self.pipe.end_forward()
        if self.update.gathers_gradients:
            self._wait_for_gathers()  # into the memory that the coming backward will write
        if torch.is_grad_enabled():
            self.tracker.arm(output is not None and self._ddp.require_backward_grad_sync)
        error = sys.exc_info()[1] if output is None else None
        self.lanes.annotate(error, "forward")  # DDP's own broadcast of buffers names nobody

    # -- between the hooks ------------------------------------------------------------------------------------------

    def begin_reading(self) -> None:
        """Attach reduced gradients to shards, for the user to read or change; collective if the layout is new."""
        self.refuse_closed()
        self.update.refuse_reading()
        if self.update.gathers_gradients:
            self._wait_for_gathers()  # an update of the last step may still need the gradients as they are
        self.attach_gradients()
        self.model_gradients.release()
        self.model_gradients.clear_zeroed_flags()

    def zero_grad(self, set_to_none: bool) -> None:
        """Zero or remove gradients; called before ``optimizer.zero_grad()``."""
        if self.layout.current is not None:  # until then the optimizer holds the parameters themselves
            self.model_gradients.zero_grad(set_to_none)
            self.update.zero_grad(set_to_none)

    def close(self, makes_whole: bool) -> None:
        """Finish communication, and remove everything from the model but its values; the lanes stay open.

        ``makes_whole``: all ranks are here, and parameters get their owners' values.
        """
        phase, self.phase = self.phase, Phase.CLOSED
        if self.tuning is not None:
            self.tuning.close()
        try:
            if self.reduction is not None and phase is not Phase.BACKWARD:
                self.reduction.wait()
            self._wait_for_gathers()
            if makes_whole:
                self.pipe.make_whole()
        finally:
            self.reduction = None
            self.update.leave()
            self.pipe.close()
            self.tracker.close()
            self.model_gradients.close()
