"""The language models of the EmbRace paper on an emulated cluster: DDP, other baselines, and sharded tables.

    python -m recipes.benchmarks.embrace
    python -m recipes.benchmarks.embrace --models lm bert --workers 4 8 --rate 1gbit 10gbit
    python -m recipes.benchmarks.embrace --sweep --workers 4
    python -m recipes.benchmarks.embrace --results build/a/embrace.json build/b/embrace.json --markdown PAGE.md
    python -m recipes.benchmarks.embrace --quick --loopback

Prints a table per model and network, and writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recipes.benchmarks import embrace_workloads as workloads
from recipes.benchmarks.dear_table2 import command, environment, now
from recipes.benchmarks.embrace_job import BASELINES, SWEPT, VARIANTS, EmbraceJob
from recipes.benchmarks.launch import run_job
from recipes.cluster.network import parse_rate

DENSITIES = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
COLUMNS = ("variant", "tokens/s", "s/step", "min–max", "× best", "stall", "MB sent", "CPU s")
WORKER = "recipes.benchmarks.embrace_worker"

INTRODUCTION = """\
Tables, ids, vectors, gradients, communication and updates (SGD) are real. Dense layers have real parameters and \
gradients, and *emulated* compute: they sleep, in proportion to their size. Every worker runs in a network namespace \
of its own behind a shaped link. All variants of a table alternate in one run.

Sizes are those of the paper's Table 1, in width times the factor in the title (`scale`), so that plain DDP's dense \
gradients fit one machine for every worker; ids are made so that a batch looks up as many rows, as many different \
ones, and shares as many with the next batches as its Table 3 says. The paper gives no computing times: floating-point \
operations, two per parameter and id forwards and four backwards, over 10 TFLOP/s, times a factor with which computing \
takes about as long as communication at 1 Gbit/s with four workers, or the one in the title (`slow`)."""

LEGEND = """\
* `tokens/s`: ids of all workers that are not padding, per second.
* `× best`: how many times as many as the fastest of those marked with a star.
* `stall`: seconds per step that are not computing: waiting for communication, splitting rows, updates and Python. The
  paper's *computation stall*, with what it leaves out.
* `MB sent`: by a worker's network interface per step, headers included.
* `CPU s`: processor seconds per step, all workers together; they share two cores."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.results:
        runs = [json.loads(path.read_text()) for path in options.results]
        if options.markdown is None:
            parser.error("--results needs --markdown PATH")
        write_page(options.markdown, runs)
        return
    if options.quick:
        options.models, options.workers, options.scale = ["tiny"], [2], 1.0
        options.steps, options.warmup, options.rounds, options.densities = 2, 2, 1, [0.1, 1.0]
    rates: list[str | None] = [None] if options.loopback else options.rate
    models = options.models[:1] if options.sweep else options.models
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "embrace.json"
    called = {"command": command("embrace", arguments), "created": now(), "environment": environment()}
    run: dict[str, Any] = {**called, "measured": []}
    try:
        for given in filter(None, rates):
            parse_rate(given)
        for rate, workers, model in itertools.product(rates, options.workers, models):
            run["measured"].append(measure(options, model, workers, rate))
            path.write_text(json.dumps(run, indent=1))  # so that what took long is not lost with what comes later
            show(run["measured"][-1])
    except (ValueError, RuntimeError) as error:  # also ClusterUnavailable, which says what is missing
        sys.exit(f"error: {error}")
    plot([run], path.with_suffix(".png"))
    print(f"Wrote {path} and {path.with_suffix('.png')}")
    if options.markdown:
        write_page(options.markdown, [run])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.embrace",
        description="Compare how DDP, other baselines and sharded tables train the EmbRace paper's models.",
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=workloads.NAMES, default=list(workloads.PAPER_MODELS))
    add("--workers", type=int, nargs="+", default=[4])
    add("--rate", nargs="+", default=["1gbit"], help="link rates, as tc writes them (default: 1gbit)")
    add("--scale", type=float, default=0.25, help="factor on the width of tables and dense layers (default: 0.25)")
    add("--slow", type=float, help="factor on computing time (default: by model)")
    add("--steps", type=int, default=5, help="timed steps per window (default: 5)")
    add("--warmup", type=int, default=3, help="untimed steps before each window (default: 3)")
    add("--rounds", type=int, default=2, help="windows per variant (default: 2)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--sweep", action="store_true", help="one exchange of the first model's first table, for several densities")
    add("--densities", nargs="+", type=float, default=list(DENSITIES), help="of --sweep")
    add("--output", type=Path, default=Path("build/embrace"), help="folder for JSON and plot")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page, its plot beside it")
    add("--results", nargs="+", type=Path, metavar="JSON", help="measure nothing: a page of these earlier runs")
    add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
    add("--quick", action="store_true", help="a smoke test: two workers, a tiny model, few steps")
    return parser


def measure(options: argparse.Namespace, model: str, workers: int, rate: str | None) -> dict[str, Any]:
    """All variants of one model on one network, or the sweep."""
    workload = workloads.load(model, options.scale, options.slow)
    job = EmbraceJob(
        workload,
        SWEPT if options.sweep else tuple(options.variants),
        options.rounds,
        options.warmup,
        options.steps,
        tuple(options.densities) if options.sweep else (),
    )
    found = run_job(job, workers, rate, WORKER)
    place = f"{workers} workers, {rate or 'loopback'}"
    slow = f", slow {options.slow:g}" if options.slow is not None else ""
    return {
        **found,
        "title": f"{model}, {place}, scale {options.scale:g}{slow}",
        "model": model,
        "workers": workers,
        "rate": rate,
        "workload": asdict(workload),
        "table_mb": workload.table_bytes / 1e6,
        "dense_mb": workload.dense_bytes / 1e6,
        "compute_s": workload.compute_s,
        "tokens": workload.tokens * workers,
    }


# -- tables ---------------------------------------------------------------------------------------------------------


def columns_of(one: dict[str, Any]) -> tuple[str, ...]:
    return ("density", *one["sweep"]) if "sweep" in one else COLUMNS


def rows_of(one: dict[str, Any]) -> list[list[str]]:
    """Cells of the table of one model on one network."""
    if "sweep" in one:
        densities = list(next(iter(one["sweep"].values())))
        return [
            [density, *(f"{statistics.median(one['sweep'][name][density]):.3f}" for name in one["sweep"])]
            for density in densities
        ]
    return [_row(one, name) for name in one["windows"]]


def step_s(one: dict[str, Any], name: str) -> float:
    """Seconds per step, the median of the windows."""
    return statistics.median(window["step_s"] for window in one["windows"][name])


def least(one: dict[str, Any]) -> tuple[float, float | None]:
    """MB that a worker sends in a step whose dense gradients are summed exactly, and the seconds of such a step.

    It sends 2 (P - 1) / P of the dense gradients (a ring, or any all-reduce in two halves), and the rows of tables both
    ways. No step is shorter than that takes at the link's own rate; nor than computing and the first block's share of
    it, because that block's gradients come last in backward, and the next forward begins with its parameters.
    """
    workload, world_size = one["workload"], one["workers"]
    rows_mb = sum(table["num_rows_used"] * table["dim"] * 4 for table in workload["tables"]) / 1e6
    both_halves = 2 * (world_size - 1) / world_size
    sent_mb = both_halves * (one["dense_mb"] + rows_mb)
    if one["rate"] is None:
        return sent_mb, None
    mb_per_s = parse_rate(one["rate"]) / 8e6
    first_block_mb = both_halves * workload["block_numels"][0] * 4 / 1e6
    return sent_mb, max(sent_mb / mb_per_s, one["compute_s"] + first_block_mb / mb_per_s)


def best_baseline(one: dict[str, Any]) -> str | None:
    """The fastest of the baselines that ran."""
    present = [name for name in BASELINES if name in one["windows"]]
    return min(present, key=lambda name: step_s(one, name)) if present else None


def _row(one: dict[str, Any], name: str) -> list[str]:
    windows = one["windows"][name]
    seconds, every = step_s(one, name), [window["step_s"] for window in windows]
    best = best_baseline(one)
    return [
        f"{name}*" if name in BASELINES else name,
        f"{one['tokens'] / seconds:.0f}",
        f"{seconds:.3f}",
        f"{min(every):.3f}–{max(every):.3f}",
        f"{step_s(one, best) / seconds:.2f}" if best is not None else "",
        f"{seconds - one['compute_s']:.3f}",
        f"{statistics.median(window['sent_bytes'] for window in windows) / 1e6:.1f}",
        f"{statistics.median(window['cpu_s'] for window in windows):.2f}",
    ]


def remarks(one: dict[str, Any]) -> list[str]:
    """Sentences on one table."""
    goodput = f"goodput {one['goodput_bytes_per_s'] / 1e6:.1f} MB/s"
    if "sweep" in one:
        table = one["workload"]["tables"][0]
        return [f"Seconds per step for a table of {table['num_rows']} rows of {table['dim']} numbers; {goodput}."]
    texts = [
        f"Tables {one['table_mb']:.0f} MB, dense layers {one['dense_mb']:.0f} MB, computing {one['compute_s']:.3f} s "
        f"per step; {goodput}."
    ]
    missing = [name for name in VARIANTS if name not in one["windows"]]
    if missing:
        texts.append(f"Not run here: {', '.join(missing)}.")
    bound_mb, bound_s = least(one)
    texts.append(f"An exact step sends {bound_mb:.1f} MB at least (float32, rows of 2d).")
    best = best_baseline(one)
    if bound_s is not None and best is not None:
        texts.append(
            f"It takes {bound_s:.3f} s at least, which is {step_s(one, best) / bound_s:.2f} × best: the link is no "
            f"faster, and the first block's gradients come last and are needed first."
        )
    details = one["details"].get("2d") or one["details"].get("2d-ddp")
    if details:
        rows = [details[key] for key in ("num_ids", "num_rows", "num_prior_rows", "num_delayed_rows")]
        kinds = [f"{details[f'{kind}_bytes'] / 1e3:.0f} KB {kind}" for kind in ("id", "lookup", "prior", "delayed")]
        texts.append(
            "2d: {:.0f} ids, {:.0f} different rows, {:.0f} prior and {:.0f} delayed per worker; sends ".format(*rows)
            + ", ".join(kinds)
            + "."
        )
    if "sharded" in one["windows"] and "2d" in one["windows"]:
        without, scheduled = (step_s(one, name) - one["compute_s"] for name in ("sharded", "2d"))
        texts.append(f"2D scheduling: {1 - scheduled / without:.0%} less stall than without.")
    return texts


def show(one: dict[str, Any]) -> None:
    table = Table(title=one["title"], box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, column in enumerate(columns_of(one)):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows_of(one):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for text in remarks(one):
        console.print(text, highlight=False)


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel per table: seconds per step, or over density; and tokens per second over workers, where these differ."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [one for run in runs for one in run["measured"]]
    scaling = scaling_of(measured)
    panels = [partial(_plot_one, one) for one in measured]
    panels += [partial(_plot_scaling, title, lines) for title, lines in scaling.items()]
    width = min(4, len(panels))
    height = -(-len(panels) // width)
    figure, axes = plt.subplots(height, width, figsize=(1 + 4 * width, 3.9 * height), squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, panel in zip(axes.flat, panels, strict=False):
        panel(ax)
    figure.tight_layout()
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def scaling_of(measured: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Tokens per second, by model and network, variant and workers; where there are several numbers of workers."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for one in measured:
        for name in one.get("windows", {}):
            title = one["title"].replace(f" {one['workers']} workers,", "")
            found.setdefault(title, {}).setdefault(name, {})[one["workers"]] = one["tokens"] / step_s(one, name)
    return {title: lines for title, lines in found.items() if max(map(len, lines.values())) > 1}


def _plot_one(one: dict[str, Any], ax: Any) -> None:
    ax.set_title(one["title"], fontsize=8)
    if "sweep" in one:
        for name, by_density in one["sweep"].items():
            seconds = [statistics.median(values) for values in by_density.values()]
            ax.plot([float(density) for density in by_density], seconds, marker=".", label=name)
        ax.set_xlabel("density of rows")
        ax.set_ylabel("seconds")
    else:
        names = list(one["windows"])
        colours = ["tab:gray" if name in BASELINES else "tab:orange" for name in names]
        ax.bar(names, [step_s(one, name) for name in names], color=colours)
        ax.axhline(one["compute_s"], color="tab:green", linewidth=1, label="computing")
        ax.tick_params(axis="x", rotation=60, labelsize=7)
        ax.set_ylabel("seconds per step")
    ax.legend(fontsize=7)


def _plot_scaling(title: str, lines: dict[str, dict[int, float]], ax: Any) -> None:
    ax.set_title(f"{title}: scaling", fontsize=8)
    for name, by_workers in lines.items():
        workers = sorted(by_workers)
        ax.plot(workers, [by_workers[count] for count in workers], marker=".", label=name)
    ours = lines.get("2d") or next(iter(lines.values()))
    fewest = min(ours)
    ax.plot(sorted(ours), [ours[fewest] * count / fewest for count in sorted(ours)], "k:", label="2d, linear")
    ax.set_xlabel("workers")
    ax.set_ylabel("tokens per second")
    ax.legend(fontsize=6)


def write_page(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """A page with tables and plot of one run or several, and what it takes to repeat them."""
    plot(runs, path.with_suffix(".png"))
    legend = "\n".join(f"* `{name}`: {text}." for name, text in VARIANTS.items())
    sections = ["# Sharded tables", INTRODUCTION, f"![Seconds per step]({path.with_suffix('.png').name})"]
    sections += ["## Variants", legend, "## Reading the columns", LEGEND]
    for run in runs:
        for one in run["measured"]:
            columns = columns_of(one)
            lines = [f"| {' | '.join(columns)} |", f"| :-- |{' --: |' * (len(columns) - 1)}"]
            lines += [f"| {' | '.join(row)} |" for row in rows_of(one)]
            sections += [f"## {one['title']}", "\n".join(lines), " ".join(remarks(one))]
    sections.append("## Commands")
    for run in runs:
        versions = ", ".join(f"{name} {value}" for name, value in run["environment"].items())
        sections += [f"```\n{run['command']}\n```", f"{run['created']}; {versions}."]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(sections) + "\n")
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
