"""When rows travel: what happens around forwards, backwards and steps, as functions that hooks call.

A step with prefetched batches, on every rank:

1. The root's forward begins. The vectors of this batch are on their way since the last step; each table's forward
   waits for them.
2. It ends. Ranks tell each other which rows they will look up next.
3. A table's gradient is complete. Its rows are coalesced and split (Algorithm 1); the prior ones leave at once.
4. The step. Prior rows are applied, and the next vectors looked up. What was delayed leaves, and is applied when the
   next step begins at the latest, before anybody looks it up.

Everything that a step has to send is submitted when it ends, so that waiting never communicates. Without prefetched
batches a table's forward looks up by itself, and all rows are prior.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from ddp_hooks.comm import Algorithm, Work, bruck_all_gather, see, torch_compat
from ddp_hooks.embedding.channels import Channels, CoordinatedChannels, Exchanger
from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.expected import ExpectedGradients
from ddp_hooks.embedding.freezing import Freezing
from ddp_hooks.embedding.gradients import GradientExchange
from ddp_hooks.embedding.ids import CHANGED, NO_COMPLAINT, BatchRows, Complaint, Ids, Purpose, as_ids, tell_ids
from ddp_hooks.embedding.module import GatheredVectors
from ddp_hooks.embedding.prefetch import Announcements
from ddp_hooks.embedding.step import TableStep
from ddp_hooks.embedding.table import Table
from ddp_hooks.embedding.updates import TableUpdates
from ddp_hooks.embedding.vectors import Lookup, look_up
from ddp_hooks.embedding.zeroing import ZeroingWitness
from ddp_hooks.intercept import extend_zero_grad


@dataclass
class Prepared:
    """A batch that ranks have told each other of, or are about to.

    Args:
        told: done when its rows are known.
        lookups: of its vectors, by table; None: not asked for yet.
        fetched: done when they are there.
    """

    batch: BatchRows
    told: Work
    lookups: dict[int, Lookup] | None = None
    fetched: Work | None = None


class TableFlow:
    """The inner half of ``EmbeddingTables``.

    Args:
        root: the model; its forwards are those of steps.
        tables: the tables.
        optimizer: of their weights.
        group: the ranks.
        config: the settings.
        coordinator: that moves everything, if there is one.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        tables: Sequence[Table],
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        config: TableConfig,
        coordinator: Exchanger | None = None,
    ) -> None:
        self.config = config
        self.optimizer = optimizer
        self.device = tables[0].weight.device
        self._root = root
        self._all = list(tables)
        if coordinator is None:
            self._channels = Channels(group, self.device, config)
        else:
            name, number = tables[0].name, len(tables)
            self._channels = CoordinatedChannels(group, self.device, config, coordinator, name, number)
        self._tally = self._channels.tally
        self._updates = TableUpdates(optimizer, [table.weight for table in tables])
        self._step = TableStep(self._channels, self._updates)
        self._anchor = torch.zeros(0, device=self.device, requires_grad=True)
        self._closed = False

        self._whole: list[Tensor] | None = None  # tables, inside of local()
        self.announcements = Announcements()
        self._forward = 0  # forwards of the root so far, those without gradients left out
        self._in_forward = False
        self._synchronises = True  # whether the last one did not run under no_sync()
        self._no_sync = False
        self._prefetched: Prepared | None = None  # the batch of the present forward
        self._ahead: Prepared | None = None  # the next one
        self._upcoming: BatchRows | None = None  # of which ranks are to be told at the end of the forward
        self._complaint = NO_COMPLAINT
        self._fault: str | None = None  # why ranks cannot go on; all of them raise it when backward ends

        self._expected = ExpectedGradients(self._all)
        self._in_backward = False
        self._is_followed = False
        self._is_blind = False  # whether the last forward has returned nothing that would show its backward
        self._was_applied = False  # whether a step has applied the gradients, and nobody has zeroed them since
        self._is_spoilt = False  # whether a backward has come since then
        self._witness = ZeroingWitness(self._whole_model)
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        self._freezing = Freezing(self._all)
        self._zeroing = [extend_zero_grad(root, lambda _: self._drop_gradients())]

    # -- 1. a forward begins ----------------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if self._whole is not None:
            return
        if not torch.is_grad_enabled():
            self.announcements.ignore_evaluation(self._ahead.batch if self._ahead is not None else None)
            return
        self._refuse_closed()
        self._freezing.refuse_doubt()
        self._meet(torch_compat.ddp_in_forward())
        self._synchronises = self._is_to_synchronise()
        self._forget_zeroed()
        self._step.end_interrupted()
        if self._step.has_gradients and not self._is_followed:
            raise RuntimeError(
                "tables have gradients of an earlier backward that no step has applied: call tables.step() after "
                "optimizer.step(), or tables.follow(optimizer) once; to add up gradients of several backwards use "
                f"no_sync(), to drop them tables.zero_grad(){see('tables-miss-a-step')}"
            )
        self._forward += 1
        self._in_forward, self._in_backward, self._is_blind = True, False, False
        self._expected.begin_forward()
        self._prefetched = None
        announced = self.announcements.take()
        if announced is None or self.config.schedule == "none":
            return
        self._upcoming = announced.upcoming
        ahead, self._ahead = self._ahead, None
        known = ahead is not None and ahead.batch is announced.current and self._is_known(ahead)
        prepared = ahead if known and ahead is not None else self._tell(announced.current, Purpose.NOW)
        if prepared.lookups is None:  # no step has looked them up
            self.flush()
            self._fetch(prepared)
        assert prepared.lookups is not None
        for lookup in prepared.lookups.values():
            self._expected.expect(lookup)
        self._prefetched = prepared

    def _is_known(self, ahead: Prepared) -> bool:
        """Whether every rank has such a batch, and nothing is wrong with it."""
        ahead.told.wait()
        if ahead.batch.problem is not None:
            raise ValueError(ahead.batch.problem)
        return ahead.batch.by_rank is not None

    def _is_to_synchronise(self) -> bool:
        ddp = torch_compat.ddp_in_forward()
        return not self._no_sync and (ddp is None or ddp.require_backward_grad_sync)

    def _tell(self, batch: BatchRows, purpose: Purpose) -> Prepared:
        channels = self._channels
        algorithm = tell_ids(
            batch, purpose, self._forward, self._complaint, self._all, channels.rank, channels.ranks
        )
        return Prepared(batch, channels.run("id", algorithm, "ids of a batch"))

    def _fetch(self, prepared: Prepared) -> None:
        """Ask for the vectors of a batch."""
        wanted = prepared.batch.wanted or {}
        lookups = [Lookup(table, wanted[table.index]) for table in self._all if table.index in wanted]
        prepared.lookups = {lookup.table.index: lookup for lookup in lookups}
        algorithm = look_up(lookups, prepared.batch, self._channels.rank, self._channels.world_size)
        prepared.fetched = self._channels.run("lookup", algorithm, "vectors of a batch", [prepared.told])

    # -- a table's forward ------------------------------------------------------------------------------------------

    def embed(self, index: int, ids: Tensor) -> Tensor:
        """The vectors of ``ids``; what a table's module returns."""
        self._refuse_closed()
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids for {self._all[index].name} must be int32 or int64, got {ids.dtype}")
        if self._whole is not None:
            return self._embed_locally(index, ids)
        values = as_ids(ids)
        found = self._find(index, values)
        shape = *ids.shape, self._all[index].dim
        if found is None:  # all ranks raise when backward ends
            weight = self._all[index].weight
            return torch.zeros(shape, dtype=weight.dtype, device=weight.device, requires_grad=torch.is_grad_enabled())
        lookup, positions = found
        is_trained = self._all[index].weight.requires_grad
        trains = is_trained and (self._in_forward or torch.is_grad_enabled())
        if trains and not torch_compat.in_backward():  # else a forward is repeated there, whose call has been counted
            self._expected.count_call(index)
            self._tally.num_ids += len(values)
        self._expected.note_first_call(index)
        if is_trained and torch.is_grad_enabled():
            vectors = GatheredVectors.apply(self._anchor, lookup, positions, self)
        else:
            assert lookup.vectors is not None
            vectors = lookup.vectors.index_select(0, positions)
        return vectors.view(shape)

    def _embed_locally(self, index: int, ids: Tensor) -> Tensor:
        assert self._whole is not None
        if torch.is_grad_enabled() and self._root.training:
            raise RuntimeError(
                "a training forward inside of tables.local(), where tables are copies: leave it before training on, "
                f"and evaluate under torch.no_grad(){see('called-at-the-wrong-moment')}"
            )
        return torch.nn.functional.embedding(ids, self._whole[index], self._all[index].padding_idx)

    def _find(self, index: int, values: Ids) -> tuple[Lookup, Tensor] | None:
        if torch_compat.in_backward():
            return self._find_again(index, values)
        prefetched = self._prefetched if self._in_forward else None
        if prefetched is not None and prefetched.lookups is not None and index in prefetched.lookups:
            return self._find_prefetched(index, values, prefetched)
        return self._look_up_now(index, values)

    def _find_again(self, index: int, values: Ids) -> tuple[Lookup, Tensor] | None:
        """A forward is repeated, for activation checkpointing: no rank may look up anew."""
        if self._fault is not None or self._complaint is not NO_COMPLAINT:  # it has found nothing before either
            return None
        for lookup in self._expected.latest_first(index):
            positions = lookup.positions_of(values) if lookup.vectors is not None else 0
            if isinstance(positions, Tensor):
                return lookup, positions
        raise RuntimeError(
            f"a forward was repeated during backward and asks {self._all[index].name} for ids whose vectors are not "
            f"here: activation checkpointing needs the same ids again, and no more than two forwards before their "
            f"backward{see('late-gradients')}"
        )

    def _find_prefetched(self, index: int, values: Ids, prefetched: Prepared) -> tuple[Lookup, Tensor] | None:
        assert prefetched.lookups is not None and prefetched.fetched is not None
        self._channels.wait(prefetched.fetched, self._tally.lookups)
        if not self._may_go_on(prefetched.batch):
            return None
        lookup = prefetched.lookups[index]
        positions = lookup.positions_of(values)
        if isinstance(positions, int):
            self._complaint = Complaint(CHANGED, index, positions)
            return None
        return lookup, positions

    def _look_up_now(self, index: int, values: Ids) -> tuple[Lookup, Tensor] | None:
        if self._fault is not None:
            return None
        self._step.end_interrupted()
        self.flush()
        batch = BatchRows.of({index: values}, self._all, self.config.deduplicate)
        prepared = self._tell(batch, Purpose.ONE_TABLE)
        self._fetch(prepared)
        assert prepared.lookups is not None and prepared.fetched is not None
        self._channels.wait(prepared.fetched, self._tally.lookups)
        if not self._may_go_on(batch):
            return None
        lookup = prepared.lookups[index]
        if self._in_forward or torch.is_grad_enabled():
            self._expected.expect(lookup)
        positions = lookup.positions_of(values)
        assert isinstance(positions, Tensor)
        return lookup, positions

    def _may_go_on(self, batch: BatchRows) -> bool:
        """False if ranks have parted, and some will hear of it at the end of their backward only; then all raise."""
        if batch.problem is not None:
            raise ValueError(batch.problem)
        if batch.fault is not None:
            if not (batch.parted and torch.is_grad_enabled()):
                raise RuntimeError(batch.fault)
            self._fault = batch.fault
            return False
        return True

    # -- 2. a forward ends ------------------------------------------------------------------------------------------

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        if not self._in_forward:
            return
        self._in_forward = False
        error = sys.exc_info()[1] if output is None else None
        if error is not None:
            self._channels.annotate(error)
            return
        if self._prefetched is not None and self._fault is None:
            upcoming, self._upcoming = self._upcoming, None
            self._ahead = self._tell(upcoming or BatchRows(None), Purpose.AHEAD)
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        for result in results:
            result.register_hook(self._notice_result)
        self._is_blind = not results

    # -- 3. a backward ----------------------------------------------------------------------------------------------

    def _notice_result(self, *_: Any) -> None:
        """A gradient has come to what the model returned: of a backward, or of ``autograd.grad()`` alone."""
        if not self._in_backward and torch_compat.backward_reaches_leaves():
            self._notice_backward()

    def _notice_backward(self) -> None:
        if self._in_backward:
            return
        self._forget_zeroed()
        # That of another model may come through this one, between its step and its zero_grad(), and mean nothing here.
        self._is_spoilt = self._is_spoilt or self._was_applied
        self._in_backward = True
        self._expected.queue(self._synchronises)
        torch_compat.queue_engine_callback(self._end_backward)

    def receive_gradient(self, lookup: Lookup, positions: Tensor, gradient: Tensor, is_first: bool) -> None:
        """A call's backward has come, for the first time or, through a graph that was kept, again."""
        if lookup.closed:
            raise RuntimeError(
                f"a gradient of {lookup.table.name} belongs to a forward whose gradients have been sent, or left "
                f"behind by a step: run one backward per forward, or add the losses of several forwards up first"
                f"{see('late-gradients')}"
            )
        if self._is_blind and not self._in_backward:
            raise RuntimeError(
                "the model's forward returned nothing in which tensors can be found, so a rank whose loss leaves "
                "tables out would not notice the backward: return tensors, or tuples, lists or dicts of them, or "
                f"register the class with torch.utils._pytree{see('late-gradients')}"
            )
        self._notice_backward()
        lookup.add_gradient(positions, gradient)
        if is_first:
            self._expected.count_backward(lookup.table.index)
        self._send_complete()

    def _end_backward(self) -> None:
        self._in_backward = False
        self._expected.end_backward()
        # When DDP has made its buckets the gradients, and hooks have put their guards there. What is there before is
        # not reduced, so ranks would see different things.
        torch_compat.queue_after_hooks(self._witness.watch)
        if self._ahead is not None:
            self._channels.wait(self._ahead.told, self._tally.gradients)
            self._fault = self._fault or self._ahead.batch.fault
        self._refuse_parted()
        if not self._synchronises:
            self._look_ahead()  # no step comes before the next forward
            return
        if not self._expected.order:
            self._expected.order = self._agreed_order()
        self._expected.queue()
        self._send_complete(force=True)

    def _agreed_order(self) -> list[int]:
        """The first rank's."""
        mine = torch.tensor(self._expected.own_order())
        gathered: list[Tensor] = []

        def algorithm() -> Algorithm:
            everyone = range(self._channels.world_size)
            gathered.extend(
                (yield from bruck_all_gather(mine, [len(mine)] * len(everyone), everyone, self._channels.rank))
            )

        self._channels.wait(self._channels.run("order", algorithm(), "the order of tables"), self._tally.gradients)
        order: list[int] = gathered[0].tolist()
        return order

    def _send_complete(self, force: bool = False) -> None:
        """Send gradients, in the agreed order, as far as they are complete."""
        ahead = self._ahead
        for lookups in self._expected.take_complete(force):
            exchange = GradientExchange(
                lookups[0].table,
                lookups,
                ahead.batch if ahead is not None else None,
                self.config.schedule == "2d",
                self._channels.rank,
                self._channels.world_size,
            )
            self._step.send(exchange, ahead.told if ahead is not None else None)

    # -- 4. the step ------------------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Apply prior rows, and look up the next batch."""
        self._refuse_closed()
        self._refuse_parted()
        if self._whole is not None:
            raise RuntimeError(
                "a step inside of tables.local(), where tables are copies: leave it before training on"
                f"{see('called-at-the-wrong-moment')}"
            )
        if self._expected.has_gradients:
            raise RuntimeError(
                "step() after backwards under no_sync() only: their gradients have not been sent. Run the last "
                f"backward before a step without no_sync(){see('gradients-were-not-reduced')}"
            )
        had_gradients = self._step.has_gradients
        if had_gradients:
            self._expected.clear()  # else it is the step of another model, before this one's backward
        if had_gradients and self._witness.saw_zeroing():
            raise RuntimeError(
                "the model's gradients were zeroed between backward and this step, and those of the tables were not: "
                "call tables.step() before optimizer.zero_grad(), or let the tables follow() the optimizer; to drop "
                f"gradients call tables.zero_grad(), too{see('tables-miss-a-step')}"
            )
        if self._is_spoilt and had_gradients:
            raise RuntimeError(
                "a backward after a step, without zero_grad() between them, would have added to gradients that the "
                "tables had applied and not kept: call optimizer.zero_grad() (with tables that follow it) or "
                f"tables.zero_grad() before it{see('tables-miss-a-step')}"
            )
        if self._was_applied and not had_gradients:
            raise RuntimeError(
                "a second step with the same gradients, which the tables have applied and not kept: call zero_grad() "
                f"and run a backward before it{see('tables-miss-a-step')}"
            )
        self._step.begin(self._ahead.batch if self._ahead is not None else None)
        if had_gradients:
            self._was_applied = True
            self._look_ahead()

    def _end_step(self, after: Sequence[Work] = ()) -> None:
        """Send what was delayed, when more urgent work has passed."""
        fetched = [self._ahead.fetched] if self._ahead is not None and self._ahead.fetched is not None else []
        self._step.end([*fetched, *after])

    def flush(self) -> None:
        """Wait for delayed rows, and apply them. Communicates nothing itself: one rank alone may call it.

        Raises:
            RuntimeError: a step was interrupted, so that delayed rows have not been sent.
        """
        self._step.flush()

    def _flush_together(self) -> None:
        """Likewise, on all ranks, which meet before: it sends what an interrupted step has not sent."""
        self._refuse_closed()
        self._channels.meet()
        self._step.end_interrupted()
        self.flush()

    def _look_ahead(self) -> None:
        """Ask for the vectors of the next batch; those that were asked for before may be of old weights."""
        if self._ahead is None:
            return
        self._channels.wait(self._ahead.told, self._tally.gradients)
        if self._ahead.batch.by_rank is not None:
            if not self._synchronises:
                self.flush()  # nobody knew of this batch when rows were delayed
            self._fetch(self._ahead)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _drop_gradients(self) -> None:
        """Forget what backwards have left since the last step."""
        self._expected.drop_gradients()
        self._step.drop()
        self._was_applied = self._is_spoilt = False

    def _forget_zeroed(self) -> None:
        if self._witness.saw_zeroing():
            self._drop_gradients()

    def _meet(self, ddp: DistributedDataParallel | None) -> None:
        """The model runs inside of this module, whose ``zero_grad`` counts, too."""
        if ddp is not None and (self._ddp is None or self._ddp() is not ddp):
            self._ddp = weakref.ref(ddp)
            self._zeroing.append(extend_zero_grad(ddp, lambda _: self._drop_gradients()))

    def _whole_model(self) -> torch.nn.Module:
        """The outermost module known of, whose parameters are trained beside the tables."""
        ddp = self._ddp() if self._ddp is not None else None
        return self._root if ddp is None else ddp

    def _refuse_parted(self) -> None:
        if self._fault is not None:
            raise RuntimeError(self._fault)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError(
                f"the tables were closed: build the model again to train on{see('the-state-was-closed')}"
            )
