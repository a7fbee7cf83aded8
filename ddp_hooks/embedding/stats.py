"""What the exchange of tables cost, for logs and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from ddp_hooks.comm import Algorithm, Send, Stall
from ddp_hooks.embedding.gradients import GradientExchange

ClippedOf: TypeAlias = Literal["all", "dense_only", "none"]
Kind: TypeAlias = Literal["id", "lookup", "prior", "delayed", "order", "columns"]
_IN_STATS: tuple[Kind, ...] = ("id", "lookup", "prior", "delayed")


@dataclass(frozen=True)
class TableStats:
    """One step, on this rank; all tables together.

    Args:
        step: its number, from 1; 0 before the first.
        num_ids: ids that forwards asked for (Table 3 of the paper: original).
        num_rows: of them, different rows (coalesced).
        num_prior_rows, num_delayed_rows: of these, those that some rank's next batch uses, and the others.
        id_bytes, lookup_bytes, prior_bytes, delayed_bytes: payload sent, by kind. Delayed rows of this step are sent
            after it and count in the next one.
        lookup_stall_s: seconds that forwards waited for vectors, and for ids where there was no prefetch.
        gradient_stall_s: seconds that the step waited for gradients.
        update_s: seconds for the updates of prior rows and of what was delayed.
        clip: what the norm of clipped gradients was taken of: ``"all"``, which waits for delayed rows,
            ``"dense_only"``, or ``"none"`` where nothing was clipped.
    """

    step: int = 0
    num_ids: int = 0
    num_rows: int = 0
    num_prior_rows: int = 0
    num_delayed_rows: int = 0
    id_bytes: int = 0
    lookup_bytes: int = 0
    prior_bytes: int = 0
    delayed_bytes: int = 0
    lookup_stall_s: float = 0.0
    gradient_stall_s: float = 0.0
    update_s: float = 0.0
    clip: ClippedOf = "none"

    @property
    def stall_s(self) -> float:
        """Seconds that training waited for tables."""
        return self.lookup_stall_s + self.gradient_stall_s


@dataclass
class Tally:
    """Running totals, from which the statistics of a step are differences."""

    sent: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(get_args(Kind), 0))
    lookups: Stall = field(default_factory=Stall)
    gradients: Stall = field(default_factory=Stall)
    updates: Stall = field(default_factory=Stall)
    num_ids: int = 0
    num_prior_rows: int = 0
    num_delayed_rows: int = 0
    _before: dict[str, float] = field(default_factory=dict)

    def counted(self, kind: Kind, algorithm: Algorithm) -> Algorithm:
        """The same algorithm, whose bytes count."""
        for messages in algorithm:
            self.sent[kind] += sum(m.tensor.nbytes for m in messages if isinstance(m, Send))
            yield messages

    def add_rows(self, exchanges: Sequence[GradientExchange]) -> None:
        """Rows of this rank's gradients that have been sent, or are about to be."""
        self.num_prior_rows += sum(exchange.num_prior for exchange in exchanges)
        self.num_delayed_rows += sum(exchange.num_delayed for exchange in exchanges)

    def next_stats(self, last: TableStats, clip: ClippedOf) -> TableStats:
        """What has come since the last step."""
        now: dict[str, float] = {
            "num_ids": self.num_ids,
            "num_prior_rows": self.num_prior_rows,
            "num_delayed_rows": self.num_delayed_rows,
            **{f"{kind}_bytes": self.sent[kind] for kind in _IN_STATS},
            "lookup_stall_s": self.lookups.seconds,
            "gradient_stall_s": self.gradients.seconds,
            "update_s": self.updates.seconds,
        }
        since: dict[str, Any] = {key: value - self._before.get(key, 0) for key, value in now.items()}
        self._before = now
        num_rows = since["num_prior_rows"] + since["num_delayed_rows"]
        return TableStats(step=last.step + 1, num_rows=num_rows, clip=clip, **since)
