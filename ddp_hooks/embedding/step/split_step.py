"""From gradients to updates: one optimizer step, applied in two parts.

Prior rows are applied in the step. Delayed rows are sent when the step ends, so that waiting for them never
communicates. They are applied before anybody looks them up, when the next step begins at the latest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ddp_hooks.comm import Work, see
from ddp_hooks.embedding.exchange.channels import Channels
from ddp_hooks.embedding.exchange.gradients import GradientExchange, RowSum, send_delayed, sum_of_rows
from ddp_hooks.embedding.exchange.ids import BatchRows
from ddp_hooks.embedding.stats import ClippedOf, TableStats
from ddp_hooks.embedding.step.updates import TableUpdates

Sums: TypeAlias = dict[int, RowSum]  # by table


@dataclass
class _Sent:
    """Gradient on its way."""

    exchange: GradientExchange
    prior: Work
    factor: float = 1.0  # the gradient is multiplied by it when it is applied

    @property
    def table(self) -> int:
        return self.exchange.table.index

    def scaled(self, part: RowSum | None) -> RowSum:
        """Return a part that has arrived, multiplied."""
        assert part is not None
        return part if self.factor == 1.0 else part._replace(values=part.values * self.factor)


class SplitStep:
    """Gradients since the last step, and delayed rows of that step."""

    def __init__(self, channels: Channels, updates: TableUpdates) -> None:
        self.stats = TableStats()  # of the last step
        self.clip: ClippedOf = "none"  # gradients in the norm of this step
        self.is_unscaled = False  # a gradient scaler has unscaled this step's gradients
        self._channels = channels
        self._tally = channels.tally
        self._updates = updates
        self._sent: list[_Sent] = []  # by backwards since the last step
        self._sums: Sums = {}  # complete gradients, taken out of _sent
        self._delayed: list[_Sent] = []  # of the last step, which has left some of their rows for later
        self._delayed_work: Work | None = None  # None until the step ends

    @property
    def has_gradients(self) -> bool:
        """True if a backward has sent gradients that no step has applied."""
        return bool(self._sent or self._sums)

    @property
    def is_interrupted(self) -> bool:
        """True if a step has begun and has not ended: its delayed rows are still to be sent."""
        return bool(self._delayed) and self._delayed_work is None

    # -- gradients

    def send(self, exchange: GradientExchange, ids_known: Work | None) -> None:
        """Send the prior rows of a gradient that is complete on this rank, when the next batch's ids are known."""
        after = [ids_known] if ids_known is not None else []
        work = self._channels.run("prior", exchange.send_prior(), f"prior rows of {exchange.table.name}", after)
        self._sent.append(_Sent(exchange, work))

    def drop(self) -> None:
        self._sent, self._sums, self.clip, self.is_unscaled = [], {}, "none", False

    def multiply(self, factor: float) -> None:
        """Multiply the gradients that were sent so far; takes effect when they are applied."""
        for sent in self._sent:
            sent.factor *= factor
        self._sums = {index: part._replace(values=part.values * factor) for index, part in self._sums.items()}

    def found_nonfinite(self) -> bool:
        """Return True if some of this rank's gradients are not finite, before or after the sum over ranks."""
        self._wait_for_prior()
        finite = all(sent.exchange.finite for sent in self._sent)
        return not (finite and all(bool(torch.isfinite(part.values).all()) for part in self._sums.values()))

    def complete(self) -> Sums:
        """Return this rank's columns of all gradient rows, by table, to read or scale; collective.

        No row of these gradients is delayed afterwards.
        """
        self._wait_for_prior()
        exchanges = [sent.exchange for sent in self._sent]
        left = [exchange for exchange in exchanges if not exchange.is_complete]
        if left:
            self._channels.wait(self._send_delayed(left, ()), self._tally.gradients)
        parts: dict[int, list[RowSum]] = defaultdict(list)
        for index, part in self._sums.items():
            parts[index].append(part)
        for sent in self._sent:
            if sent.exchange.called:
                parts[sent.table] += sent.scaled(sent.exchange.prior), sent.scaled(sent.exchange.delayed)
        self._count_rows()
        self._sums = {index: sum_of_rows(several) for index, several in parts.items()}
        self._sent = []
        return self._sums

    # -- the step

    def begin(self, upcoming: BatchRows | None) -> None:
        """Apply the last step's delayed rows, and this step's prior rows; ``upcoming`` is the next batch if known."""
        self.end()
        self.flush()
        if not self.has_gradients:
            return
        self._updates.begin()
        if self._must_be_complete(upcoming):
            parts = self.complete()
        else:
            self._wait_for_prior()
            parts = {sent.table: sent.scaled(sent.exchange.prior) for sent in self._sent if sent.exchange.called}
            self._delayed = [sent for sent in self._sent if not sent.exchange.is_complete]
            self._count_rows()
        with self._tally.updates.measure(self._channels.recorder, "updates of tables"):
            self._updates.apply(parts)
        self.stats = self._tally.next_stats(self.stats, self.clip)
        self.drop()

    def end(self, after: Sequence[Work] = ()) -> None:
        """Send delayed rows after more urgent work, unless they were sent; on all ranks.

        Also completes a step that an exception has ended.
        """
        if self.is_interrupted:
            self._delayed_work = self._send_delayed([sent.exchange for sent in self._delayed], after)

    def flush(self) -> None:
        """Wait for delayed rows, and apply them; does not communicate.

        Raises:
            RuntimeError: a step was interrupted before it sent them.
            LaneError, LaneTimeout: they did not arrive.
        """
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
            self._updates.apply({one.table: one.scaled(one.exchange.delayed) for one in sent})

    def _must_be_complete(self, upcoming: BatchRows | None) -> bool:
        # No row may be delayed if gradients were read, come from several backwards, or were split for another batch.
        tables = [sent.table for sent in self._sent]
        several = bool(self._sums) or len(set(tables)) < len(tables)
        return several or any(sent.exchange.upcoming is not upcoming for sent in self._sent)

    def _wait_for_prior(self) -> None:
        for sent in self._sent:
            self._channels.wait(sent.prior, self._tally.gradients)

    def _count_rows(self) -> None:
        self._tally.num_prior_rows += sum(sent.exchange.num_prior for sent in self._sent)
        self._tally.num_delayed_rows += sum(sent.exchange.num_delayed for sent in self._sent)

    def _send_delayed(self, exchanges: Sequence[GradientExchange], after: Sequence[Work]) -> Work:
        names = ", ".join(dict.fromkeys(exchange.table.name for exchange in exchanges))
        return self._channels.run("delayed", send_delayed(exchanges), f"delayed rows of {names}", after)
