"""Cost of exchanging tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from ddp_hooks.comm import Algorithm, Send, Stall

Kind: TypeAlias = Literal["id", "lookup", "prior", "delayed", "columns"]
_IN_STATS: tuple[Kind, ...] = ("id", "lookup", "prior", "delayed")


@dataclass(frozen=True)
class TableStats:
    """One step on this rank, all tables together.

    Args:
        step: number of the step, from 1; 0 before the first.
        num_ids: ids that forwards asked for (Table 3 of the paper: original).
        num_rows: different rows among them (coalesced); ``num_prior_rows + num_delayed_rows``.
        num_prior_rows: rows that some rank's next batch looks up.
        num_delayed_rows: the rest.
        id_bytes, lookup_bytes, prior_bytes, delayed_bytes: payload sent, by kind. Delayed rows are sent after their
            step, so their bytes count in the next one.
        lookup_stall_s: seconds that forwards waited for vectors, and for ids without prefetch.
        gradient_stall_s: seconds that the step waited for gradients.
        update_s: seconds of the updates of prior and delayed rows.
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

    @property
    def stall_s(self) -> float:
        """Seconds that training waited for tables."""
        return self.lookup_stall_s + self.gradient_stall_s


@dataclass
class Tally:
    """Running totals; the statistics of a step are differences of them."""

    sent: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(get_args(Kind), 0))
    lookups: Stall = field(default_factory=Stall)
    gradients: Stall = field(default_factory=Stall)
    updates: Stall = field(default_factory=Stall)
    num_ids: int = 0
    num_prior_rows: int = 0
    num_delayed_rows: int = 0
    _before: dict[str, float] = field(default_factory=dict)

    def counted(self, kind: Kind, algorithm: Algorithm) -> Algorithm:
        for messages in algorithm:
            self.sent[kind] += sum(m.tensor.nbytes for m in messages if isinstance(m, Send))
            yield messages

    def next_stats(self, last: TableStats) -> TableStats:
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
        return TableStats(step=last.step + 1, num_rows=num_rows, **since)
