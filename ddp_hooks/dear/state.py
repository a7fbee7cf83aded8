"""DearState: ties DDP's buckets, the user's optimizer and the model's forwards together.

One step, in the order of DESIGN.md's "public hooks and nothing else":

1. DDP hands over a bucket; its reduce-scatters start (:meth:`DearState.reduce_bucket`), on CPUs those of parts that
   are there even before (:class:`~ddp_hooks.dear.watch.GradientWatch`).
2. Backward ends; guards take the place of gradients that mean nothing now (:meth:`DearState._end_backward`).
3. The optimizer is about to step; every shard gets its reduced gradient (:meth:`DearState._before_step`).
4. The user's optimizer steps on this rank's shards.
5. It has stepped; the gathers of the updated parameters start (:meth:`DearState._after_step`).
6. The next forward waits for each module's parameters (:class:`~ddp_hooks.dear.feedpipe.FeedPipe`).

With replicated updates the gathers of step 5 are those of gradients, and the optimizer's code runs in step 6
(:class:`~ddp_hooks.dear.replicated.ReplicatedOptimizer`).
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import (
    Lanes,
    LaneSettings,
    Recorder,
    Span,
    Traffic,
    agree,
    compat,
    profile_link,
)
from ddp_hooks.dear import checks, clipping, registry, seams
from ddp_hooks.dear.arrangement import Arrangement
from ddp_hooks.dear.arrival import GradientArrival
from ddp_hooks.dear.averaging import synchronize_before_averaging
from ddp_hooks.dear.backpipe import Reduction
from ddp_hooks.dear.checkpoint import OptimizerCheckpoint
from ddp_hooks.dear.config import DearConfig, Fusion, mebibytes
from ddp_hooks.dear.feedpipe import FeedPipe
from ddp_hooks.dear.gradients import GradientKeeper
from ddp_hooks.dear.inert import InertOnCopy
from ddp_hooks.dear.inspection import Inspector
from ddp_hooks.dear.layout import FusionRule, Layout
from ddp_hooks.dear.order import OrderedSums
from ddp_hooks.dear.replicas import refuse_parted_replicas
from ddp_hooks.dear.replicated import ReplicatedOptimizer
from ddp_hooks.dear.sharded import ShardedOptimizer
from ddp_hooks.dear.stats import DearStats, ScalarWriter, StatsLog
from ddp_hooks.dear.watch import GradientWatch

logger = logging.getLogger("ddp_hooks")


class DearState:
    """The state of :func:`~ddp_hooks.dear_hook`: DeAR (zhang2023dear, sections III and IV).

    All-reduce is split: gradients are reduce-scattered under backward, the optimizer steps on this rank's shard of
    every parameter, and parameters are all-gathered under the next forward. The paper gathers gradients instead and
    updates everything everywhere; the volume is the same, the optimizer's state and work are 1/P here. For optimizers
    that need whole tensors ``DearConfig(update="replicated")`` does as the paper has it.

    The training loop stays as it was. Between backward and step the model's ``.grad`` may not be read (it raises).
    After ``optimizer.step()`` parameters may be in flight: forwards, ``state_dict``, ``load_state_dict`` and
    ``AveragedModel.update_parameters`` wait by themselves; other readers call :meth:`synchronize` first.

    Args:
        ddp: wrapped with ``gradient_as_bucket_view=True``. Forward pre-hooks are installed on its modules.
        optimizer: holding every parameter that DDP reduces; for sharded updates element-wise. From its first step on,
            its groups then hold shards of the parameters in their place.
        config: the settings.

    Raises:
        ValueError: on every rank, before anything is changed, when this cannot be right, or when ranks differ.

    Creating a state is collective: all ranks of the DDP module's group do it.
    """

    def __init__(
        self, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, config: DearConfig | None = None
    ) -> None:
        config = config if config is not None else DearConfig()
        problem = checks.find_problem(ddp, optimizer, config)
        group = getattr(ddp, "process_group", None) or dist.group.WORLD
        assert group is not None, "torch.distributed is not initialised"
        entries = checks.fingerprint(ddp, optimizer, config) if problem is None else {}
        agree(entries, problem, group, "the set-up of DearState")

        self.config = config
        # Weakly: DDP's reducer holds the hook's state out of the garbage collector's sight, and DDP the reducer.
        self._ddp = cast(DistributedDataParallel, weakref.proxy(ddp))
        self._root = ddp.module
        self._optimizer = optimizer
        managed = checks.managed_parameters(ddp)
        self._names = list(managed)
        self._parameters = list(managed.values())
        self.device = self._parameters[0].device
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._recorder = Recorder(config.trace)
        self._lanes, atom_bytes = _open_lanes(config, group, self.device, self._recorder)
        fusion_mb = config.fusion_mb if config.fusion_mb is not None else atom_bytes / mebibytes(1)
        rule = FusionRule(config.fusion, fusion_mb, config.fusion_layers)
        self._watches = self.device.type == "cpu" and compat.places_gradients_one_by_one(ddp)
        self._arrangement = Arrangement(
            self._parameters, self._names, ddp.module, self._lanes.world_size, rule, atom_bytes, self._watches
        )
        self._replicated = self._replicate(optimizer)
        self._sharded = self._replicated or ShardedOptimizer(
            optimizer, self._parameters, self._names, self._lanes, config.master_dtype
        )
        self._checkpoint = OptimizerCheckpoint(
            optimizer, self._sharded, self._arrangement, self._parameters, self._names, group
        )
        self._keeper = GradientKeeper(self._parameters, self._names, self._sharded)
        arrived = self._replicated.arrived if self._replicated is not None else None
        self._pipe = FeedPipe(
            ddp.module, self._parameters, self._names, self._recorder, ddp.bucket_bytes_cap, arrived
        )
        self._watch = GradientWatch(self._parameters, self._advance)
        self._arrival = GradientArrival(self._sharded, self._keeper, self._recorder)

        self._reduction: Reduction | None = None  # from the first bucket of a backward until it is attached
        self._in_backward = False
        self._inspector = Inspector(self, group, self._sharded, self._names, config, self.device)
        self._inspects = config.max_grad_norm is not None or config.on_nonfinite is not None
        # Optimizers that look at one gradient after the other, and are seen to.
        known = type(optimizer) in checks.ELEMENTWISE and self._replicated is None
        self._begins_early = known and self.device.type == "cpu" and not self._inspects
        self._withheld = False  # whether the step under way has no gradients, because some were not finite
        self._stats = DearStats()
        self._log: StatsLog | None = None
        self._mark = _Mark(Traffic(), 0.0, 0.0, time.perf_counter())
        self._closed = False
        self._handles = self._install_hooks(ddp)
        checks.claim(self._root)
        registry.register(optimizer, self)

    # -- what users call --------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every parameter holds its new value. Communicates nothing itself: one rank alone may call it."""
        self._pipe.finish()

    def stats(self) -> DearStats:
        """What the last complete step cost on this rank."""
        norm = self._inspector.grad_norm
        return replace(
            self._stats,
            grad_norm=norm.item() if norm is not None else None,
            skipped_steps=self._inspector.skipped_steps,
        )

    def log_to(self, writer: ScalarWriter, every: int = 10, prefix: str = "ddp_hooks") -> None:
        """Write the statistics of every ``every``-th step as scalars.

        Args:
            writer: a ``torch.utils.tensorboard.SummaryWriter``, or anything with its ``add_scalar``.
            every: steps between two entries, >= 1.
            prefix: of the scalars' names.
        """
        self._log = StatsLog(writer, every, prefix)

    def timeline(self) -> list[Span]:
        """What lanes did and what training waited for, in order of start; needs ``DearConfig(trace=True)``."""
        return self._recorder.snapshot()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of the model's gradients, like ``torch.nn.utils.clip_grad_norm_`` on plain DDP.

        Between backward and ``optimizer.step()``; collective, one all-reduce of a scalar. For a norm over several
        models see :func:`ddp_hooks.clip_grad_norm_`, which also says what the arguments are.

        Returns:
            The norm before clipping, a scalar: equal on every rank.
        """
        return clipping.clip_grad_norm_([self], max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient to ``[-clip_value, clip_value]``, like ``torch.nn.utils.clip_grad_value_``.

        Between backward and ``optimizer.step()``; all ranks do it.
        """
        with self.reduced_gradients() as shards, torch.no_grad():
            for gradient in clipping.gradients_of(shards):
                gradient.clamp_(-clip_value, clip_value)

    @contextmanager
    def reduced_gradients(self) -> Iterator[list[torch.nn.Parameter]]:
        """This rank's shards with their reduced gradients, to read or to change; all ranks enter it together.

        Between backward and ``optimizer.step()``. A shard is a flat piece of one parameter, in storage order; its
        ``.grad`` is the mean over ranks, None where nobody used the parameter. What is computed from it differs
        between ranks: reduce it before acting on it.
        """
        self._refuse_closed()
        if self._replicated is not None:
            self._pipe.finish()  # an update of the last step may still need the gradients as they are
        self._attach_gradients(stepping=False)
        self._keeper.release()
        self._keeper.forget_zeroing()
        try:
            yield [shard.tensor for shard in self._sharded.shards]
        finally:
            self._keeper.withdraw()

    @property
    def other_parameters(self) -> list[Tensor]:
        """What the optimizer holds beside the parameters that DDP reduces."""
        ours = {id(shard.tensor) for shard in self._sharded.shards}.union(self._index_of)
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return [parameter for parameter in held if id(parameter) not in ours]

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """The optimizer's complete ``state_dict``, as plain DDP's optimizer would have it, on every rank; collective.

        Tensors are on the CPU. Load it with ``optimizer.load_state_dict()``, here with any number of ranks, or on
        plain DDP. To have it on one rank only, see :meth:`consolidate`.
        """
        self._refuse_closed()
        self.synchronize()
        full = self._checkpoint.gather(range(self._lanes.world_size))
        assert full is not None
        return full

    def load_full_optimizer_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the optimizer from a complete ``state_dict``, saved here or by plain DDP; all ranks do it.

        The same as ``optimizer.load_state_dict(state_dict)``, which cuts out this rank's shards.

        Raises:
            ValueError: the state is of another model.
        """
        self._optimizer.load_state_dict(state_dict)

    def consolidate(self, to: int = 0) -> None:
        """Gather the optimizer's state on rank ``to`` (of DDP's group), for code that saves there alone; collective.

        Until the next step ``optimizer.state_dict()`` returns the complete state there; on other ranks, and after
        the next step, it raises.
        """
        if not 0 <= to < self._lanes.world_size:
            raise ValueError(f"consolidate(to=...) takes a rank from 0 to {self._lanes.world_size - 1}, got {to}")
        self._refuse_closed()
        self.synchronize()
        self._checkpoint.consolidate(to)

    def sharded_optimizer_state_dict(self) -> dict[str, Any]:
        """This rank's part of the optimizer's state, flat and made of plain tensors.

        For ``torch.distributed.checkpoint.save`` and ``async_save``, where every rank writes its own part; see
        :meth:`load_sharded_optimizer`. Tensors are those that the optimizer uses, not copies.
        """
        self._refuse_closed()
        self.synchronize()
        return self._checkpoint.pieces()

    def load_sharded_optimizer(self, path: str | os.PathLike[str], prefix: str = "optimizer") -> None:
        """Restore the optimizer from a ``torch.distributed.checkpoint``; collective, with any number of ranks.

        Every rank reads only what overlaps its own part; before the first step state stays spread evenly until
        there are shards.

        Args:
            path: the checkpoint's folder.
            prefix: the key under which :meth:`sharded_optimizer_state_dict` was saved.

        Raises:
            ValueError: there is no such state.
        """
        self._refuse_closed()
        self.synchronize()
        self._checkpoint.load_pieces(path, prefix)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of a small tensor over the ranks, on :attr:`device`; collective."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def largest_over_ranks(self, value: Tensor) -> Tensor:
        """The largest values of a small tensor over the ranks, on :attr:`device`; collective."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def _reduced(self, value: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        value = value.to(self.device, copy=True)
        with self._arrival.stall.measure(self._recorder, "a scalar over the ranks"):
            dist.all_reduce(value, op, group=self._lanes.group)
        return value

    def set_fusion(self, fusion: Fusion, *, mb: float | None = None, layers: int | None = None) -> None:
        """Change which atoms travel together, from the next backward on; moves no data.

        Collective: all ranks call it at the same step, between ``optimizer.step()`` and the next backward.

        Args:
            fusion: see :class:`DearConfig`.
            mb: largest group in MiB; None keeps the present value.
            layers: layers per group; None keeps the present value.

        Raises:
            ValueError: on every rank, if the settings are wrong or differ between ranks.
            RuntimeError: a backward has not been followed by a step yet.
        """
        if self._reduction is not None:
            raise RuntimeError("set_fusion between backward and optimizer.step(): call it after the step instead")
        present = self._arrangement.rule
        rule = FusionRule(
            fusion, present.mb if mb is None else mb, present.layers if layers is None else layers
        )
        problem = None
        try:
            DearConfig(fusion=rule.fusion, fusion_mb=rule.mb, fusion_layers=rule.layers)
        except ValueError as error:
            problem = str(error)
        agree({"fusion": rule}, problem, self._lanes.group, "the fusion rule")
        self._arrangement.rule = rule
        if self._arrangement.layout is not None:
            self.synchronize()
            self._plan_groups(self._arrangement.layout)

    def close(self) -> None:
        """Finish communication, let every rank do the same, remove all hooks and end the lanes.

        The parameters are complete afterwards. DDP cannot remove a communication hook and an optimizer keeps its
        shards, so both are spent: to train on, wrap ``ddp.module`` again and make a new optimizer. (With replicated
        updates the optimizer stays as it is.)
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._reduction is not None and not self._in_backward:
                self._reduction.wait()
            self._arrival.settle()
            self._pipe.finish()
        finally:
            self._reduction = None
            self._pipe.close()
            self._watch.close()
            for handle in self._handles:
                handle.remove()
            if not self._sharded.is_whole:
                self._optimizer.register_step_pre_hook(seams.refuse_step)
                self._optimizer.register_state_dict_pre_hook(seams.refuse_state_dict)
                self._optimizer.register_load_state_dict_pre_hook(seams.refuse_state_dict)
            self._keeper.close()
            self._lanes.close()
            checks.release(self._root)
            registry.forget(self._optimizer)

    def _abandon(self, error: BaseException) -> None:
        self._lanes.abandon(error)

    def _is_stuck(self) -> bool:
        return self._lanes.stuck

    # -- 1. a bucket is ready ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Launch the reduce-scatters of a bucket; called by DDP, through the hook, during backward."""
        self._refuse_closed()
        if not self._in_backward:
            self._begin_backward()
        assert self._reduction is not None
        buffer = bucket.buffer()
        parameters = tuple(self._index_of[id(p)] for p in bucket.parameters())
        self._reduction.add_bucket(parameters, buffer, bucket.is_last())
        if self._reduction.num_parameters == len(self._parameters):
            # Only now, as DDP does: earlier buckets may come inside of a recomputation's own backward. DDP queues its
            # end-of-backward callback after ours; a callback queued from a callback runs after both.
            compat.queue_engine_callback(lambda: compat.queue_engine_callback(self._end_backward))
        devices: list[int | str | torch.device] = [buffer.device] if buffer.device.type != "cpu" else []
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        future.set_result(buffer)
        return future

    def _begin_backward(self) -> None:
        self._pipe.finish()  # parameters that the forward did not touch may still be in flight
        arranged = self._arrangement
        earlier = arranged.earlier_layout() if not self._lanes.native else None
        self._reduction = Reduction(
            self._lanes,
            arranged.schedule,
            arranged.cut,
            arranged.fuse_in_order,
            arranged.label,
            self._watch.ready,
            self.config.reduce_dtype,
            OrderedSums(earlier, self._lanes) if earlier is not None else None,
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
        self._watch.arm(False)
        reduction = self._reduction
        assert reduction is not None
        reduction.flush()
        self._watch.remember(reduction.gradients)
        reduction.used = self._keeper.guard_model()
        self._keeper.guard_shards(reduction.used)

    # -- 3. the optimizer is about to step --------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if compat.is_inner_step(optimizer) or (self._replicated is not None and self._replicated.updating):
            return None
        closure = kwargs.get("closure") if "closure" in kwargs else (args[1] if len(args) > 1 else None)
        if closure is None:
            self._prepare_step()
            return None
        wrapped = self._attaching(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def _attaching(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        evaluations = 0

        def evaluate_and_attach() -> Any:
            nonlocal evaluations
            evaluations += 1
            if evaluations > 1:
                raise RuntimeError(
                    "the optimizer evaluated its closure more than once in one step; DeAR supports one evaluation: "
                    "use an optimizer that needs one, such as SGD or AdamW"
                )
            loss = closure()
            self._prepare_step()
            return loss

        return evaluate_and_attach

    def _prepare_step(self) -> None:
        """Every shard gets its gradient, clipped or withheld as the settings ask."""
        if self._replicated is not None:
            self._replicated.close_step()  # one that did not end
            self._pipe.finish()  # two steps without a forward between them
        self._attach_gradients(stepping=True)
        if isinstance(self._sharded, ShardedOptimizer):
            self._sharded.read_masters()
        if self._inspects:
            self._withheld = not self._inspector.approve()
        if self._withheld:
            self._keeper.clear()
        elif self._replicated is not None and self._arrangement.layout is not None:
            self._replicated.open_step()
            if not self._replicated.deferred:
                self._launch_gathers(self._replicated.memory)
                self._pipe.finish()

    def _attach_gradients(self, stepping: bool) -> None:
        """Give every shard its reduced gradient, as plain DDP would have left it.

        A known optimizer that is about to step gets gradients that it waits for one by one, so that it begins while
        the last ones travel.
        """
        self._refuse_unfinished_backward()
        self._keeper.refuse_unreduced()
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
        if not (self._begins_early and stepping):
            self._arrival.settle()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("DearState was closed: wrap the model in a new DistributedDataParallel to train on")

    def _refuse_unfinished_backward(self) -> None:
        if self._in_backward and self._reduction is not None:
            seen = {parameter for bucket in self._reduction.buckets for parameter in bucket}
            raise RuntimeError(
                f"the last backward ended without gradients for {checks.missing_names(self._names, seen)} or "
                f"parameters of the same bucket, so they were not reduced: pass find_unused_parameters=True to "
                f"DistributedDataParallel; if it ended with an exception, wrap the model again"
            )

    # -- layouts ----------------------------------------------------------------------------------------------------

    def _adopt(self, layout: Layout, reduction: Reduction) -> None:
        """Make ``layout`` the one in force: move parameters, optimizer state and kept gradients to where it says."""
        reduction.wait()
        old = self._arrangement.layout
        for shard in self._sharded.shards:  # what was kept from earlier backwards travels with the state
            shard.tensor.grad = self._keeper.unless_discarded(shard, shard.base)
        states = self._sharded.take_states(old, layout)
        self._arrangement.move_parameters(layout)
        self._sharded.install(layout, self._arrangement.flats, states)
        self._plan_groups(layout)
        self._keeper.guard_shards(reduction.used)

    def _plan_groups(self, layout: Layout) -> None:
        self._pipe.plan(self._arrangement.plan(layout, self._common_order_of_need))
        if self._watches:
            self._watch.watch(layout)

    def _common_order_of_need(self) -> list[int]:
        order: list[list[int]] = [self._pipe.order_of_need()]
        dist.broadcast_object_list(order, group=self._lanes.group, group_src=0)
        return order[0]

    # -- 5. the optimizer has stepped -------------------------------------------------------------------------------

    def _after_step(self, *_: Any) -> None:
        if compat.is_inner_step(self._optimizer) or (self._replicated is not None and self._replicated.updating):
            return
        if self._arrangement.layout is None:
            return
        if self._withheld:
            self._withheld = False
            return
        self._arrival.settle()
        self._checkpoint.outdate()
        self._pipe.finish()  # two steps without a forward between them
        compat.increment_versions(self._parameters)
        if isinstance(self._sharded, ShardedOptimizer):
            self._sharded.write_masters()
            self._launch_gathers(self._arrangement.flats)
        else:
            self._sharded.close_step()
            if self._sharded.deferred:
                self._launch_gathers(self._sharded.memory)
        if not self.config.overlap_forward or self.config.check_replicas:
            self._pipe.finish()
        self._stats = self._next_stats()
        if self._log is not None:
            self._log.write(self._stats.step, self.stats)
        if self.config.check_replicas:
            refuse_parted_replicas(self._parameters, self._names, self._stats.step, self._lanes.group)

    def _launch_gathers(self, memory: Sequence[Tensor]) -> None:
        arranged = self._arrangement
        self._pipe.launch(self._lanes, arranged.gathers(memory), arranged.gather_labels)

    def _next_stats(self) -> DearStats:
        before = self._mark
        self._mark = _Mark(
            self._lanes.traffic, self._arrival.stall.seconds, self._pipe.stall.seconds, time.perf_counter()
        )
        traffic = self._mark.traffic - before.traffic
        return DearStats(
            step=self._stats.step + 1,
            num_groups=len(self._arrangement.schedule.groups) if self._arrangement.schedule is not None else 0,
            num_lanes=len(self._lanes),
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=traffic.busy_s,
            step_stall_s=self._mark.step_stall_s - before.step_stall_s,
            forward_stall_s=self._mark.forward_stall_s - before.forward_stall_s,
            wall_s=self._mark.time_s - before.time_s,
        )

    # -- 6. a forward through DDP -----------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if self._replicated is not None:
            self._replicated.close_step()  # one that did not end
        if self._reduction is not None:
            self._attach_gradients(stepping=False)
        if self._replicated is not None and not self._pipe.in_flight:
            self._replicated.leave_buckets()
        self._arrival.settle()  # of a step that did not end
        self._keeper.release()
        self._keeper.make_room()
        if self._ddp.training:
            self._pipe.begin_trace()

    def _before_model(self, *_: Any) -> None:
        self._keeper.guard_kept(self._ddp.require_backward_grad_sync)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        self._pipe.end_trace(succeeded=output is not None)
        if self._replicated is not None:
            self._pipe.finish()  # into the memory that the coming backward will write
        if torch.is_grad_enabled():
            self._watch.arm(output is not None and self._ddp.require_backward_grad_sync)
        error = sys.exc_info()[1] if output is None else None
        explanation = self._lanes.explain(error) if error is not None else None
        if error is not None and explanation is not None:  # DDP's own broadcast of buffers names nobody
            logger.error("forward lost a connection: %s", explanation)
            if sys.version_info >= (3, 11):
                error.add_note(explanation)

    # -- set-up and seams --------------------------------------------------------------------------------------------

    def _replicate(self, optimizer: torch.optim.Optimizer) -> ReplicatedOptimizer | None:
        """The replicated optimizer, if the settings or the optimizer ask for one."""
        config = self.config
        if config.update == "sharded" or (config.update == "auto" and checks.updates_elements(optimizer, config)):
            return None
        deferred = checks.updates_parameters(optimizer, config)
        if config.update == "auto" and self._lanes.rank == 0:
            logger.info(
                "%s looks at whole parameters, so updates are replicated%s",
                type(optimizer).__name__,
                "" if deferred else ", and step() waits for all gradients (see DearConfig(assume_parameterwise=True))",
            )
        return ReplicatedOptimizer(optimizer, self._parameters, self._names, self._lanes, deferred)

    def _install_hooks(self, ddp: DistributedDataParallel) -> list[Any]:
        optimizer = self._optimizer

        def finish(*_: Any) -> None:
            self._pipe.finish()

        wait = InertOnCopy(finish)
        handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(finish),
            optimizer.register_state_dict_pre_hook(self._checkpoint.before_state_dict),
            optimizer.register_state_dict_post_hook(self._checkpoint.after_state_dict),
            optimizer.register_load_state_dict_pre_hook(finish),
            optimizer.register_load_state_dict_pre_hook(self._checkpoint.before_load),
            optimizer.register_load_state_dict_post_hook(self._checkpoint.after_load),
            ddp.register_forward_pre_hook(InertOnCopy(self._before_forward)),
            ddp.module.register_forward_pre_hook(InertOnCopy(self._before_model)),
            ddp.register_forward_hook(InertOnCopy(self._after_forward), always_call=True),
        ]
        for module in ddp.modules():
            handles.append(module.register_state_dict_pre_hook(wait))
            handles.append(module.register_load_state_dict_pre_hook(wait))
            synchronize_before_averaging(module, self.synchronize)
        ddp.join = ddp.join_hook = seams.refuse_join  # type: ignore[method-assign]
        handles.append(seams.extend_zero_grad(optimizer, self._zero_grad))
        handles.append(seams.at_exit(self.close, self._abandon, self._is_stuck))
        return handles

    def _zero_grad(self, set_to_none: bool) -> None:
        if self._arrangement.layout is not None:  # until then the optimizer holds the parameters themselves
            self._keeper.zero_grad(set_to_none)
            if self._replicated is not None:
                self._replicated.zero_marks(set_to_none)

    def __deepcopy__(self, memo: Any) -> DearState:
        raise TypeError(
            "a DDP module with DearState cannot be copied: the copy would lose its hook and share the optimizer. "
            "Copy ddp.module instead"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a DDP module with DearState cannot be pickled: save ddp.module.state_dict() instead")


class _Mark:
    """Running totals at the end of a step."""

    def __init__(self, traffic: Traffic, step_stall_s: float, forward_stall_s: float, time_s: float) -> None:
        self.traffic = traffic
        self.step_stall_s = step_stall_s
        self.forward_stall_s = forward_stall_s
        self.time_s = time_s


def _open_lanes(
    config: DearConfig, group: dist.ProcessGroup, device: torch.device, recorder: Recorder
) -> tuple[Lanes, int]:
    """The lanes, and the size of an atom in bytes: as configured, or as the link suggests."""
    settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
    lanes = Lanes(group, config.lanes or 1, device, settings, recorder)
    if config.slice_mb is not None:
        settings.slice_bytes = mebibytes(config.slice_mb)
    if config.lanes is None or config.slice_mb is None:
        link = profile_link(lanes)
        if config.lanes is None:
            lanes.grow(link.num_lanes)
        if config.slice_mb is None:
            settings.slice_bytes = link.message_bytes
        logger.info("%s: %d lanes, messages of up to %d bytes", link, len(lanes), settings.slice_bytes)
    atom_bytes = mebibytes(config.atom_mb) if config.atom_mb is not None else 4 * settings.slice_bytes
    return lanes, atom_bytes
