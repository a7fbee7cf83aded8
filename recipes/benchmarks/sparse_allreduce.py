"""Sparse all-reduces beside dense ones, of one long gradient on the emulated cluster.

    python -m recipes.benchmarks.sparse_allreduce
    python -m recipes.benchmarks.sparse_allreduce --workers 8 --rate 100mbit --numels 25e6 --densities 0.01
    python -m recipes.benchmarks.sparse_allreduce --quick --loopback
    python -m recipes.benchmarks.sparse_allreduce --results FIRST.json SECOND.json --markdown PAGE.md

`all-reduce`, `bf16` and `powersgd-4` are PyTorch's own hooks, the others ours.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from ddp_hooks.sparse.codec import Format
from recipes.benchmarks.harness import Benchmark, Run, main_of, run_job
from recipes.common.pages import Page, Part, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DENSE = ("all-reduce", "bf16", "powersgd-4", "dense")
SPARSE = ("spardl", "topka", "topkdsa", "gtopk", "oktopk")
_TEAMS = re.compile(r"spardl-([rb])([1-9]\d*)")
COLUMNS = ("elements", "density", "variant", "s", "min–max", "× dense", "compute", "messages", "MB sent")

INTRODUCTION = """\
One gradient of float32, the sum of which every worker is to have; one core's worth of threads per worker, two cores \
for all of them together. Every worker runs in a network namespace of its own behind a shaped link. All variants \
alternate in one run; a table shows medians, of the slowest worker."""

LEGEND = """\
* `s`: from the gradient to the mean of what was kept of all of them: adding to the residual, selecting, exchanging,
  and writing a dense vector.
* `× dense`: how many times as fast as PyTorch's own all-reduce of the same run.
* `compute`: seconds that the algorithm took between its rounds, on the slowest worker. Workers share two cores, so it
  is several times what it is on a core of one's own.
* `messages`: seconds that the same messages take once more, with nothing to compute between them.
* `oktopk`: a mean over the 32 steps for which it keeps its thresholds, one of which estimates them.
* `spardl-b4`: SparDL with four teams and B-SAG between them; workers' gradients here are independent of each other, so
  that the teams' entries hardly overlap, which is when it sends least.
* `MB sent`: payload per worker, the largest. PowerSGD's is not counted."""


def is_variant(name: str) -> bool:
    """True for the name of a variant; `spardl-b4` is SparDL with four teams and B-SAG between them."""
    return name in (*DENSE, *SPARSE) or _TEAMS.fullmatch(name) is not None


def is_sparse(name: str) -> bool:
    return name not in DENSE


def settings_of(name: str) -> dict[str, Any]:
    """Return the settings of a sparse variant, as arguments of `Sparsity`."""
    match = _TEAMS.fullmatch(name)
    return {"algorithm": "spardl", "num_teams": int(match[2]), "sag": match[1]} if match else {"algorithm": name}


@dataclass(frozen=True)
class SparseJob:
    """All variants on one network.

    Args:
        variants: see :func:`is_variant`.
        numels: lengths of the gradient, float32.
        densities: for the sparse variants.
        wire: format of their entries.
        rounds: timed runs of each variant; one more comes before.
    """

    variants: tuple[str, ...]
    numels: tuple[int, ...]
    densities: tuple[float, ...]
    wire: str = "compact"
    rounds: int = 3


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a network: one per variant, density and round."""
    _check(options.variants, workers)
    from recipes.benchmarks.sparse_worker import compare

    numels, densities = tuple(int(numel) for numel in options.numels), tuple(options.densities)
    job = SparseJob(tuple(options.variants), numels, densities, options.wire, options.rounds)
    yield {"rows": run_job(compare, job, workers, rate)}


def _check(variants: Sequence[str], workers: int) -> None:
    """Raise a ValueError if a variant does not exist, or not for so many workers."""
    for name in variants:
        if not is_variant(name):
            raise ValueError(f"variant must be one of {' '.join([*DENSE, *SPARSE])} or like spardl-b4, got {name!r}")
        teams = settings_of(name).get("num_teams", 1)
        if workers % teams:
            raise ValueError(f"{name} has {teams} teams, which cannot be of equal size with {workers} workers")
        if name.startswith("spardl-r") and teams & (teams - 1):
            raise ValueError(f"{name}: R-SAG takes a power of two of teams; spardl-b{teams} takes any")


def seconds(value: float) -> str:
    """Write seconds shortly: milliseconds do not matter beyond ten, and the table has to fit a terminal."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


@dataclass(frozen=True)
class Line:
    """One line of a table: medians, seconds."""

    numel: int
    density: float
    name: str
    total_s: float
    fastest_s: float
    slowest_s: float
    compute_s: float
    exchange_s: float
    sent_bytes: float
    speedup: float | None  # over the all-reduce of the same length

    @property
    def cells(self) -> list[str]:
        return [
            f"{self.numel / 1e6:g} M",
            f"{self.density:g}" if is_sparse(self.name) else "",
            self.name,
            seconds(self.total_s),
            f"{seconds(self.fastest_s)}–{seconds(self.slowest_s)}",
            f"{self.speedup:.2f}" if self.speedup is not None else "",
            seconds(self.compute_s) if is_sparse(self.name) else "",
            seconds(self.exchange_s),
            f"{self.sent_bytes / 1e6:.2f}" if self.sent_bytes else "",
        ]


def lines_of(result: dict[str, Any]) -> list[Line]:
    """Return medians over rounds, in the order in which the variants ran."""
    rounds: dict[tuple[int, float, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        rounds.setdefault((row["numel"], row["density"], row["name"]), []).append(row)

    def median(rows: list[dict[str, Any]], key: str) -> float:
        return statistics.median(row[key] for row in rows)

    plain = {key[0]: median(rows, "total_s") for key, rows in rounds.items() if key[2] == "all-reduce"}
    return [
        Line(
            numel,
            density,
            name,
            median(rows, "total_s"),
            min(row["total_s"] for row in rows),
            max(row["total_s"] for row in rows),
            median(rows, "compute_s"),
            median(rows, "exchange_s"),
            median(rows, "sent_bytes"),
            plain[numel] / median(rows, "total_s") if numel in plain else None,
        )
        for (numel, density, name), rows in rounds.items()
    ]


def title_of(result: dict[str, Any]) -> str:
    return f"{result['workers']} workers, {result['rate'] or 'loopback'}"


def page(runs: Sequence[Run]) -> Page:
    results = [result for run in runs for result in run.results]
    rows = [[line.cells for line in lines_of(result)] for result in results]
    tables = [Table(title_of(one), COLUMNS, each, text_columns=3) for one, each in zip(results, rows, strict=True)]
    parts: list[Part] = [INTRODUCTION, picture_of(results), *tables, "## Reading the columns", LEGEND]
    return Page("Sparse all-reduces", parts, [run.origin for run in runs])


def picture_of(results: Sequence[dict[str, Any]]) -> Picture:
    """Draw a panel per network and length: a bar per variant; its lower part is the messages alone."""
    panels = [
        (title_of(result), numel, [line for line in lines_of(result) if line.numel == numel])
        for result in results
        for numel in dict.fromkeys(row["numel"] for row in result["rows"])
    ]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    draw = partial(_draw, panels, rows, columns)
    return Picture("Seconds of every variant", draw, (1 + 4.4 * columns, 4.4 * rows))


def _draw(panels: Sequence[tuple[str, int, list[Line]]], rows: int, columns: int, figure: Figure) -> None:
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (network, numel, lines) in zip(axes.flat, panels, strict=False):
        names = [f"{line.name} {line.density:g}" if is_sparse(line.name) else line.name for line in lines]
        ax.bar(names, [line.total_s for line in lines], color="tab:blue", label="in all")
        ax.bar(names, [line.exchange_s for line in lines], color="tab:orange", label="messages alone")
        ax.set_title(f"{numel / 1e6:g} M float32, {network}", fontsize=9)
        ax.set_yscale("log")
        ax.set_ylabel("seconds")
        ax.tick_params(axis="x", rotation=75, labelsize=7)
    axes[0][0].legend(fontsize=8)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--numels", nargs="+", type=float, default=[25e6], help="lengths of the gradient")
    add("--densities", nargs="+", type=float, default=[0.01, 0.001], help="parts to keep")
    names = [*DENSE, *SPARSE]
    add("--variants", nargs="+", default=names, help="ways to sum; spardl-b4: four teams with B-SAG")
    add("--wire", choices=get_args(Format), default="compact", help="how entries travel")
    add("--rounds", type=int, default=3, help="timed runs of each")


BENCHMARK = Benchmark(
    "sparse_allreduce",
    "Compare sparse and dense all-reduces of one long gradient.",
    measure,
    page,
    _add_options,
    quick={"numels": [2e6], "densities": [0.01]},
)

if __name__ == "__main__":
    main_of(__spec__)
