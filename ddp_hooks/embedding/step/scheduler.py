"""When rows travel: hooks around forwards, backwards and steps.

A step with prefetched batches, on every rank:

1. The model's forward begins. The vectors of its batch are on their way since the last step; each table's forward
   waits for them.
2. The forward ends. Ranks exchange the ids of the next batch.
3. A table's gradient is complete. Its rows are coalesced and split (Algorithm 1); prior rows leave at once.
4. The step. Prior rows are applied, and the next vectors are looked up. Delayed rows leave; they are applied when the
   next step begins at the latest, before anybody looks them up.

Everything that a step sends is submitted when the step ends, so waiting never communicates. Without prefetch each
table's forward looks up by itself, and all rows are prior.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import Work, see
from ddp_hooks.comm.torch_compat.autograd import (
    backward_reaches_leaves,
    in_backward,
    queue_after_hooks,
    queue_engine_callback,
)
from ddp_hooks.comm.torch_compat.ddp import ddp_in_forward
from ddp_hooks.comm.torch_compat.overrides import tensors_in
from ddp_hooks.embedding.exchange.channels import Channels
from ddp_hooks.embedding.exchange.gradients import GradientExchange
from ddp_hooks.embedding.exchange.lookup import Lookup, as_ids
from ddp_hooks.embedding.step.lookups import ExpectedGradients, GatherVectors, Lookups
from ddp_hooks.embedding.step.split_step import SplitStep, TableUpdates
from ddp_hooks.embedding.step.zero_grad_detector import ZeroGradDetector
from ddp_hooks.embedding.table import RequiresGradSync, Table
from ddp_hooks.intercept import NonCopyableHook, extend_zero_grad


class GradientState(Enum):
    """Lifecycle of the tables' gradients from one ``zero_grad()`` to the next."""

    NEW = auto()  # no step has applied them
    APPLIED = auto()  # a step has applied them and did not keep them
    ADDED_TO_APPLIED = auto()  # a backward came after that step, so plain DDP would have added to what is gone


class StepScheduler:
    """Decides when tables look up, send gradients and apply them; a step begins with a forward of ``root``."""

    def __init__(self, root: nn.Module, tables: Sequence[Table], channels: Channels, updates: TableUpdates) -> None:
        self.closed = False
        self.is_followed = False  # tables step with another optimizer
        self.local_tables: list[Tensor] | None = None  # whole tables, inside of tables.local()
        self.split_step = SplitStep(channels, updates)
        self.expected = ExpectedGradients(tables)
        self.lookups = Lookups(tables, channels, self.expected, self.split_step)
        self.zeroing = ZeroGradDetector(self.whole_model)
        self.requires_grad = RequiresGradSync(tables)
        self._root = root
        self._tables = tables
        self.channels = channels
        self._anchor = torch.zeros(0, device=tables[0].weight.device, requires_grad=True)
        # A backward may be inside of a forward, and activation checkpointing repeats the forward within a backward.
        self._in_forward = False  # with gradients
        self._in_backward = False  # that tables have noticed
        self._gradients = GradientState.NEW
        self.accumulates = False  # inside of tables.no_sync()
        self._synchronizes = True  # the last forward did not run under no_sync()
        self._is_opaque = False  # the last forward returned no tensor whose backward could be noticed
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._handles: list[Any] = [
            root.register_forward_pre_hook(NonCopyableHook(self._before_forward)),
            root.register_forward_hook(NonCopyableHook(self._after_forward), always_call=True),
            extend_zero_grad(root, lambda _: self.drop_gradients()),
        ]

    # -- 1. the model's forward begins

    def _before_forward(self, *_: Any) -> None:
        if self.local_tables is not None:
            return
        if not torch.is_grad_enabled():
            self.lookups.queue.drop_evaluation(self.lookups.ahead)
            return
        self.refuse_closed()
        self.requires_grad.refuse_ambiguous()
        ddp = ddp_in_forward()
        if ddp is not None and (self._ddp is None or self._ddp() is not ddp):
            self._ddp = weakref.ref(ddp)
            self._handles.append(extend_zero_grad(ddp, lambda _: self.drop_gradients()))
        self._synchronizes = not self.accumulates and (ddp is None or ddp.require_backward_grad_sync)
        self.drop_zeroed()
        self.split_step.end()
        if self.split_step.has_gradients and not self.is_followed:
            raise RuntimeError(
                "tables have gradients of an earlier backward that no step has applied: call tables.step() after "
                "optimizer.step(), or tables.follow(optimizer) once; to add up gradients of several backwards use "
                f"no_sync(), to drop them tables.zero_grad(){see('tables-miss-a-step')}"
            )
        self._in_forward, self._in_backward = True, False  # an exception may have ended a backward
        self._is_opaque = False
        self.lookups.begin_forward()

    def embed(self, table: Table, ids: Tensor) -> Tensor:
        self.refuse_closed()
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids for {table.name} must be int32 or int64, got {ids.dtype}")
        if self.local_tables is not None:
            if torch.is_grad_enabled() and self._root.training:
                raise RuntimeError(
                    "a training forward inside of tables.local(), where tables are copies: leave it before training "
                    f"on, and evaluate under torch.no_grad(){see('called-at-the-wrong-moment')}"
                )
            return nn.functional.embedding(ids, self.local_tables[table.index], table.padding_idx)
        values = as_ids(ids)
        found = self.lookups.find(table, values, self._in_forward)
        shape = *ids.shape, table.dim
        if found is None:  # all ranks raise when backward ends
            like = table.weight
            return torch.zeros(shape, dtype=like.dtype, device=like.device, requires_grad=torch.is_grad_enabled())
        lookup, positions = found
        is_trained, has_grad = table.weight.requires_grad, torch.is_grad_enabled()
        # A forward that is repeated in backward was counted before.
        counts = is_trained and (self._in_forward or has_grad) and not in_backward()
        self.expected.open_calls[table.index] += counts
        self.channels.tally.num_ids += len(values) if counts else 0
        if is_trained and has_grad:
            vectors = GatherVectors.apply(self._anchor, lookup, positions, self._receive_gradient)
        else:
            assert lookup.vectors is not None
            vectors = lookup.vectors.index_select(0, positions)
        return vectors.view(shape)

    # -- 2. the model's forward ends

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if not self._in_forward:
            return
        self._in_forward = False
        error = sys.exc_info()[1] if output is None else None
        if error is not None:
            for lanes in self.channels.lanes:
                lanes.annotate(error, "forward")
            return
        self.lookups.end_forward()
        results = [leaf for leaf in tensors_in(output) if leaf.grad_fn is not None]
        for result in results:
            result.register_hook(self._notice_output_gradient)
        self._is_opaque = not results

    # -- 3. a backward

    def _notice_output_gradient(self, *_: Any) -> None:
        """Begin a backward, unless it is ``autograd.grad()`` of inputs alone."""
        if not self._in_backward and backward_reaches_leaves():
            self._begin_backward()

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        self.drop_zeroed()
        # Another model's backward may pass through this one between its step and zero_grad, and means nothing here.
        if self._gradients is GradientState.APPLIED:
            self._gradients = GradientState.ADDED_TO_APPLIED
        self._in_backward = True
        self.expected.begin_backward(self._synchronizes)
        queue_engine_callback(self._end_backward)

    def _receive_gradient(self, lookup: Lookup, positions: Tensor, gradient: Tensor, is_first: bool) -> None:
        if lookup.closed:
            raise RuntimeError(
                f"a gradient of {lookup.table.name} belongs to a forward whose gradients have been sent, or left "
                f"behind by a step: run one backward per forward, or add the losses of several forwards up first"
                f"{see('late-gradients')}"
            )
        if self._is_opaque and not self._in_backward:
            raise RuntimeError(
                "the model's forward returned nothing in which tensors can be found, so a rank whose loss leaves "
                "tables out would not notice the backward: return tensors, or tuples, lists or dicts of them, or "
                f"register the class with torch.utils._pytree{see('late-gradients')}"
            )
        self._begin_backward()
        lookup.add_gradient(positions, gradient)
        if is_first:
            self.expected.open_calls[lookup.table.index] -= 1
        self._send_complete()

    def _end_backward(self) -> None:
        self._in_backward = False
        self.expected.backward_ended = True
        # After DDP has made its buckets the gradients, and hooks have put their guards there. Before that gradients are
        # not reduced, so ranks would see different ones.
        queue_after_hooks(self.zeroing.watch)
        self.lookups.wait_for_next_ids()
        self._refuse_desynchronized()
        if not self._synchronizes:
            self.lookups.look_ahead(flushes=True)  # no step comes before the next forward
            return
        self.expected.begin_backward()
        self._send_complete(force=True)

    def _send_complete(self, force: bool = False) -> None:
        ahead = self.lookups.ahead
        splits = self.channels.config.schedule == "2d"
        for lookups in self.expected.take_complete(force):
            exchange = GradientExchange(lookups[0].table, lookups, ahead, splits)
            self.split_step.send(exchange, ahead.ids_known if ahead is not None else None)

    # -- 4. the step

    def begin_step(self) -> None:
        self.refuse_closed()
        self._refuse_desynchronized()
        if self.local_tables is not None:
            raise RuntimeError(
                "a step inside of tables.local(), where tables are copies: leave it before training on"
                f"{see('called-at-the-wrong-moment')}"
            )
        if self.expected.has_gradients:
            raise RuntimeError(
                "step() after backwards under no_sync() only: their gradients have not been sent. Run the last "
                f"backward before a step without no_sync(){see('gradients-were-not-reduced')}"
            )
        had_gradients = self.split_step.has_gradients
        if had_gradients:
            self.expected.clear()  # else it is the step of another model, before this one's backward
        if had_gradients and self.zeroing.was_zeroed():
            raise RuntimeError(
                "the model's gradients were zeroed between backward and this step, and those of the tables were not: "
                "call tables.step() before optimizer.zero_grad(), or let the tables follow() the optimizer; to drop "
                f"gradients call tables.zero_grad(), too{see('tables-miss-a-step')}"
            )
        if had_gradients and self._gradients is GradientState.ADDED_TO_APPLIED:
            raise RuntimeError(
                "a backward after a step, without zero_grad() between them, would have added to gradients that the "
                "tables had applied and not kept: call optimizer.zero_grad() (with tables that follow it) or "
                f"tables.zero_grad() before it{see('tables-miss-a-step')}"
            )
        if not had_gradients and self._gradients is not GradientState.NEW:
            raise RuntimeError(
                "a second step with the same gradients, which the tables have applied and not kept: call zero_grad() "
                f"and run a backward before it{see('tables-miss-a-step')}"
            )
        self.split_step.begin(self.lookups.ahead)
        if had_gradients:
            self._gradients = GradientState.APPLIED
            self.lookups.look_ahead(flushes=not self._synchronizes)

    def end_step(self, urgent: Sequence[Work] = ()) -> None:
        """Send delayed rows behind the next batch's vectors and other urgent work."""
        ahead = self.lookups.ahead
        fetched = [ahead.fetched] if ahead is not None and ahead.fetched is not None else []
        self.split_step.end([*fetched, *urgent])

    def flush_together(self) -> None:
        """Apply delayed rows on all ranks, which meet before; completes an interrupted step; collective."""
        self.refuse_closed()
        self.channels.meet()
        self.split_step.end()
        self.split_step.flush()

    def drop_gradients(self) -> None:
        self.expected.drop_gradients()
        self.split_step.drop()
        self._gradients = GradientState.NEW

    def drop_zeroed(self) -> None:
        if self.zeroing.was_zeroed():
            self.drop_gradients()

    def whole_model(self) -> nn.Module:
        ddp = self._ddp() if self._ddp is not None else None
        return self._root if ddp is None else ddp

    def close(self) -> None:
        self.closed, self._in_forward = True, False
        for handle in self._handles:
            handle.remove()

    def refuse_closed(self) -> None:
        if self.closed:
            raise RuntimeError(
                f"the tables were closed: build the model again to train on{see('the-state-was-closed')}"
            )

    def _refuse_desynchronized(self) -> None:
        if self.lookups.sync_error is not None:
            raise RuntimeError(self.lookups.sync_error)
