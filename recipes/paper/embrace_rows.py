"""Draw the rows of a sharded table's gradient that are sent at once, and later, from a step of the real exchange.

    python -m recipes.paper.embrace_rows --output docs/images/row_split.png

Three workers look up words of a small table, of which each holds some columns, and know what all of them look up next
(li2022embrace, section 4.2.2 and Algorithm 1). The step runs in one process, and must end in the weights of a table
that was never split.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_hooks.comm import Algorithm, Send, run_on_fabric
from ddp_hooks.embedding.exchange.gradients import GradientExchange, RowSum, send_delayed
from ddp_hooks.embedding.exchange.lookup import NO_ERROR, BatchRows, Lookup, Purpose, exchange_ids, look_up
from ddp_hooks.embedding.step.split_step import TableUpdates
from ddp_hooks.embedding.table import Table, column_bounds

NUM_ROWS, DIM = 12, 6
# Ids by worker: of the batch whose gradient is sent, and of the next one.
NOW: tuple[tuple[int, ...], ...] = ((1, 4, 4, 6, 9), (2, 4, 6, 10), (0, 4, 7, 11))
NEXT: tuple[tuple[int, ...], ...] = ((2, 4, 5), (4, 7, 8), (1, 3, 4))
KINDS = ("lookup", "ids", "prior", "next lookup", "delayed")  # in the order in which a step sends them

COLUMNS = ("#009e73", "#cc79a7", "#56b4e9")  # of a worker
PRIOR, DELAYED, NOTHING, COMPUTING, SENT = "#e69f00", "#0072b2", "#f0f0f0", "#c8c8c8", "#e5e5e5"


@dataclass
class Split:
    """Rows of its gradient that one worker has sent.

    Args:
        prior: rows that somebody looks up next.
        delayed: the others.
        sent_bytes: by kind.
    """

    prior: tuple[int, ...] = ()
    delayed: tuple[int, ...] = ()
    sent_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))


def splits_of(now: Sequence[Sequence[int]] = NOW, following: Sequence[Sequence[int]] = NEXT) -> list[Split]:
    """Make a step of the exchange; return the rows that each worker sent at once, and later.

    Args:
        now: ids that each worker looks up.
        following: those that it will look up next.

    Raises:
        RuntimeError: the exchange has sent other rows than Algorithm 1 says, or the step was another one than that of a
            whole table.
    """
    whole = nn.Parameter(torch.arange(float(NUM_ROWS * DIM)).view(NUM_ROWS, DIM))
    workers = [_Worker(rank, now, following, whole.detach()) for rank in range(len(now))]
    run_on_fabric([worker.step() for worker in workers])

    _step_of_whole_table(whole, now)
    split = torch.cat([worker.table.weight for worker in workers], dim=1)
    if not torch.equal(split, whole):
        raise RuntimeError("the step in two parts is another one than that of a whole table")
    used_next = {row for ids in following for row in ids}
    for worker, ids in zip(workers, now, strict=True):
        rows = sorted(set(ids))
        prior = tuple(row for row in rows if row in used_next)
        delayed = tuple(row for row in rows if row not in used_next)
        if worker.counts != (len(prior), len(delayed)):
            raise RuntimeError(f"worker {worker.rank} has sent {worker.counts} rows, not {prior} and {delayed}")
        if not torch.equal(worker.next_vectors, whole[sorted(set(following[worker.rank]))]):
            raise RuntimeError(f"worker {worker.rank} has looked up old rows")
        worker.split.prior, worker.split.delayed = prior, delayed
    return [worker.split for worker in workers]


class _Worker:
    """One rank and its columns."""

    def __init__(
        self, rank: int, now: Sequence[Sequence[int]], following: Sequence[Sequence[int]], whole: Tensor
    ) -> None:
        bounds = column_bounds(DIM, len(now))
        own = nn.Parameter(whole[:, bounds[rank] : bounds[rank + 1]].clone())
        self.rank = rank
        self.world_size = len(now)
        self.table = Table(0, "words", (), NUM_ROWS, DIM, bounds, rank, own, None)
        self.split = Split()
        self.counts = (0, 0)
        self.next_vectors = torch.empty(0)
        self._ids = np.array(now[rank], np.int64)
        self._batches = [
            BatchRows.of({0: ids}, [self.table], deduplicate=True)
            for ids in (self._ids, np.array(following[rank], np.int64))
        ]
        self._updates = TableUpdates(torch.optim.SparseAdam([own], lr=0.5), [own])

    def step(self) -> Algorithm:
        """Make a step as ``EmbeddingTables`` does, one part after the other."""
        batch, upcoming = self._batches
        yield from self._counted("ids", self._tell(batch, Purpose.NOW))
        lookup = self._lookup(batch)
        yield from self._counted("lookup", look_up([lookup], batch))
        yield from self._counted("ids", self._tell(upcoming, Purpose.AHEAD))

        ids = self._ids
        positions = lookup.positions_of(ids)
        assert isinstance(positions, Tensor)
        lookup.add_gradient(positions, _gradient_of(torch.from_numpy(ids)))
        exchange = GradientExchange(self.table, [lookup], upcoming, splits=True)
        yield from self._counted("prior", exchange.send_prior())
        self.counts = exchange.num_prior, exchange.num_delayed
        self._updates.begin()
        self._apply(exchange.prior)

        next_lookup = self._lookup(upcoming)
        yield from self._counted("next lookup", look_up([next_lookup], upcoming))
        assert next_lookup.vectors is not None
        self.next_vectors = next_lookup.vectors
        yield from self._counted("delayed", send_delayed([exchange]))
        self._apply(exchange.delayed)

    def _tell(self, batch: BatchRows, purpose: Purpose) -> Algorithm:
        return exchange_ids(batch, purpose, 1, NO_ERROR, [self.table], range(self.world_size))

    def _lookup(self, batch: BatchRows) -> Lookup:
        assert batch.rows is not None
        return Lookup(self.table, batch.rows[0])

    def _apply(self, part: RowSum | None) -> None:
        assert part is not None
        self._updates.apply({0: part})

    def _counted(self, kind: str, algorithm: Algorithm) -> Algorithm:
        for exchanges in algorithm:
            exchanges = list(exchanges)
            self.split.sent_bytes[kind] += sum(each.tensor.nbytes for each in exchanges if isinstance(each, Send))
            yield exchanges


def _gradient_of(ids: Tensor) -> Tensor:
    return (ids[:, None] + 1.0).expand(-1, DIM)


def _step_of_whole_table(whole: nn.Parameter, now: Sequence[Sequence[int]]) -> None:
    total = torch.zeros(NUM_ROWS, DIM)
    for ids in now:
        rows = torch.tensor(ids, dtype=torch.int64)
        total.index_add_(0, rows, _gradient_of(rows))
    rows = torch.tensor(sorted({row for ids in now for row in ids}))
    values = total[rows] / len(now)
    whole.grad = torch.sparse_coo_tensor(rows[None], values, whole.shape, is_coalesced=True, check_invariants=False)
    torch.optim.SparseAdam([whole], lr=0.5).step()


def draw(path: Path, splits: Sequence[Split] | None = None) -> None:
    """Draw the table and three workers' rows above, and the times of their travel below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    splits = splits if splits is not None else splits_of()
    figure, (above, below) = plt.subplots(2, 1, figsize=(8.6, 6.4), height_ratios=(1.55, 1.0))
    _draw_rows(above, splits)
    _draw_times(below)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _draw_rows(ax: Any, splits: Sequence[Split]) -> None:
    from matplotlib.patches import Patch

    workers = range(len(splits))
    bounds = column_bounds(DIM, len(splits))
    width, gap = len(splits) * 1.6, 2.4
    starts = [DIM + gap + number * (width + gap) for number in range(3)]
    for row in range(NUM_ROWS):
        ax.text(-0.5, -row - 0.5, f"row {row}", ha="right", va="center", fontsize=9)
        for worker in workers:
            for column in range(bounds[worker], bounds[worker + 1]):
                _cell(ax, column, row, 0.92, COLUMNS[worker])
    titles = ("looked up now", "looked up next", "rows of the gradient")
    for number, (start, title) in enumerate(zip(starts, titles, strict=True)):
        ax.text(start + width / 2, 1.6, title, ha="center", va="bottom", fontsize=10)
        for worker in workers:
            left = start + 1.6 * worker
            ax.text(left + 0.75, 0.35, str(worker), ha="center", va="bottom", fontsize=9)
            for row in range(NUM_ROWS):
                _cell(ax, left, row, 1.5, _colour_of(number, worker, row, splits[worker]))
    ax.text(DIM / 2, 1.6, "the table", ha="center", va="bottom", fontsize=10)
    for worker in workers:
        middle = (bounds[worker] + bounds[worker + 1]) / 2
        ax.text(middle, 0.35, str(worker), ha="center", va="bottom", fontsize=9)
    ax.text(-0.5, 0.35, "worker", ha="right", va="bottom", fontsize=9)
    ax.legend(
        handles=[
            *(Patch(color=COLUMNS[worker], label=f"worker {worker}") for worker in workers),
            Patch(color=PRIOR, label="prior: somebody looks it up next"),
            Patch(color=DELAYED, label="delayed: nobody does"),
        ],
        loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=5, fontsize=9, frameon=False, columnspacing=1.2,
        handlelength=1.4,
    )  # fmt: skip
    ax.set_xlim(-3.4, starts[-1] + width)
    ax.set_ylim(-NUM_ROWS - 0.3, 2.8)
    ax.axis("off")


def _colour_of(panel: int, worker: int, row: int, split: Split) -> str:
    if panel == 0:
        return COLUMNS[worker] if row in NOW[worker] else NOTHING
    if panel == 1:
        return COLUMNS[worker] if row in NEXT[worker] else NOTHING
    return PRIOR if row in split.prior else DELAYED if row in split.delayed else NOTHING


def _cell(ax: Any, left: float, row: int, width: float, colour: str) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((left, -row - 0.92), width, 0.84, facecolor=colour))


def _draw_times(ax: Any) -> None:
    """Draw the order of events; lengths mean nothing."""
    for lane, label in enumerate(("computed", "sent at once", "sent after it")):
        ax.text(-0.25, -lane, label, ha="right", va="center", fontsize=9)
    for lane, start, end, label, colour in _bars():
        ax.barh(-lane, end - start, left=start, height=0.62, color=colour, edgecolor="white", linewidth=1.5)
        ink = "white" if colour == DELAYED else "black"
        ax.text((start + end) / 2, -lane, label, ha="center", va="center", fontsize=8.5, color=ink)
    ax.set_xlim(-2.9, 19.6)
    ax.set_ylim(-2.6, 0.6)
    ax.axis("off")


def _bars() -> Iterator[tuple[int, float, float, str, str]]:
    """Yield (lane, start, end, label, colour) of two steps, as ``ddp_hooks.embedding.step.scheduler`` has them."""
    period = 10.2
    for number in (1, 2):
        start = period * (number - 1)
        yield 0, start, start + 3.0, f"forward {number}", COMPUTING
        yield 0, start + 3.0, start + 6.6, f"backward {number}", COMPUTING
        yield 0, start + 7.9, start + 9.4, f"step {number}", COMPUTING
        yield 1, start + 3.0, start + 4.4, f"ids {number + 1}", SENT
        yield 1, start + 6.0, start + 7.9, f"prior {number}", PRIOR
        if number == 1:
            yield 1, start + 8.2, period, f"vectors {number + 1}", SENT
            yield 2, period, period + 7.9, "delayed 1, applied when step 2 begins", DELAYED


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.paper.embrace_rows", description="Draw the rows.")
    parser.add_argument("--output", type=Path, default=Path("build/row_split.png"))
    options = parser.parse_args()
    draw(options.output)
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
