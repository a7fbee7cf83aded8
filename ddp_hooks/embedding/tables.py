"""Tables split by columns: what users hold of EmbRace. How a step goes is in :mod:`ddp_hooks.embedding.flow`."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_hooks.comm import Work, at_exit, calling, see, torch_compat, whole
from ddp_hooks.embedding.channels import Exchanger
from ddp_hooks.embedding.checkpoint import TableCheckpoint
from ddp_hooks.embedding.columns import scatter_columns
from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.flow import TableFlow
from ddp_hooks.embedding.ids import BatchRows
from ddp_hooks.embedding.prefetch import BatchIds, PrefetchedLoader, ids_by_table
from ddp_hooks.embedding.stats import TableStats
from ddp_hooks.embedding.table import Table
from ddp_hooks.intercept import NonCopyableHook, around_step, co_optimizers, extend_zero_grad
from ddp_hooks.intercept.optimizers import find_problem_of_hooks

logger = logging.getLogger("ddp_hooks")

Batch = TypeVar("Batch")


class EmbeddingTables(TableFlow):
    """Sharded tables of a model; made by :func:`~ddp_hooks.shard_embeddings`.

    The optimizer of the tables steps beside the model's: :meth:`follow` it once (``DearState`` does that by itself), or
    call :meth:`step` after it. With :meth:`prefetch` what the next batch looks up travels early, and the rest of the
    gradient while the model computes.

    Attributes:
        optimizer: a ``torch.optim.Optimizer`` of the tables, for schedulers and its settings.
        config: the settings.
        coordinator: that moves everything, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[Table],
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        config: TableConfig,
        coordinator: Exchanger | None = None,
    ) -> None:
        super().__init__(model, tables, optimizer, group, config, coordinator)
        self._index_of = {name: table.index for table in tables for name in (table.name, *table.aliases)}
        self._checkpoint = TableCheckpoint(tables, optimizer, self._channels)
        self._kept: list[Tensor] | None = None  # whole tables, for state_dict() on this rank until the next step
        self._steps_with_another = False
        self._was_left_out = False  # of what get_state_dict() or set_state_dict() was given
        self._followed: torch.optim.Optimizer | None = None
        self._following: list[Any] = []
        self._urgent_works: Sequence[Work] = ()
        self._replaced: dict[int, weakref.ref[Tensor]] = {}  # the weights that were whole
        self._handles: list[Any] = [
            model.register_forward_pre_hook(NonCopyableHook(self._before_forward)),
            model.register_forward_hook(NonCopyableHook(self._after_forward), always_call=True),
            *around_step(optimizer, self._before_own_step, self._after_own_step),
            extend_zero_grad(optimizer, self._gradients_zeroed),
            _before_any_step(self),
            at_exit(self.close, self._channels.abandon, self._channels.is_stuck),
        ]
        # These stay when the tables are closed: one rank's part of the state is never what is to be saved.
        optimizer.register_state_dict_pre_hook(lambda *_: self.flush())
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_state_dict_pre_hook(self._checkpoint.before_state_dict)
        optimizer.register_state_dict_post_hook(self._checkpoint.after_state_dict)
        co_optimizers.join_module(model, self)

    # -- what users call --------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Of the tables, as :meth:`prefetch` knows them."""
        return list(self._index_of)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Step and zero gradients together with ``optimizer``, the model's, from now on.

        Raises:
            ValueError: the optimizer holds a weight that was sharded: make it after ``shard_embeddings``. Or it calls
                no hooks.
        """
        self._refuse_closed()
        problem = find_problem_of_hooks(optimizer)
        if problem is not None:
            raise ValueError(problem)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        stale = [self._all[index].name for index, weight in self._replaced.items() if id(weight()) in held]
        if stale:
            raise ValueError(
                f"the optimizer still holds the whole weight of {', '.join(stale)}: make it from model.parameters() "
                f"after shard_embeddings()"
            )
        self.unfollow()
        self._followed, self._is_followed = optimizer, True
        self._following = [
            *around_step(optimizer, self._before_their_step, self._after_their_step),
            extend_zero_grad(optimizer, self._gradients_zeroed),
        ]
        co_optimizers.join_optimizer(optimizer, self)

    def unfollow(self) -> None:
        """Step with nobody."""
        if self._followed is not None:
            co_optimizers.leave_optimizer(self._followed, self)
        for handle in self._following:
            handle.remove()
        self._followed, self._is_followed, self._following = None, False, []

    def step(self) -> None:
        """Update the tables; after the model's ``optimizer.step()`` where they do not :meth:`follow` it."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget the tables' gradients; the model's optimizer does it where they :meth:`follow` it."""
        self._drop_gradients()

    def requires_grad_(self, requires_grad: bool = True, names: Iterable[str] | None = None) -> None:
        """Train tables from now on, or not; all ranks do the same, between two steps.

        ``requires_grad_()`` of modules around a table does it, too. A loop over parameters does not reach tables.

        Args:
            requires_grad: whether to train them.
            names: which; None: all of them.
        """
        for name in self._index_of if names is None else names:
            if name not in self._index_of:
                raise ValueError(f"{name!r} is no sharded table; these are {', '.join(self._index_of)}")
            self._freezing.set(self._index_of[name], requires_grad)

    def multiply_gradients(self, factor: float) -> None:
        """Multiply the tables' gradients, as a loop over ``.grad`` does with those of parameters; communicates nothing.

        Between backward and the step; all ranks by the same factor.
        """
        self._expected.multiply(factor)
        self._step.multiply(factor)

    def prefetch(self, loader: Iterable[Batch], ids: Callable[[Batch], BatchIds]) -> PrefetchedLoader[Batch]:
        """A loader that is one batch ahead of the training loop, so that rows travel before they are needed.

        Args:
            loader: any iterable of batches, of training. It is wrapped last: whatever skips or reorders batches does it
                inside.
            ids: all ids that a batch will look up, by the name of the table: ``lambda batch: {"encoder.embed":
                batch["input_ids"]}``. More than a forward asks for do no harm, fewer are an error.
        """
        self._refuse_closed()
        return PrefetchedLoader(self, loader, ids)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients of forwards inside up on this rank, and send them with the next one outside.

        For models without DDP; DDP's own ``no_sync()`` counts for tables, too.
        """
        before, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = before

    @contextmanager
    def local(self) -> Iterator[None]:
        """Have whole tables on every rank, for evaluation with any number of batches on each; collective at its begin.

        Takes the memory of whole tables for as long as it lasts. ``state_dict()`` works inside.
        """
        if self._whole is not None:  # inside of another one
            yield
            return
        with calling("local()"):
            self._flush_together()
            self._whole = self._checkpoint.weights(None, self.device)
        announced = self.announcements.present()
        try:
            yield
        finally:
            self._whole = None
            self.announcements.restore(announced)

    def stats(self) -> TableStats:
        """What the last step cost on this rank."""
        return self._step.stats

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Not here: ``ddp_hooks.clip_grad_norm_([parameters or state, tables], max_norm)`` clips all gradients."""
        raise RuntimeError(
            "clip tables together with the rest of the model, whose norm is one: "
            "ddp_hooks.clip_grad_norm_([ddp.parameters(), tables], max_norm), or [state, tables] with DearState"
            f"{see('gradients-are-guarded')}"
        )

    @contextmanager
    def reduced_gradients(self) -> Iterator[list[torch.nn.Parameter]]:
        """This rank's columns of all rows that have a gradient, as ``.grad``, to read or to scale; collective.

        Between backward and the step, which then waits for delayed rows. Nothing with
        ``TableConfig(clip="dense_only")``.
        """
        self._step.clip = "dense_only" if self.config.clip == "dense_only" else "all"
        holders = []
        for part in self._step.complete().values() if self._step.clip == "all" else []:
            holder = nn.Parameter(part.values.new_zeros(()).expand(part.values.shape))
            holder.grad = part.values
            holders.append(holder)
        try:
            yield holders
        finally:
            self._witness.watch()  # the model's gradients may have been clipped meanwhile, to nothing perhaps

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """The sum of a small tensor over the ranks; collective."""
        return self._channels.reduce_small(value.to(self.device), "sum_over_ranks()")

    def largest_over_ranks(self, value: Tensor) -> Tensor:
        """The largest values of a small tensor over the ranks; collective."""
        return self._channels.reduce_small(value.to(self.device), "largest_over_ranks()", largest=True)

    @calling("full_state_dict()")
    def full_state_dict(self) -> dict[str, Any]:
        """The model's ``state_dict`` with whole tables, on the CPU, as the model without sharding has it; collective.

        Every rank gets it. Load it with ``model.load_state_dict``, also into a model that is not sharded.
        """
        self._flush_together()
        before, self._kept = self._kept, self._checkpoint.weights(None, torch.device("cpu"))
        try:
            state: dict[str, Any] = self._root.state_dict()
        finally:
            self._kept = before
        return state

    @calling("full_optimizer_state_dict()")
    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """The table optimizer's ``state_dict`` for whole tables, on the CPU; collective. Every rank gets it.

        Load it with ``tables.optimizer.load_state_dict``, on any number of ranks.
        """
        self._flush_together()
        state = self._checkpoint.optimizer_state(None)
        assert state is not None
        return state

    @calling("consolidate()")
    def consolidate(self, to: int | None = 0) -> None:
        """Gather tables and optimizer state on rank ``to`` of the group, for code that saves there alone; collective.

        Until the next step ``model.state_dict()`` and ``tables.optimizer.state_dict()`` return whole tables there; on
        other ranks, and after the next step, they raise. With None every rank gets them.
        """
        world_size = self._channels.world_size
        if to is not None and not (whole(to, 0) and to < world_size):
            raise ValueError(f"consolidate(to=...) takes None or a rank from 0 to {world_size - 1}, got {to!r}")
        self._flush_together()
        self._kept = self._checkpoint.weights(to, torch.device("cpu"))
        self._checkpoint.keep(self._checkpoint.optimizer_state(to))

    @property
    def is_whole(self) -> bool:
        """Whether ``state_dict()`` has whole tables on this rank now: after :meth:`consolidate`, in :meth:`local`."""
        return self._whole is not None or self._kept is not None or self._channels.world_size == 1

    @calling("sharded_state_dict()")
    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's columns of tables and optimizer state, DTensors, for ``torch.distributed.checkpoint.save``.

        Collective. Tensors are those in use, not copies. See :meth:`load_sharded`.
        """
        self._flush_together()
        return self._checkpoint.parts()

    @calling("load_sharded()")
    def load_sharded(self, path: str | os.PathLike[str], prefix: str = "tables") -> None:
        """Restore tables and optimizer from a ``torch.distributed.checkpoint``, on any number of ranks; collective.

        Args:
            path: the checkpoint's folder.
            prefix: the key under which :meth:`sharded_state_dict` was saved.

        Raises:
            ValueError: there is no such table.
        """
        self._flush_together()
        self._weights_change()
        self._checkpoint.load_parts(path, prefix)

    def close(self) -> None:
        """Finish communication, let every rank do the same, and end the lanes.

        The model keeps its columns, which can be neither looked up nor saved any more: save before.
        """
        if self._closed:
            return
        try:
            if not self._step.is_interrupted:  # otherwise other ranks may not come
                self.flush()
        finally:
            self._closed = True
            self.unfollow()
            co_optimizers.leave_module(self._root, self)
            for handle in (*self._handles, *self._zeroing):
                handle.remove()
            self._handles, self._zeroing = [], []
            self._channels.close()

    # -- for modules and loaders ------------------------------------------------------------------------------------

    def begin_with(self, weights: Sequence[Tensor]) -> None:
        """Cut the tables out of whole weights, the first rank's unless the settings say otherwise; collective."""
        self._replaced = {index: weakref.ref(weight) for index, weight in enumerate(weights)}
        rank, world_size = self._channels.rank, self._channels.world_size
        for table, full in zip(self._all, weights, strict=True):
            if self.config.init_sync:
                algorithm = scatter_columns(table, full.detach(), rank, world_size)
                self._channels.run_now(algorithm, f"the weights of {table.name}")
            else:
                with torch.no_grad():
                    table.weight.copy_(table.cut(full, rank))

    def have_moved_in(self) -> None:
        """Their modules stand in the model now."""
        self._freezing.watch(self._root)

    def rows_of(self, given: BatchIds) -> BatchRows:
        """What a batch looks up, from what the function given to :meth:`prefetch` returned."""
        return BatchRows.of(ids_by_table(given, self._index_of), self._all, self.config.deduplicate)

    def weight_of(self, index: int, what: str) -> Tensor:
        """A whole table, if it is here; a DTensor of all ranks' columns in a model of FSDP2's, as parameters are, and
        for ``torch.distributed.checkpoint.state_dict``.

        Raises:
            RuntimeError: this rank has some columns only.
        """
        if self._whole is not None:
            return self._whole[index]
        if self._kept is not None and not torch_compat.inside_state_dict_api():  # which all ranks call
            return self._kept[index]
        if self._channels.world_size == 1:
            self.flush()
            return self._all[index].weight.detach()
        if not self._closed and (_is_sharded_by_fsdp2(self._root) or torch_compat.inside_state_dict_api()):
            self.flush()
            return self._checkpoint.as_dtensor(self._all[index])
        rank = self._channels.ranks[self._channels.rank]
        if self._closed:
            raise RuntimeError(
                f"{what}: the tables were closed, and rank {rank} has kept some columns of {self._all[index].name} "
                f"only: call tables.full_state_dict() on all ranks before tables.close(){see('the-state-was-closed')}"
            )
        raise RuntimeError(
            f"{what}: rank {rank} has some columns of {self._all[index].name} only, and to gather the others takes all "
            f"ranks. To save call tables.full_state_dict() on all ranks, or tables.consolidate() on all ranks and "
            f"state_dict() on the rank that saves then, before the next step; to evaluate or read weights use "
            f"tables.local() on all ranks{see('tables-are-sharded')}"
        )

    def weight_to_save(self, index: int) -> Tensor:
        """Return :meth:`weight_of` for ``state_dict()``; collective where torch gathers it."""
        if self._whole is None:
            self._checkpoint.meet_before_gather()
        return self.weight_of(index, "state_dict()")

    def look_for_own_optimizer(self) -> None:
        """Warn, once, if ``get_state_dict()`` or ``set_state_dict()`` is given optimizers without the tables' one."""
        call, optimizers = torch_compat.optimizers_beside_model()
        has_state = not isinstance(self.optimizer, torch.optim.SGD)  # as momentum is refused
        if not optimizers or self.optimizer in optimizers or self._was_left_out or not has_state:
            return
        self._was_left_out = True
        logger.warning(
            "%s() was given optimizers without that of the sharded tables %s, whose state it leaves out; a run that "
            "resumes would begin with a new one. Call get_state_dict(model, [optimizer, tables.optimizer]), and "
            "set_state_dict() likewise%s",
            call,
            ", ".join(table.name for table in self._all),
            see("optimizer-state-is-sharded"),
        )

    def load_weight(self, index: int, full: Tensor) -> None:
        """Take this rank's columns of (num_rows, dim), which may be a DTensor: then all ranks do it together."""
        if self._whole is not None:
            raise RuntimeError(
                "weights were loaded inside of tables.local(), where tables are copies: leave it before"
                f"{see('called-at-the-wrong-moment')}"
            )
        self.flush()
        self._weights_change()
        table = self._all[index]
        columns = self._checkpoint.own_columns(table, full)
        with torch.no_grad():
            table.weight.copy_(columns)

    def convert(self, index: int, function: Callable[[Tensor], Tensor]) -> None:
        """``model.to()`` and the like."""
        self.flush()
        self._weights_change()
        weight = self._all[index].weight
        with torch.no_grad():
            converted = function(weight.data)
        if converted.device != weight.device:
            raise RuntimeError(
                f"sharded tables cannot move from {weight.device} to {converted.device}: move the model before "
                f"shard_embeddings(){see('storage-was-replaced')}"
            )
        weight.data = converted

    # -- CoOptimizer -----------------------------------------------------------------------------------------------

    def yield_link_to(self, works: Sequence[Work]) -> None:
        """Delayed rows follow these."""
        self._urgent_works = works

    def unscale(self, inverse_scale: float) -> bool:
        """Multiply gradients when they are applied; whether some of this rank's are not finite."""
        self._step.multiply(inverse_scale)
        self._step.is_unscaled = True
        return self.found_nonfinite()

    def would_miss_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` is the model's, and will not apply the gradients that are here, nor will another."""
        return self._step.has_gradients and not self._is_followed and self._is_of_the_model(optimizer)

    def on_grads_restored(self) -> None:
        """The model's gradients are there now, in the place of guards."""
        self._forget_zeroed()  # while guards were there
        self._witness.watch()

    def found_nonfinite(self) -> bool:
        """Whether some of this rank's gradients are not finite, before or after summing up."""
        return self._step.found_nonfinite()

    # -- seams ------------------------------------------------------------------------------------------------------

    def _before_own_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._updates.running:
            return
        if torch_compat.makes_state(kwargs):
            self._updates.begin_making_state()
            return
        if torch_compat.with_closure(args, kwargs, lambda closure: closure) is not None:
            raise RuntimeError(
                "tables.optimizer.step() takes no closure: run backward before it, or let the tables follow() the "
                f"optimizer whose step() has the closure{see('how-step-is-called')}"
            )
        self._forget_kept()
        self._begin_step()

    def _after_own_step(self, *_: Any) -> None:
        if torch_compat.inside_making_state():
            self._updates.end_making_state()
        elif not (self._updates.running or self._steps_with_another):
            self._end_step()

    def _gradients_zeroed(self, _: bool) -> None:
        if not torch_compat.inside_making_state():  # which finds no gradients in the weights, and forgets its own
            self._drop_gradients()

    def _before_their_step(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
    ) -> tuple[Any, Any] | None:
        if torch_compat.is_inner_step(optimizer) or torch_compat.makes_state(kwargs):
            return None
        replaced = torch_compat.with_closure(args, kwargs, self._stepping_after)
        if replaced is None:
            self._step_with_another()
        return None if isinstance(optimizer, torch.optim.LBFGS) else replaced

    def _stepping_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The user's closure, in which backward is; then the tables step, before any hook zeroes gradients."""
        return torch_compat.evaluated_once(closure, self._step_with_another, "sharded tables support")

    def _after_their_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch_compat.is_inner_step(optimizer) or torch_compat.makes_state(kwargs):
            return
        if isinstance(optimizer, torch.optim.LBFGS):  # whose last evaluation counts
            self._step_with_another()
        self._end_step(self._urgent_works)
        self._urgent_works = ()

    def _step_with_another(self) -> None:
        self._steps_with_another = True
        try:
            self.optimizer.step()  # which schedulers look for
        finally:
            self._steps_with_another = False

    def _refuse_stock_scaler(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if torch's scaler is about to let ``optimizer`` step, which should have been the tables' step, too."""
        if self._step.is_unscaled or not (self._step.has_gradients and torch_compat.inside_grad_scaler()):
            return
        if optimizer is self._followed or self.would_miss_step(optimizer):
            raise RuntimeError(
                "torch.amp.GradScaler does not see the gradients of sharded tables, which would stay scaled: use "
                "ddp_hooks.GradScaler instead, with the same arguments, and let the tables follow() the optimizer that "
                f"it steps{see('stock-gradscaler')}"
            )

    def _is_of_the_model(self, optimizer: torch.optim.Optimizer) -> bool:
        ours = {id(parameter) for parameter in self._whole_model().parameters()}
        return any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"])

    def _before_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        self.flush()
        self._forget_kept()
        return None if self._checkpoint.loads_parts else self._checkpoint.before_load(optimizer, state_dict)

    def _weights_change(self) -> None:
        """Vectors that were looked up ahead, and whole tables that were gathered, are old from now on."""
        if self._ahead is not None:
            if self._ahead.fetched is not None:
                self._ahead.fetched.wait()
            self._ahead.lookups = self._ahead.fetched = None
        self._forget_kept()

    def _forget_kept(self) -> None:
        self._kept = None
        self._checkpoint.keep(None)

    def __deepcopy__(self, memo: Any) -> EmbeddingTables:
        raise TypeError("sharded tables cannot be copied: build a model without them and load full_state_dict()")

    def __reduce__(self) -> Any:
        raise TypeError("sharded tables cannot be pickled: save tables.full_state_dict() instead")


def _is_sharded_by_fsdp2(model: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _before_any_step(tables: EmbeddingTables) -> RemovableHandle:
    """Look at the steps of all optimizers, also those that the tables do not follow."""
    reference = weakref.ref(tables)  # torch keeps the hook for as long as nobody removes it

    def look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        present = reference()
        if present is not None:
            present._refuse_stock_scaler(optimizer)

    handle = register_optimizer_step_pre_hook(look)
    weakref.finalize(tables, handle.remove)
    return handle
