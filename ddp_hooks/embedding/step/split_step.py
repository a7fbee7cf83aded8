"""From gradients to updates: one step of the tables' optimizer, applied in two parts.

Prior rows are applied in the step. Delayed rows are sent when it ends, and applied before anybody looks them up, with
the same learning rate and as the same step. (The paper counts a step with the delayed part only, section 5.7; the first
prior update would then divide by 1 - beta ** 0.) Splitting is exact for optimizers that update a row from its gradient
and its state alone, and leave rows without a gradient as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import Work, see
from ddp_hooks.embedding.exchange.channels import Channels
from ddp_hooks.embedding.exchange.gradients import GradientExchange, RowSum, send_delayed, sum_of_rows
from ddp_hooks.embedding.exchange.lookup import BatchRows
from ddp_hooks.embedding.rowwise import RowwiseAdamW
from ddp_hooks.embedding.stats import TableStats
from ddp_hooks.overlap import DeferredUpdates, copied

ROWWISE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam, RowwiseAdamW)


def problem_of_optimizer(optimizer_class: Any, options: Mapping[str, Any]) -> str | None:
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    if optimizer_class not in ROWWISE:
        return (
            f"{name} is not known to update rows one by one and to leave the others alone: give tables an "
            f"optimizer_class of {', '.join(kind.__name__ for kind in ROWWISE)} (SparseAdam for Adam, RowwiseAdamW for "
            f"AdamW)"
        )
    for option in ("momentum", "dampening", "nesterov") if optimizer_class is torch.optim.SGD else ():
        if options.get(option):
            return (
                f"SGD's {option} moves rows that have no gradient, so updates cannot be split by rows: leave it out, "
                f"or use SparseAdam"
            )
    if optimizer_class is not RowwiseAdamW and options.get("weight_decay"):
        return f"weight_decay of {name} does not work with gradients of a few rows: leave it out, or use RowwiseAdamW"
    return None


class TableUpdates:
    """Applies steps of ``optimizer`` to ``weights``, the tables' columns in the order of the tables."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Sequence[torch.nn.Parameter]) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._parts: dict[int, RowSum] = {}
        self._counts: dict[int, Any] = {}  # by table: steps before the present one
        self.deferred = DeferredUpdates(optimizer, weights, self._gradient_of)

    def begin(self) -> None:
        for group in self._optimizer.param_groups:
            if (problem := problem_of_optimizer(type(self._optimizer), group)) is not None:
                raise ValueError(f"the tables' optimizer was changed: {problem} (OneCycleLR: cycle_momentum=False)")
        self.deferred.note_settings()
        self._counts = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def apply(self, parts: Mapping[int, RowSum]) -> None:
        """Update rows, by table; all calls until the next :meth:`begin` are one step, and update different rows."""
        if not parts:
            return
        states = {index: self._optimizer.state[self._weights[index]] for index in parts}
        for index, state in states.items():
            if index in self._counts:
                state["step"] = copied(self._counts[index])
        before = {index: copied(state.get("step", 0)) for index, state in states.items()}
        self._parts = dict(parts)
        self.deferred.run(list(parts))
        self._parts = {}
        # An optimizer may not count steps, or begin to in its first one.
        self._counts.update({index: before[index] for index, state in states.items() if "step" in state})

    def begin_making_state(self) -> None:
        """Replace the dense zeros of a step with which torch makes the optimizer's state by gradients of no rows."""
        for weight in self._weights:
            if weight.grad is not None:
                weight.grad = _sparse(weight.new_empty(0, dtype=torch.long), weight.detach()[:0], weight.shape)

    def end_making_state(self) -> None:
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"] * 0

    def _gradient_of(self, index: int) -> Tensor:
        rows, values = self._parts[index]
        shape = self._weights[index].shape
        if not shape[1]:  # torch reads past the end of rows without columns; the step counts nevertheless
            rows, values = rows[:0], values[:0]
        return _sparse(rows, values, shape)


@dataclass
class _Sent:
    exchange: GradientExchange
    prior: Work
    factor: float = 1.0  # the gradient is multiplied by it when it is applied

    def scaled(self, part: RowSum | None) -> RowSum:
        assert part is not None
        return part if self.factor == 1.0 else part._replace(values=part.values * self.factor)


class SplitStep:
    """Gradients since the last step, and delayed rows of that step."""

    def __init__(self, channels: Channels, updates: TableUpdates) -> None:
        self.stats = TableStats()  # of the last step
        self.is_unscaled = False  # a gradient scaler has unscaled this step's gradients
        self._channels = channels
        self._tally = channels.tally
        self.updates = updates
        self._sent: list[_Sent] = []  # by backwards since the last step
        self._sums: dict[int, RowSum] = {}  # by table: complete gradients, taken out of _sent
        self._delayed: list[_Sent] = []  # of the last step, which has left some of their rows for later
        self._delayed_work: Work | None = None  # None until the step ends

    @property
    def has_gradients(self) -> bool:
        return bool(self._sent or self._sums)

    @property
    def is_interrupted(self) -> bool:
        """True if a step has begun and has not ended: its delayed rows are still to be sent."""
        return bool(self._delayed) and self._delayed_work is None

    def send(self, exchange: GradientExchange, ids_known: Work | None) -> None:
        """Send the prior rows of a gradient that is complete on this rank, when the next batch's ids are known."""
        after = [ids_known] if ids_known is not None else []
        work = self._channels.run("prior", exchange.send_prior(), f"prior rows of {exchange.table.name}", after)
        self._sent.append(_Sent(exchange, work))

    def drop(self) -> None:
        self._sent, self._sums, self.is_unscaled = [], {}, False

    def multiply(self, factor: float) -> None:
        for sent in self._sent:
            sent.factor *= factor
        self._sums = {index: part._replace(values=part.values * factor) for index, part in self._sums.items()}

    def found_nonfinite(self) -> bool:
        self._wait_for_prior()
        finite = all(sent.exchange.finite for sent in self._sent)
        return not (finite and all(bool(torch.isfinite(part.values).all()) for part in self._sums.values()))

    def complete(self) -> dict[int, RowSum]:
        """Return this rank's columns of all gradient rows, none of which is delayed any more; collective."""
        self._wait_for_prior()
        left = [sent.exchange for sent in self._sent if sent.exchange.delayed is None]
        if left:
            self._channels.wait(self._send_delayed(left, ()), self._tally.gradients)
        parts: dict[int, list[RowSum]] = defaultdict(list)
        for index, part in self._sums.items():
            parts[index].append(part)
        for sent in self._sent:
            if sent.exchange.called:
                parts[sent.exchange.table.index] += sent.scaled(sent.exchange.prior), sent.scaled(sent.exchange.delayed)
        self._count_rows()
        self._sums = {index: sum_of_rows(several) for index, several in parts.items()}
        self._sent = []
        return self._sums

    def begin(self, upcoming: BatchRows | None) -> None:
        """Apply the last step's delayed rows, and this step's prior rows; ``upcoming`` is the next batch if known."""
        self.end()
        self.flush()
        if not self.has_gradients:
            return
        self.updates.begin()
        # No row may be delayed if gradients were read, come from several backwards, or were split for another batch.
        tables = [sent.exchange.table.index for sent in self._sent]
        several = bool(self._sums) or len(set(tables)) < len(tables)
        if several or any(sent.exchange.upcoming is not upcoming for sent in self._sent):
            parts = self.complete()
        else:
            self._wait_for_prior()
            called = [sent for sent in self._sent if sent.exchange.called]
            parts = {sent.exchange.table.index: sent.scaled(sent.exchange.prior) for sent in called}
            self._delayed = [sent for sent in self._sent if sent.exchange.delayed is None]
            self._count_rows()
        with self._tally.updates.measure(self._channels.recorder, "updates of tables"):
            self.updates.apply(parts)
        self.stats = self._tally.next_stats(self.stats)
        self.drop()

    def end(self, after: Sequence[Work] = ()) -> None:
        """Send delayed rows after more urgent work, unless they were sent; completes an interrupted step."""
        if self.is_interrupted:
            self._delayed_work = self._send_delayed([sent.exchange for sent in self._delayed], after)

    def flush(self) -> None:
        """Wait for delayed rows, and apply them; does not communicate."""
        if self.is_interrupted:
            raise RuntimeError(
                "a step of the tables was interrupted by an exception before it had sent its delayed rows, so a part "
                "of them is not updated: go on with the next forward of training, or call tables.full_state_dict() "
                f"on all ranks, either of which completes it{see('tables-miss-a-step')}"
            )
        sent, work = self._delayed, self._delayed_work
        if work is None:
            return
        self._delayed, self._delayed_work = [], None
        self._channels.wait(work, self._tally.gradients)
        # A forward under inference_mode() may come here; optimizers cannot keep tensors that are made in it.
        with torch.inference_mode(False), self._tally.updates.measure(self._channels.recorder, "delayed updates"):
            self.updates.apply({one.exchange.table.index: one.scaled(one.exchange.delayed) for one in sent})

    def _wait_for_prior(self) -> None:
        for sent in self._sent:
            self._channels.wait(sent.prior, self._tally.gradients)

    def _count_rows(self) -> None:
        self._tally.num_prior_rows += sum(sent.exchange.num_prior for sent in self._sent)
        self._tally.num_delayed_rows += sum(sent.exchange.num_delayed for sent in self._sent)

    def _send_delayed(self, exchanges: Sequence[GradientExchange], after: Sequence[Work]) -> Work:
        names = ", ".join(dict.fromkeys(exchange.table.name for exchange in exchanges))
        return self._channels.run("delayed", send_delayed(exchanges), f"delayed rows of {names}", after)


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)
