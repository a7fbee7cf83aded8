"""From gradients to updates: what backwards have sent, and how a step applies it in two parts.

Prior rows are applied at the step. Delayed ones are sent when it ends, so that waiting for them never communicates, and
applied when the next one begins at the latest, before anybody looks them up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from ddp_hooks.comm import Work, see
from ddp_hooks.embedding.channels import Channels
from ddp_hooks.embedding.gradients import GradientExchange, RowSum, merged, send_delayed
from ddp_hooks.embedding.ids import BatchRows
from ddp_hooks.embedding.stats import ClippedOf, TableStats
from ddp_hooks.embedding.updates import TableUpdates

Sums: TypeAlias = dict[int, RowSum]  # by table
Value = TypeVar("Value")


@dataclass
class _Sent:
    """A gradient that is on its way, and what it is to be multiplied by."""

    exchange: GradientExchange
    prior: Work
    factor: float = 1.0

    def scaled(self, part: RowSum | None) -> RowSum:
        """A part of it that is there, multiplied."""
        there = _there(part)
        return there if self.factor == 1.0 else there._replace(values=there.values * self.factor)


@dataclass
class _Late:
    """Rows that a step has left for later."""

    sent: list[_Sent]
    work: Work | None = None  # from the end of the step on


class TableStep:
    """Gradients since the last step, and updates that are not complete yet.

    Args:
        channels: carry rows.
        updates: applies them.

    Attributes:
        stats: of the last step.
        clip: what the norm of this step's gradients was taken of.
        is_unscaled: whether a gradient scaler has seen this step's gradients.
    """

    def __init__(self, channels: Channels, updates: TableUpdates) -> None:
        self.stats = TableStats()
        self.clip: ClippedOf = "none"
        self.is_unscaled = False
        self._channels = channels
        self._tally = channels.tally
        self._updates = updates
        self._sent: list[_Sent] = []  # by backwards since the last step
        self._sums: Sums = {}  # complete ones, taken out of those
        self._late: _Late | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether a backward has sent any that no step has applied."""
        return bool(self._sent or self._sums)

    @property
    def is_interrupted(self) -> bool:
        """Whether a step has begun and has not ended: it still has to send what it delays."""
        return self._late is not None and self._late.work is None

    # -- gradients --------------------------------------------------------------------------------------------------

    def send(self, exchange: GradientExchange, told: Work | None) -> None:
        """Send the prior rows of a gradient that is complete on this rank.

        Args:
            exchange: the gradient.
            told: done when the next batch's rows are known, which decide what is prior.
        """
        after = [told] if told is not None else []
        work = self._channels.run("prior", exchange.send_prior(), f"prior rows of {exchange.table.name}", after)
        self._sent.append(_Sent(exchange, work))

    def drop(self) -> None:
        """Forget the gradients."""
        self._sent, self._sums, self.clip, self.is_unscaled = [], {}, "none", False

    def multiply(self, factor: float) -> None:
        """Multiply the gradients that are here by now, when they are applied."""
        for one in self._sent:
            one.factor *= factor
        self._sums = {index: part._replace(values=part.values * factor) for index, part in self._sums.items()}

    def found_nonfinite(self) -> bool:
        """Whether some of this rank's gradients are not finite, before or after summing up."""
        self._wait_for_prior()
        finite = all(one.exchange.finite for one in self._sent)
        return not (finite and all(bool(torch.isfinite(part.values).all()) for part in self._sums.values()))

    def complete(self) -> Sums:
        """All rows of all gradients, by table: this rank's columns, to be read or scaled; collective.

        Nothing of them is delayed then.
        """
        self._wait_for_prior()
        exchanges = [one.exchange for one in self._sent]
        left = [exchange for exchange in exchanges if not exchange.is_complete]
        if left:
            self._channels.wait(self._send_delayed(left, ()), self._tally.gradients)
        parts: dict[int, list[RowSum]] = defaultdict(list)
        for index, part in self._sums.items():
            parts[index].append(part)
        for one in self._sent:
            if one.exchange.called:
                both = one.scaled(one.exchange.prior), one.scaled(one.exchange.delayed)
                parts[one.exchange.table.index] += both
        self._tally.add_rows(exchanges)
        self._sums = {index: merged(several) for index, several in parts.items()}
        self._sent = []
        return self._sums

    # -- the step ---------------------------------------------------------------------------------------------------

    def begin(self, upcoming: BatchRows | None) -> None:
        """Apply everything of the last step, and of this one what cannot wait.

        Args:
            upcoming: the next batch, as far as one is known.
        """
        self.end_interrupted()
        self.flush()
        if not self.has_gradients:
            return
        self._updates.begin()
        if self._must_be_whole(upcoming):
            parts = self.complete()
        else:
            self._wait_for_prior()
            called = [one for one in self._sent if one.exchange.called]
            parts = {one.exchange.table.index: one.scaled(one.exchange.prior) for one in called}
            delayed = [one for one in self._sent if not one.exchange.is_complete]
            self._late = _Late(delayed) if delayed else None
            self._tally.add_rows([one.exchange for one in self._sent])
        with self._tally.updates.measure(self._channels.recorder, "updates of tables"):
            self._updates.apply(parts)
        self.stats = self._tally.next_stats(self.stats, self.clip)
        self.drop()

    def end(self, after: Sequence[Work]) -> None:
        """Send what is delayed.

        Args:
            after: more urgent work, to let pass.
        """
        if self._late is not None and self._late.work is None:
            self._late.work = self._send_delayed([one.exchange for one in self._late.sent], after)

    def end_interrupted(self) -> None:
        """Send what is delayed of a step that an exception has ended; on all ranks."""
        self.end(())

    def flush(self) -> None:
        """Wait for what was delayed, and apply it. Communicates nothing itself.

        Raises:
            RuntimeError: the step has not come to sending it.
        """
        if self._late is None:
            return
        if self._late.work is None:
            raise RuntimeError(
                "a step of the tables was interrupted by an exception before it had sent its delayed rows, so a part "
                "of them is not updated: go on with the next forward of training, or call tables.full_state_dict() "
                f"on all ranks, either of which completes it{see('tables-miss-a-step')}"
            )
        late, self._late = self._late, None
        self._channels.wait(_there(late.work), self._tally.gradients)
        # A forward under inference_mode() may come here, whose tensors optimizers could not keep.
        with torch.inference_mode(False), self._tally.updates.measure(self._channels.recorder, "delayed updates"):
            parts = {one.exchange.table.index: one.scaled(one.exchange.delayed) for one in late.sent}
            self._updates.apply(parts)

    # -- parts ------------------------------------------------------------------------------------------------------

    def _must_be_whole(self, upcoming: BatchRows | None) -> bool:
        """Whether nothing may be delayed: gradients were looked at, come from several backwards, or were split for a
        batch that is not the next one any more."""
        tables = [one.exchange.table.index for one in self._sent]
        several = bool(self._sums) or len(set(tables)) < len(tables)
        return several or any(one.exchange.upcoming is not upcoming for one in self._sent)

    def _wait_for_prior(self) -> None:
        for one in self._sent:
            self._channels.wait(one.prior, self._tally.gradients)

    def _send_delayed(self, exchanges: Sequence[GradientExchange], after: Sequence[Work]) -> Work:
        names = ", ".join(dict.fromkeys(exchange.table.name for exchange in exchanges))
        return self._channels.run("delayed", send_delayed(exchanges), f"delayed rows of {names}", after)


def _there(value: Value | None) -> Value:
    assert value is not None
    return value
