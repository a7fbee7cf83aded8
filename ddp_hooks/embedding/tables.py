"""Sharded tables of a model, as users hold them (EmbRace); the scheduler describes a step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ddp_hooks.comm import Work, at_exit, calling, see, whole
from ddp_hooks.embedding.checkpoint import TableCheckpoint
from ddp_hooks.embedding.exchange.channels import Channels
from ddp_hooks.embedding.exchange.lookup import BatchRows
from ddp_hooks.embedding.module import ShardedEmbedding
from ddp_hooks.embedding.stats import TableStats
from ddp_hooks.embedding.step.optimizer_hooks import OptimizerHooks
from ddp_hooks.embedding.step.prefetch import BatchIds, PrefetchedLoader, ids_by_table
from ddp_hooks.embedding.step.scheduler import StepScheduler
from ddp_hooks.embedding.step.split_step import TableUpdates
from ddp_hooks.embedding.table import Selected, Table, scatter_columns
from ddp_hooks.intercept import co_optimizers
from ddp_hooks.intercept.optimizers import find_problem_of_hooks

Batch = TypeVar("Batch")


class EmbeddingTables:
    """Sharded tables of a model; made by :func:`~ddp_hooks.shard_embeddings`.

    The optimizer of the tables steps beside the model's: :meth:`follow` it once (``DearState`` does that by itself), or
    call :meth:`step` after it. With :meth:`prefetch` the next batch's rows travel early, and the rest of the gradient
    travels while the model computes.

    ``optimizer`` is a ``torch.optim.Optimizer`` of the tables, for schedulers and its settings, and ``config`` are the
    settings of the exchange. Methods that wait for other ranks raise ``LaneError`` if a rank died or made another call,
    and ``LaneTimeout`` after ``TableConfig(timeout_s=...)``.
    """

    def __init__(
        self, model: nn.Module, tables: Sequence[Table], optimizer: torch.optim.Optimizer, channels: Channels
    ) -> None:
        self.config = channels.config
        self.optimizer = optimizer
        self._root = model
        self._tables = tables
        self._index_of = {name: table.index for table in tables for name in (table.name, *table.aliases)}
        self._device = tables[0].weight.device
        self._channels = channels
        updates = TableUpdates(optimizer, [table.weight for table in tables])
        self._scheduler = StepScheduler(model, tables, channels, updates)
        self._step = self._scheduler.split_step
        self._checkpoint = TableCheckpoint(model, tables, optimizer, self._scheduler)
        self._optimizers = OptimizerHooks(optimizer, self._scheduler, self._checkpoint.discard_whole)
        self.announcements = self._scheduler.lookups.queue  # batches that loaders have handed out
        self._replaced: list[weakref.ref[Tensor]] = []  # whole weights, by table
        self._at_exit = at_exit(self.close, channels.abandon, channels.is_stuck)
        co_optimizers.join(self, model)

    # -- training loop

    @property
    def names(self) -> list[str]:
        """Names of the tables, as :meth:`prefetch` knows them."""
        return list(self._index_of)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Step and zero gradients together with ``optimizer``, the model's, from now on.

        Raises:
            ValueError: the optimizer holds a weight that was sharded (make it after ``shard_embeddings``), or it calls
                no hooks.
        """
        self._scheduler.refuse_closed()
        if (problem := find_problem_of_hooks(optimizer)) is not None:
            raise ValueError(problem)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        stale = [t.name for t, weight in zip(self._tables, self._replaced, strict=True) if id(weight()) in held]
        if stale:
            raise ValueError(
                f"the optimizer still holds the whole weight of {', '.join(stale)}: make it from model.parameters() "
                f"after shard_embeddings()"
            )
        self.unfollow()
        self._optimizers.follow(optimizer)
        co_optimizers.join(self, self._root, optimizer)

    def unfollow(self) -> None:
        """Step with no other optimizer."""
        if self._optimizers.followed is not None:
            co_optimizers.join(self, self._root)
        self._optimizers.unfollow()

    def step(self) -> None:
        """Update the tables; call it after the model's ``optimizer.step()`` unless they :meth:`follow` it.

        Raises:
            RuntimeError: gradients were not sent, zeroed beside the tables, or applied before.
        """
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget the tables' gradients; the model's optimizer does so if they :meth:`follow` it."""
        self._scheduler.drop_gradients()

    def requires_grad_(self, requires_grad: bool = True, names: Iterable[str] | None = None) -> None:
        """Train or freeze tables, by ``names`` or all, from now on; all ranks do the same, between two steps.

        ``requires_grad_()`` of modules around a table does it, too. A loop over parameters does not reach tables.

        Raises:
            ValueError: a name belongs to no table.
        """
        for name in self._index_of if names is None else names:
            if name not in self._index_of:
                raise ValueError(f"{name!r} is no sharded table; these are {', '.join(self._index_of)}")
            self._scheduler.requires_grad.set(self._index_of[name], requires_grad)

    def multiply_gradients(self, factor: float) -> None:
        """Multiply the tables' gradients between backward and step, on all ranks by the same factor.

        Takes the place of a loop over ``.grad``, which does not reach tables. Communicates nothing.
        """
        self._scheduler.expected.multiply(factor)
        self._step.multiply(factor)

    def prefetch(self, loader: Iterable[Batch], ids: Callable[[Batch], BatchIds]) -> PrefetchedLoader[Batch]:
        """Wrap a loader to read one batch ahead of the training loop, so that rows travel before they are needed.

        Args:
            loader: iterable of training batches. Wrap it last: whatever skips or reorders batches belongs inside.
            ids: returns all ids that a batch looks up, by the name of the table: ``lambda batch: {"encoder.embed":
                batch["input_ids"]}``. More ids than the forward asks for do no harm, fewer are an error.
        """
        self._scheduler.refuse_closed()
        return PrefetchedLoader(self.announcements, loader, lambda batch: self.rows_of(ids(batch)))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients of forwards inside on this rank, and send them with the next one outside.

        For models without DDP; DDP's own ``no_sync()`` counts for tables, too.
        """
        before, self._scheduler.accumulates = self._scheduler.accumulates, True
        try:
            yield
        finally:
            self._scheduler.accumulates = before

    @contextmanager
    def local(self) -> Iterator[None]:
        """Hold whole tables on every rank, for evaluation with any number of batches on each; collective at its begin.

        Takes the memory of whole tables for as long as it lasts. ``state_dict()`` works inside.
        """
        scheduler = self._scheduler
        if scheduler.local_tables is not None:  # inside of another local()
            yield
            return
        with calling("local()"):
            scheduler.flush_together()
            scheduler.local_tables = self._checkpoint.gather_weights(None, self._device)
        try:
            with self.announcements.without_evaluation():
                yield
        finally:
            scheduler.local_tables = None

    def stats(self) -> TableStats:
        """Return the last step's cost on this rank."""
        return self._step.stats

    def flush(self) -> None:
        """Wait for delayed rows, and apply them; communicates nothing, so one rank alone may call it.

        Raises:
            RuntimeError: a step was interrupted before it sent them.
        """
        self._step.flush()

    def close(self) -> None:
        """Finish communication and end the lanes; every rank does the same.

        Save before: the model keeps its columns, which can be neither looked up nor saved any more.
        """
        if self._scheduler.closed:
            return
        try:
            if not self._step.is_interrupted:  # otherwise other ranks may not come
                self.flush()
        finally:
            self._scheduler.close()
            self.unfollow()
            co_optimizers.leave(self)
            self._optimizers.close()
            self._at_exit.remove()
            self._channels.close()

    # -- clipping and scaling, with the model: methods of a CoOptimizer

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Raise ``RuntimeError``: ``ddp_hooks.clip_grad_norm_([parameters or state, tables], max_norm)`` clips all."""
        raise RuntimeError(
            "clip tables together with the rest of the model, whose norm is one: "
            "ddp_hooks.clip_grad_norm_([ddp.parameters(), tables], max_norm), or [state, tables] with DearState"
            f"{see('gradients-are-guarded')}"
        )

    @contextmanager
    def reduced_gradients(self) -> Iterator[list[nn.Parameter]]:
        """Yield holders whose ``.grad`` are this rank's columns of all gradient rows, to read or scale; collective.

        Between backward and step, which then waits for delayed rows. Empty with ``TableConfig(clip="dense_only")``.
        """
        holders = []
        for part in self._step.complete().values() if self.config.clip == "all" else []:
            holder = nn.Parameter(part.values.new_zeros(()).expand(part.values.shape))
            holder.grad = part.values
            holders.append(holder)
        try:
            yield holders
        finally:
            self._scheduler.zeroing.watch()  # the model's gradients may have been clipped to nothing

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        return self._channels.reduce_small(value.to(self._device), "sum_over_ranks()")

    def largest_over_ranks(self, value: Tensor) -> Tensor:
        return self._channels.reduce_small(value.to(self._device), "largest_over_ranks()", largest=True)

    def yield_link_to(self, works: Sequence[Work]) -> None:
        self._optimizers.urgent_works = works

    def unscale(self, inverse_scale: float) -> bool:
        self._step.multiply(inverse_scale)
        self._step.is_unscaled = True
        return self.found_nonfinite()

    def found_nonfinite(self) -> bool:
        return self._step.found_nonfinite()

    def would_miss_step(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._optimizers.would_miss_step(optimizer)

    def on_grads_restored(self) -> None:
        self._scheduler.drop_zeroed()  # guards may have been zeroed before
        self._scheduler.zeroing.watch()

    # -- checkpoints

    @calling("full_state_dict()")
    def full_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of the unsharded model, with whole tables, on the CPU of every rank; collective.

        Load it with ``model.load_state_dict``, also into a model that is not sharded.
        """
        self._scheduler.flush_together()
        return self._checkpoint.full_state_dict()

    @calling("full_optimizer_state_dict()")
    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """Return the table optimizer's ``state_dict`` for whole tables, on the CPU of every rank; collective.

        Load it with ``tables.optimizer.load_state_dict``, on any number of ranks.
        """
        self._scheduler.flush_together()
        return self._checkpoint.gather_optimizer_state(None) or {}

    @calling("consolidate()")
    def consolidate(self, to: int | None = 0) -> None:
        """Gather tables and optimizer state on rank ``to`` of the group, for code that saves there alone; collective.

        Until the next step ``model.state_dict()`` and ``tables.optimizer.state_dict()`` return whole tables there; on
        other ranks, and after the next step, they raise. With None every rank gets whole tables.

        Raises:
            ValueError: ``to`` is no rank of the group.
        """
        world_size = self._channels.world_size
        if to is not None and not (whole(to, 0) and to < world_size):
            raise ValueError(f"consolidate(to=...) takes None or a rank from 0 to {world_size - 1}, got {to!r}")
        self._scheduler.flush_together()
        self._checkpoint.consolidate(to)

    @property
    def is_whole(self) -> bool:
        """True if ``state_dict()`` has whole tables on this rank: after :meth:`consolidate`, in :meth:`local`."""
        whole_tables = self._scheduler.local_tables or self._checkpoint.kept_weights
        return bool(whole_tables) or self._channels.world_size == 1

    @calling("sharded_state_dict()")
    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's columns of tables and optimizer state as DTensors, for ``torch.distributed.checkpoint``.

        Collective. The tensors are those in use, not copies. See :meth:`load_sharded`.
        """
        self._scheduler.flush_together()
        return self._checkpoint.sharded_state_dict()

    @calling("load_sharded()")
    def load_sharded(self, path: str | os.PathLike[str], prefix: str = "tables") -> None:
        """Restore tables and optimizer from the folder of a ``torch.distributed.checkpoint``; collective.

        On any number of ranks. ``prefix`` is the key under which :meth:`sharded_state_dict` was saved.

        Raises:
            ValueError: the checkpoint has no such table.
        """
        self._scheduler.flush_together()
        self._checkpoint.discard_old()
        self._checkpoint.load_sharded(path, prefix)

    # -- modules and loaders

    def replace(self, selected: Sequence[Selected]) -> None:
        """Take over the weights of these embeddings, and their places in the model; collective."""
        self._replaced = [weakref.ref(one.module.weight) for one in selected]
        for table, one in zip(self._tables, selected, strict=True):
            full = one.module.weight.detach()
            if self.config.init_sync:
                self._channels.run("columns", scatter_columns(table, full), f"the weights of {table.name}").wait()
            else:
                with torch.no_grad():
                    table.weight.copy_(table.cut(full, table.rank))
        for table, one in zip(self._tables, selected, strict=True):
            made: dict[int, ShardedEmbedding] = {}
            for path, module in one.places:
                if id(module) not in made:
                    new = ShardedEmbedding(self, self._scheduler, self._checkpoint, table, is_first=not made)
                    made[id(module)] = new.train(module.training)
                self._root.set_submodule(path, made[id(module)])
            for _, other, attribute in one.others:
                setattr(other, attribute, nn.Parameter(one.module.weight.detach().clone()))
        self._scheduler.requires_grad.attach(self._root)

    def rows_of(self, given: BatchIds) -> BatchRows:
        return BatchRows.of(ids_by_table(given, self._index_of), self._tables, self.config.deduplicate)
