"""DearState: ties DDP's buckets, the user's optimizer and the model's forwards together.

One step, in the order of DESIGN.md's "public hooks and nothing else":

1. DDP hands over a bucket; its reduce-scatters start (:meth:`DearState.reduce_bucket`), those of the last bucket
   before it is complete (:class:`~ddp_hooks.dear.tail.TailWatch`).
2. Backward ends; guards take the place of gradients that mean nothing now (:meth:`DearState._end_backward`).
3. The optimizer is about to step; every shard gets its reduced gradient (:meth:`DearState._before_step`).
4. The user's optimizer steps on this rank's shards.
5. It has stepped; the gathers of the updated parameters start (:meth:`DearState._after_step`).
6. The next forward waits for each module's parameters (:class:`~ddp_hooks.dear.feedpipe.FeedPipe`).
"""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import (
    Lanes,
    LaneSettings,
    Partition,
    Recorder,
    Span,
    Stall,
    Traffic,
    Work,
    agree,
    compat,
    profile_link,
)
from ddp_hooks.dear import checks, seams
from ddp_hooks.dear.averaging import synchronize_before_averaging
from ddp_hooks.dear.backpipe import Reduction, Schedule
from ddp_hooks.dear.config import DearConfig, Fusion, mebibytes
from ddp_hooks.dear.feedpipe import FeedPipe
from ddp_hooks.dear.gradients import GradientKeeper
from ddp_hooks.dear.inert import InertOnCopy
from ddp_hooks.dear.layout import Atom, FusionRule, Layout, ParameterShape, cut_bucket, fuse
from ddp_hooks.dear.shards import ShardedOptimizer
from ddp_hooks.dear.stats import DearStats
from ddp_hooks.dear.storage import flatten, unflatten
from ddp_hooks.dear.tail import TailWatch

logger = logging.getLogger("ddp_hooks")


class DearState:
    """The state of :func:`~ddp_hooks.dear_hook`: DeAR with sharded updates (zhang2023dear, sections III and IV).

    All-reduce is split: gradients are reduce-scattered under backward, the optimizer steps on this rank's shard of
    every parameter, and parameters are all-gathered under the next forward. The paper gathers gradients instead and
    updates everything everywhere; the volume is the same, the optimizer's state and work are 1/P here.

    The training loop stays as it was. Between backward and step the model's ``.grad`` may not be read (it raises).
    After ``optimizer.step()`` parameters may be in flight: forwards, ``state_dict``, ``load_state_dict`` and
    ``AveragedModel.update_parameters`` wait by themselves; other readers call :meth:`synchronize` first.

    Args:
        ddp: wrapped with ``gradient_as_bucket_view=True``. Forward pre-hooks are installed on its modules.
        optimizer: element-wise, and holding every parameter that DDP reduces. From its first step on, its groups hold
            shards of the parameters in their place.
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
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._shapes = _parameter_shapes(ddp.module, self._parameters)
        self._recorder = Recorder(config.trace)
        self._lanes, self._atom_bytes = _open_lanes(config, group, self._parameters[0].device, self._recorder)
        fusion_mb = config.fusion_mb if config.fusion_mb is not None else self._atom_bytes / mebibytes(1)
        self._rule = FusionRule(config.fusion, fusion_mb, config.fusion_layers)
        self._sharded = ShardedOptimizer(optimizer, self._parameters, self._names, self._lanes)
        self._keeper = GradientKeeper(self._parameters, self._names, self._sharded)
        self._pipe = FeedPipe(ddp.module, self._parameters, self._names, self._recorder)
        on_cpu = self._parameters[0].device.type == "cpu"
        self._watches_tail = on_cpu and compat.places_gradients_one_by_one(ddp)
        self._tail = TailWatch(self._parameters, self._advance_tail)
        self._step_stall = Stall()

        self._schedule: Schedule | None = None  # None until the first step
        self._reduction: Reduction | None = None  # from the first bucket of a backward until it is attached
        self._in_backward = False
        self._settlements: list[Callable[[], None]] = []  # of gradients that are attached, but may still travel
        self._begins_early = type(optimizer) in checks.ELEMENTWISE and self._parameters[0].device.type == "cpu"
        self._flats: list[Tensor] = []  # per atom, (numel,): the memory of its parameters
        self._addresses: list[int] = []  # per parameter, where that memory should be
        self._gather_partitions: list[list[Partition]] = []
        self._gather_labels: list[str] = []
        self._stats = DearStats()
        self._mark = _Mark(Traffic(), 0.0, 0.0, time.perf_counter())
        self._closed = False
        self._handles = self._install_hooks(ddp)
        checks.claim(self._root)

    # -- what users call --------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every parameter holds its new value. Communicates nothing itself: one rank alone may call it."""
        self._pipe.finish()

    def stats(self) -> DearStats:
        """What the last complete step cost on this rank."""
        return self._stats

    def timeline(self) -> list[Span]:
        """What lanes did and what training waited for, in order of start; needs ``DearConfig(trace=True)``."""
        return self._recorder.snapshot()

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
        rule = FusionRule(
            fusion, self._rule.mb if mb is None else mb, self._rule.layers if layers is None else layers
        )
        problem = None
        try:
            DearConfig(fusion=rule.fusion, fusion_mb=rule.mb, fusion_layers=rule.layers)
        except ValueError as error:
            problem = str(error)
        agree({"fusion": rule}, problem, self._lanes.group, "the fusion rule")
        self._rule = rule
        if self._schedule is not None:
            self.synchronize()
            self._plan_groups(self._schedule.layout)

    def close(self) -> None:
        """Finish communication, let every rank do the same, remove all hooks and end the lanes.

        The parameters are complete afterwards. DDP cannot remove a communication hook and the optimizer keeps its
        shards, so both are spent: to train on, wrap ``ddp.module`` again and make a new optimizer.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._reduction is not None and not self._in_backward:
                self._reduction.wait()
            self._settle_gradients()
            self._pipe.finish()
        finally:
            self._reduction = None
            self._pipe.close()
            self._tail.close()
            for handle in self._handles:
                handle.remove()
            if self._schedule is not None:
                self._optimizer.register_step_pre_hook(seams.refuse_step)
                self._optimizer.register_state_dict_pre_hook(seams.refuse_state_dict)
            self._keeper.clear()
            self._lanes.close()
            checks.release(self._root)

    def _abandon(self, error: BaseException) -> None:
        self._lanes.abandon(error)

    def _is_stuck(self) -> bool:
        return self._lanes.stuck

    # -- 1. a bucket is ready ---------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Launch the reduce-scatters of a bucket; called by DDP, through the hook, during backward."""
        if self._closed:
            raise RuntimeError("DearState was closed: wrap the model in a new DistributedDataParallel to train on")
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
        self._reduction = Reduction(
            self._lanes,
            self._schedule,
            self._cut_bucket,
            self._fuse_in_order,
            self._label_atoms,
            self._tail.ready,
        )
        self._in_backward = True

    def _advance_tail(self) -> None:
        if self._in_backward and self._reduction is not None:
            self._reduction.advance()

    # -- 2. backward has ended --------------------------------------------------------------------------------------

    def _end_backward(self) -> None:
        self._in_backward = False
        self._tail.arm(False)
        reduction = self._reduction
        assert reduction is not None
        reduction.flush()
        reduction.used = self._keeper.guard_model()
        self._keeper.guard_shards(reduction.used)

    # -- 3. the optimizer is about to step --------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure") if "closure" in kwargs else (args[1] if len(args) > 1 else None)
        if closure is None:
            self._attach_gradients(stepping=True)
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
            self._attach_gradients(stepping=True)
            return loss

        return evaluate_and_attach

    def _attach_gradients(self, stepping: bool) -> None:
        """Give every shard its reduced gradient, as plain DDP would have left it.

        A known optimizer that is about to step gets gradients that it waits for one by one, so that it begins while
        the last ones travel.
        """
        self._refuse_unfinished_backward()
        self._keeper.refuse_unreduced()
        reduction = self._reduction
        if reduction is None:
            return
        self._refuse_replaced_storage()
        layout = reduction.layout()
        if self._schedule is None or self._schedule.layout != layout:
            self._adopt(layout, reduction)
        for work, atoms in reduction.works:
            settlement = self._settlement(work, [pair for atom in atoms for pair in self._attach_atom(atom, reduction)])
            self._settlements.append(settlement)
            for atom in atoms:
                self._sharded.defer_gradients(atom, settlement)
        self._reduction = None
        if not (self._begins_early and stepping):
            self._settle_gradients()

    def _attach_atom(self, atom: int, reduction: Reduction) -> list[tuple[Tensor, Tensor]]:
        """Give the atom's shards their part of its memory; returns which parts something is to be added to."""
        gradient = reduction.gradients[atom]
        sums = []
        for shard in self._sharded.shards_of_atom[atom]:
            length = shard.interval.end - shard.interval.start
            reduced = gradient[shard.offset : shard.offset + length]
            used = shard.interval.parameter in reduction.used
            if used and shard.base is not None:
                sums.append((reduced, shard.base))
            shard.tensor.grad = self._keeper.unless_discarded(shard, reduced if used else shard.base)
            shard.base = None
        return sums

    def _settlement(self, work: Work, sums: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """A function that waits for ``work`` and then forms the sums, the first time that it is called."""
        settled = False

        def settle() -> None:
            nonlocal settled
            if settled:
                return
            if not work.done:
                with self._step_stall.measure(self._recorder, work.label):
                    work.wait()
            with torch.no_grad():
                for reduced, base in sums:
                    reduced.add_(base)
            settled = True

        return settle

    def _settle_gradients(self) -> None:
        """Wait for every reduce-scatter that a step or a forward depends on; shards hold plain gradients then."""
        while self._settlements:
            self._settlements[0]()
            self._settlements.pop(0)
        self._sharded.resolve_gradients()

    def _refuse_unfinished_backward(self) -> None:
        if self._in_backward and self._reduction is not None:
            seen = {parameter for bucket in self._reduction.buckets for parameter in bucket}
            raise RuntimeError(
                f"the last backward ended without gradients for {checks.missing_names(self._names, seen)} or "
                f"parameters of the same bucket, so they were not reduced: pass find_unused_parameters=True to "
                f"DistributedDataParallel; if it ended with an exception, wrap the model again"
            )

    def _refuse_replaced_storage(self) -> None:
        for index, address in enumerate(self._addresses):
            if self._parameters[index].data_ptr() != address:
                raise RuntimeError(
                    f"the memory of {self._names[index]} was replaced (by .to() or .data = ...), so the optimizer "
                    f"would update memory that the model no longer reads: convert the model before wrapping it"
                )

    # -- layouts ----------------------------------------------------------------------------------------------------

    def _adopt(self, layout: Layout, reduction: Reduction) -> None:
        """Make ``layout`` the one in force: move parameters, optimizer state and kept gradients to where it says."""
        reduction.wait()
        old = self._schedule.layout if self._schedule is not None else None
        for shard in self._sharded.shards:  # what was kept from earlier backwards travels with the state
            shard.tensor.grad = self._keeper.unless_discarded(shard, shard.base)
        states = self._sharded.take_states(old, layout)
        if old is not None:
            self._gather_partitions = []  # they hold the old memory too
            unflatten(old, self._parameters, self._flats)
        self._flats = flatten(layout, self._parameters)
        self._addresses = [parameter.data_ptr() for parameter in self._parameters]
        self._sharded.install(layout, self._flats, states)
        self._plan_groups(layout)
        self._keeper.guard_shards(reduction.used)

    def _plan_groups(self, layout: Layout) -> None:
        self._schedule = Schedule(layout, self._fuse_in_order(layout.atoms))
        self._tail.watch(layout)
        order: list[list[int]] = [self._pipe.order_of_need()]
        dist.broadcast_object_list(order, group=self._lanes.group, group_src=0)  # one order for all ranks
        first_need = [min(order[0][m.parameter] for m in atom.members) for atom in layout.atoms]
        # Ties, and what no forward has shown, in the reverse of the backward.
        atoms_by_need = sorted(range(len(layout.atoms)), key=lambda i: (first_need[i], -i))
        groups = fuse(atoms_by_need, layout.atoms, self._shapes, self._rule)
        self._gather_partitions = [
            [Partition(self._flats[i], layout.atoms[i].bounds) for i in group] for group in groups
        ]
        self._gather_labels = [
            f"group {number} ({self._label_atoms([layout.atoms[i] for i in group])})"
            for number, group in enumerate(groups)
        ]
        self._pipe.plan([
            tuple(dict.fromkeys(m.parameter for i in group for m in layout.atoms[i].members)) for group in groups
        ])

    def _cut_bucket(self, position: int, parameters: tuple[int, ...], is_last: bool) -> list[Atom]:
        known = self._schedule.layout if self._schedule is not None else None
        if known is not None and position < len(known.buckets) and known.buckets[position] == parameters:
            return [atom for atom in known.atoms if atom.bucket == position]
        tail = is_last and position > 0 and self._watches_tail
        return cut_bucket(position, parameters, self._shapes, self._lanes.world_size, self._atom_bytes, tail)

    def _fuse_in_order(self, atoms: Sequence[Atom]) -> list[tuple[int, ...]]:
        tail = next((index for index, atom in enumerate(atoms) if atom.tail), len(atoms))
        groups = fuse(range(tail), atoms, self._shapes, self._rule)
        return groups + [(index,) for index in range(tail, len(atoms))]

    def _label_atoms(self, atoms: Sequence[Atom]) -> str:
        members = [member for atom in atoms for member in atom.members]
        others = len({member.parameter for member in members}) - 1
        return self._names[members[0].parameter] + (f" and {others} more" if others else "")

    # -- 5. the optimizer has stepped -------------------------------------------------------------------------------

    def _after_step(self, *_: Any) -> None:
        if self._schedule is None:
            return
        self._settle_gradients()
        self._pipe.finish()  # two steps without a forward between them
        compat.increment_versions(self._parameters)
        self._pipe.launch(self._lanes, self._gather_partitions, self._gather_labels)
        if not self.config.overlap_forward:
            self._pipe.finish()
        self._stats = self._next_stats()

    def _next_stats(self) -> DearStats:
        before = self._mark
        self._mark = _Mark(
            self._lanes.traffic, self._step_stall.seconds, self._pipe.stall.seconds, time.perf_counter()
        )
        traffic = self._mark.traffic - before.traffic
        return DearStats(
            step=self._stats.step + 1,
            num_groups=len(self._schedule.groups) if self._schedule is not None else 0,
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
        if self._reduction is not None:
            self._attach_gradients(stepping=False)
        self._settle_gradients()  # of a step that did not end
        self._keeper.make_room()
        if self._ddp.training:
            self._pipe.begin_trace()

    def _before_model(self, *_: Any) -> None:
        self._keeper.guard_kept(self._ddp.require_backward_grad_sync)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        self._pipe.end_trace(succeeded=output is not None)
        if torch.is_grad_enabled():
            self._tail.arm(output is not None and self._ddp.require_backward_grad_sync)
        error = sys.exc_info()[1] if output is None else None
        explanation = self._lanes.explain(error) if error is not None else None
        if error is not None and explanation is not None:  # DDP's own broadcast of buffers names nobody
            logger.error("forward lost a connection: %s", explanation)
            if sys.version_info >= (3, 11):
                error.add_note(explanation)

    # -- seams ------------------------------------------------------------------------------------------------------

    def _install_hooks(self, ddp: DistributedDataParallel) -> list[Any]:
        optimizer = self._optimizer
        wait = InertOnCopy(lambda *_: self._pipe.finish())
        handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(seams.refuse_state_dict),
            optimizer.register_load_state_dict_pre_hook(seams.refuse_state_dict),
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
        if self._schedule is not None:  # until then the optimizer holds the parameters themselves
            self._keeper.zero_grad(set_to_none)

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


def _parameter_shapes(root: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> list[ParameterShape]:
    layer_of: dict[int, int] = {}
    for layer, module in enumerate(root.modules()):
        for parameter in module.parameters(recurse=False):
            layer_of.setdefault(id(parameter), layer)
    return [ParameterShape(p.numel(), p.element_size(), layer_of[id(p)]) for p in parameters]
