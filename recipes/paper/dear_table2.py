"""Table II of the DeAR paper, simulated: how near DeAR comes to the largest speedup on 64 workers.

    python -m recipes.paper.dear_table2
    python -m recipes.paper.dear_table2 --markdown docs/results/paper_dear_table2.md

Computing times are those that the paper's Eq. 6 gives for its column S_max; bandwidth is the line rate, and latency
that of its section II-D. Nothing is fitted to the measured column S.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planning import Network, simulate
from ddp_hooks.planning.step import dependency_bound_s
from recipes.paper.bounds import max_speedup
from recipes.paper.models import ETHERNET_BYTES_S, INFINIBAND_BYTES_S, NAMES, WORKERS, step_of
from recipes.paper.strategies import DearOfPaper

ALPHA_S = 26e-6  # section II-D: an all-reduce of 1 MB takes 4.5 ms, of 500 KB 3.9 ms, in 2 (P - 1) rounds
SIZES_MB = tuple(100 ** (i / 11) for i in range(12))  # for what Bayesian optimisation finds, 1 to 100 MB
TENSOR_WISE = 1 / (1 << 20)  # MB, one byte: every tensor by itself, before fusion; the paper's DeAR has no buckets

# With BERT-Large's computing time, which the column for 10GbE gives, its S_max of 51.8 at 100GbIB is that of 46 Gbit/s.
INFINIBAND_BY_S_MAX_BYTES_S = 46.4e9 / 8

NETWORKS = {"10GbE": ETHERNET_BYTES_S, "100GbIB": INFINIBAND_BYTES_S, "46 Gbit/s": INFINIBAND_BY_S_MAX_BYTES_S}
PAPER = {  # S_max and S
    "10GbE": {
        "resnet50": (61.6, 61.1),
        "densenet201": (64.0, 52.8),
        "inception_v4": (59.8, 56.5),
        "bert": (25.5, 23.9),
        "bert_large": (12.1, 11.8),
    },
    "100GbIB": {
        "resnet50": (64.0, 61.6),
        "densenet201": (64.0, 54.0),
        "inception_v4": (64.0, 57.2),
        "bert": (64.0, 49.6),
        "bert_large": (51.8, 37.5),
    },
}
PAPER["46 Gbit/s"] = PAPER["100GbIB"]
# Computing times that Eq. 6 leaves open: at 10GbE DenseNet-201's S_max is 64, so its time is at least that of Eq. 6.
FACTORS = {"densenet201": (1.0, 1.25, 1.5, 2.0)}
# Messages of section II-D are short; NCCL passes long ones on in pieces, which hides latency. InfiniBand: none there.
ALPHAS_S = {"10GbE": (ALPHA_S, ALPHA_S / 5), "100GbIB": (ALPHA_S, ALPHA_S / 5), "46 Gbit/s": (ALPHA_S, ALPHA_S / 5)}

COLUMNS = (
    *("network", "model", "latency", "computing", "S_max", "S_max, paper", "S", "S, paper"),
    *("S by any schedule", "S / S_max", "S / S_max, paper", "points"),
)


@dataclass(frozen=True)
class Row:
    """One model on one network: simulated, and as the paper has it."""

    network: str
    model: str
    alpha_s: float
    factor: float
    compute_s: float
    max_speedup: float
    speedup: float
    any_schedule: float

    @property
    def ratio(self) -> float:
        """Simulated S / S_max."""
        return self.speedup / self.max_speedup

    @property
    def paper(self) -> tuple[float, float]:
        """The paper's S_max and S."""
        return PAPER[self.network][self.model]

    @property
    def points(self) -> float:
        """Percentage points above the paper's S / S_max."""
        return 100 * (self.ratio - self.paper[1] / self.paper[0])

    def cells(self) -> list[str]:
        """A line of the table."""
        paper_max, paper = self.paper
        return [
            self.network,
            self.model,
            f"{self.alpha_s * 1e6:.3g} µs",
            f"{self.compute_s:.3f} s" + (f" (× {self.factor:g})" if self.factor != 1 else ""),
            f"{self.max_speedup:.1f}",
            f"{paper_max:.1f}",
            f"{self.speedup:.1f}",
            f"{paper:.1f}",
            f"{self.any_schedule:.1f}",
            f"{self.ratio:.1%}",
            f"{paper / paper_max:.1%}",
            f"{self.points:+.1f}",
        ]


def the_papers_dear(fusion_mb: float, **settings: Any) -> DearOfPaper:
    """Groups are of tensors, not of buckets."""
    return DearOfPaper(bucket_mb=TENSOR_WISE, fusion_mb=fusion_mb, **settings)


def simulate_row(network: str, model: str, alpha_s: float, factor: float = 1.0) -> Row:
    """The speedup of the best of a grid of fusion sizes, which stands for what the paper's tuner finds."""
    step = step_of(model, factor)
    bytes_per_s = NETWORKS[network]
    described = Network(WORKERS, AlphaBeta(alpha_s, 1 / bytes_per_s), native=True)
    step_s = min(simulate(the_papers_dear(mb), step, described).step_s for mb in SIZES_MB)
    limit = min(WORKERS, max_speedup(step.compute_s, WORKERS, step.num_bytes / bytes_per_s))
    bound_s = dependency_bound_s(step, WORKERS, bytes_per_s, gathers_wait_for_step=True)
    speedups = (WORKERS * step.compute_s / seconds for seconds in (step_s, bound_s))
    return Row(network, model, alpha_s, factor, step.compute_s, limit, *speedups)


def rows() -> list[Row]:
    """The whole table, with what the paper leaves open."""
    return [
        simulate_row(network, model, alpha_s, factor)
        for network in NETWORKS
        for model in NAMES
        for alpha_s in ALPHAS_S[network]
        for factor in FACTORS.get(model, (1.0,))
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.paper.dear_table2", description="Table II, simulated.")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="also write a Markdown page")
    options = parser.parse_args(arguments)
    found = rows()
    table = Table(title="DeAR, Table II: simulated beside the paper")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index > 1 else "left")
    for row in found:
        table.add_row(*row.cells())
    Console(width=140).print(table)
    if options.markdown:
        write_page(options.markdown, found)


def write_page(path: Path, found: Sequence[Row]) -> None:
    """A Markdown page with the table."""
    head = [f"| {' | '.join(COLUMNS)} |", "| :-- | :-- |" + " --: |" * (len(COLUMNS) - 2)]
    table = "\n".join([*head, *(f"| {' | '.join(row.cells())} |" for row in found)])
    text = Path(__file__).with_name("dear_table2.md").read_text()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace("<!-- table -->", table))


if __name__ == "__main__":
    main()
