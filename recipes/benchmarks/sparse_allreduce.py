"""Sparse all-reduces beside dense ones, of one long gradient on the emulated cluster.

    python -m recipes.benchmarks.sparse_allreduce
    python -m recipes.benchmarks.sparse_allreduce --workers 8 --rate 100mbit --numels 25e6 --densities 0.01
    python -m recipes.benchmarks.sparse_allreduce --quick --loopback
    python -m recipes.benchmarks.sparse_allreduce --results FIRST.json SECOND.json --markdown PAGE.md

`all-reduce`, `bf16` and `powersgd-4` are PyTorch's own hooks, the others ours. Prints a table per network, and writes
JSON, a plot, and if asked a Markdown page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from ddp_hooks.sparse.codec import Format
from recipes.benchmarks.dear_table2 import command, environment, now
from recipes.benchmarks.launch import run_job
from recipes.benchmarks.sparse_job import DENSE, SPARSE, SparseJob, is_sparse, is_variant, settings_of
from recipes.cluster.network import parse_rate

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


@dataclass(frozen=True)
class Network:
    """All rows of one network.

    Args:
        workers, rate: which; a rate of None is loopback.
        rows: as the workers have measured them, one per variant, density and round.
    """

    workers: int
    rate: str | None
    rows: list[dict[str, Any]]

    @property
    def title(self) -> str:
        return f"{self.workers} workers, {self.rate or 'loopback'}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.results:
        if not options.markdown:
            parser.error("--results makes a page of what was measured before: say where with --markdown")
        write_page(options.markdown, [json.loads(path.read_text()) for path in options.results])
        return
    if options.quick:
        options.workers, options.rate, options.numels, options.densities = [2], ["1gbit"], [2e6], [0.01]
        options.rounds = 1
    job = SparseJob(
        tuple(options.variants),
        tuple(int(numel) for numel in options.numels),
        tuple(options.densities),
        options.wire,
        options.rounds,
    )
    rates: list[str | None] = [None] if options.loopback else options.rate
    try:
        _check(options.variants, options.workers)
        for rate in filter(None, rates):
            parse_rate(rate)
        networks = [
            Network(workers, rate, run_job(job, workers, rate, "recipes.benchmarks.sparse_worker")["rows"])
            for workers in options.workers
            for rate in rates
        ]
    except ValueError as error:
        parser.error(str(error))
    except RuntimeError as error:  # also ClusterUnavailable, which says what is missing
        sys.exit(f"error: {error}")
    for network in networks:
        show(network)
    options.output.mkdir(parents=True, exist_ok=True)
    called = {"command": command("sparse_allreduce", arguments), "created": now(), "environment": environment()}
    path = options.output / "sparse_allreduce.json"
    measured = {**called, "networks": [asdict(network) for network in networks]}
    path.write_text(json.dumps(measured, indent=1))
    plot(networks, path.with_suffix(".png"))
    print(f"Wrote {path} and {path.with_suffix('.png')}")
    if options.markdown:
        write_page(options.markdown, [measured])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.sparse_allreduce",
        description="Compare sparse and dense all-reduces of one long gradient.",
    )
    add = parser.add_argument
    add("--workers", nargs="+", type=int, default=[4], help="numbers of workers (default: 4)")
    add("--rate", nargs="+", default=["1gbit"], help="link rates, as tc writes them (default: 1gbit)")
    add("--numels", nargs="+", type=float, default=[25e6], help="lengths of the gradient (default: 25e6)")
    add("--densities", nargs="+", type=float, default=[0.01, 0.001], help="parts to keep (default: 0.01 0.001)")
    names = [*DENSE, *SPARSE]
    add("--variants", nargs="+", default=names, help=f"of {' '.join(names)}, and spardl-b4: four teams with B-SAG")
    add("--wire", choices=get_args(Format), default="compact", help="how entries travel (default: compact)")
    add("--rounds", type=int, default=3, help="timed runs of each (default: 3)")
    add("--output", type=Path, default=Path("build/sparse_allreduce"), help="folder for JSON and plot")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page, its plot beside it")
    add("--results", nargs="+", type=Path, metavar="JSON", help="measure nothing: a page of these earlier runs")
    add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
    add("--quick", action="store_true", help="a smoke test: two workers, a short gradient")
    return parser


def _check(variants: Sequence[str], workers: Sequence[int]) -> None:
    """Raises a ValueError if a variant does not exist, or not for so many workers."""
    for name in variants:
        if not is_variant(name):
            raise ValueError(f"variant must be one of {' '.join([*DENSE, *SPARSE])} or like spardl-b4, got {name!r}")
        teams = settings_of(name).get("num_teams", 1)
        for count in workers:
            if count % teams:
                raise ValueError(f"{name} has {teams} teams, which cannot be of equal size with {count} workers")
            if name.startswith("spardl-r") and teams & (teams - 1):
                raise ValueError(f"{name}: R-SAG takes a power of two of teams; spardl-b{teams} takes any")


def seconds(value: float) -> str:
    """Milliseconds do not matter beyond ten seconds, and the table has to fit a terminal."""
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


def lines_of(network: Network) -> list[Line]:
    """Medians over rounds, in the order in which the variants ran."""
    rounds: dict[tuple[int, float, str], list[dict[str, Any]]] = {}
    for row in network.rows:
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


def show(network: Network) -> None:
    table = Table(title=network.title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index == 2 else "right")
    for line in lines_of(network):
        table.add_row(*line.cells)
    Console().print(table)


def plot(networks: Sequence[Network], path: Path) -> None:
    """A panel per network and length: a bar per variant, of which the lower part is the messages alone."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        (network, numel, [line for line in lines_of(network) if line.numel == numel])
        for network in networks
        for numel in dict.fromkeys(row["numel"] for row in network.rows)
    ]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(1 + 4.4 * columns, 4.4 * rows), squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, (network, numel, lines) in zip(axes.flat, panels, strict=False):
        names = [f"{line.name} {line.density:g}" if is_sparse(line.name) else line.name for line in lines]
        ax.bar(names, [line.total_s for line in lines], color="tab:blue", label="in all")
        ax.bar(names, [line.exchange_s for line in lines], color="tab:orange", label="messages alone")
        ax.set_title(f"{numel / 1e6:g} M float32, {network.title}", fontsize=9)
        ax.set_yscale("log")
        ax.set_ylabel("seconds")
        ax.tick_params(axis="x", rotation=75, labelsize=7)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def write_page(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """A page, and its plot beside it, of one run or several."""
    networks = [Network(**network) for run in runs for network in run["networks"]]
    plot(networks, path.with_suffix(".png"))
    path.write_text(markdown(networks, path.with_suffix(".png").name, runs))
    print(f"Wrote {path}")


def markdown(networks: Sequence[Network], plot_name: str, runs: Sequence[dict[str, Any]]) -> str:
    """A page with the tables, the plot, and what it takes to repeat them."""
    sections = ["# Sparse all-reduces", INTRODUCTION, f"![Seconds of every variant]({plot_name})"]
    for network in networks:
        rows = [f"| {' | '.join(COLUMNS)} |", f"|{' --: |' * len(COLUMNS)}"]
        rows += [f"| {' | '.join(line.cells)} |" for line in lines_of(network)]
        sections += [f"## {network.title}", "\n".join(rows)]
    sections += ["## Reading the columns", LEGEND, "## Repeating it"]
    for run in runs:
        versions = ", ".join(f"{name} {value}" for name, value in run["environment"].items())
        sections += [f"```\n{run['command']}\n```", f"{run['created']}; {versions}."]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    main()
