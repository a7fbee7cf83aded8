"""How much sooner a sparse all-reduce, or another hook, brings a model to the loss of plain DDP.

    python -m recipes.benchmarks.time_to_loss
    python -m recipes.benchmarks.time_to_loss --models gpt2 --rate 500mbit --variants ddp-25mb dear topk:density=0.02
    python -m recipes.benchmarks.time_to_loss --quick --loopback

Everything is computed: a VGG-16 on scikit-learn's digits, a GPT-2 on Python's documentation. Prints a table, and writes
JSON, a plot of losses over time, and if asked a Markdown page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from recipes.benchmarks.dear_table2 import command, environment, now
from recipes.benchmarks.launch import run_job
from recipes.benchmarks.loss_job import DEFAULT_VARIANTS, MODELS, LossJob
from recipes.benchmarks.variants import parse_variant, why_unavailable

COLUMNS = ("model", "variant", "steps", "s/step", "loss", "s to loss", "× DDP")

INTRODUCTION = """\
The fastest plain DDP trains for a number of steps; its loss then, averaged over twenty steps and all workers, is the \
target, for it and for the other variants, from the same weights and on the same batches. Everything is computed, by \
all workers on the cores of one machine. Every worker runs in a network namespace of its own behind a shaped link. \
`steps`, `s to loss`: until the average is at the target for the first time; `× DDP`: how many times sooner."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.results:
        if not options.markdown:
            parser.error("--results makes a page of what was measured before: say where with --markdown")
        write_page(options.markdown, [json.loads(path.read_text()) for path in options.results])
        return
    if options.quick:
        options.models, options.workers, options.steps, options.variants = ["tiny"], 2, [30], None
    if len(options.steps) not in (1, len(options.models)):
        parser.error(f"--steps takes one number, or one per model: got {len(options.steps)} for {options.models}")
    steps = options.steps * len(options.models) if len(options.steps) == 1 else options.steps
    jobs = [
        LossJob(model, tuple(options.variants or DEFAULT_VARIANTS[model]), count)
        for model, count in zip(options.models, steps, strict=True)
    ]
    try:
        for job in jobs:
            _check(job.variants)
    except ValueError as error:
        parser.error(str(error))
    rate = None if options.loopback else options.rate
    try:
        found = {job.model: run_job(job, options.workers, rate, "recipes.benchmarks.loss_worker") for job in jobs}
    except RuntimeError as error:  # also ClusterUnavailable, which says what is missing
        sys.exit(f"error: {error}")
    title = f"{options.workers} workers, {rate or 'loopback'}"
    show(title, rows_of(found))
    options.output.mkdir(parents=True, exist_ok=True)
    called = {"command": command("time_to_loss", arguments), "created": now(), "environment": environment()}
    path = options.output / "time_to_loss.json"
    measured = {**called, "title": title, "jobs": [asdict(job) for job in jobs], "found": found}
    path.write_text(json.dumps(measured, indent=1))
    plot([measured], path.with_suffix(".png"))
    print(f"Wrote {path} and {path.with_suffix('.png')}")
    if options.markdown:
        write_page(options.markdown, [measured])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.time_to_loss",
        description="Compare how soon plain DDP and sparse all-reduces reach a loss.",
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["vgg16", "gpt2"])
    add("--workers", type=int, default=2, help="should have a core each (default: 2)")
    add("--rate", default="1gbit", help="link rate, as tc writes it (default: 1gbit)")
    add("--steps", nargs="+", type=int, default=[60, 100], help="of plain DDP, one or one per model (default: 60 100)")
    add("--variants", nargs="+", help="such as ddp-25mb dear topk:density=0.02 (default: by model)")
    add("--output", type=Path, default=Path("build/time_to_loss"), help="folder for JSON and plot")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page, its plot beside it")
    add("--results", nargs="+", type=Path, metavar="JSON", help="measure nothing: a page of these earlier runs")
    add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
    add("--quick", action="store_true", help="a smoke test: two workers, a tiny model")
    return parser


def _check(variants: Sequence[str]) -> None:
    """Raises a ValueError if these cannot be compared."""
    specs = [parse_variant(name) for name in variants]
    if not any(spec.is_plain_ddp for spec in specs):
        raise ValueError("one variant at least must be plain DDP, such as ddp-25mb")
    for spec in specs:
        if spec.kind == "fsdp2":
            raise ValueError("fsdp2 is not compared here: it is no hook of DDP")
        if missing := why_unavailable(spec):
            raise ValueError(f"{spec.name}: {missing}")


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """Cells of the table of one run of the program."""
    return [row for model, measured in found.items() for row in table_rows(model, measured)]


def table_rows(model: str, measured: dict[str, Any]) -> list[list[str]]:
    """One row per run; a run that did not get there says so."""
    runs = measured["runs"]
    best = runs[measured["best"]]
    dense_s = best["times_s"][best["reached"]]
    rows = []
    for name, run in runs.items():
        reached = run["reached"]
        if reached is None:
            rows.append([model, name, "", f"{run['step_s']:.2f}", f"{run['averaged'][-1]:.4f}", "not reached", ""])
            continue
        seconds, loss = run["times_s"][reached], run["averaged"][reached]
        rows.append([
            model,
            name,
            str(reached + 1),
            f"{run['step_s']:.2f}",
            f"{loss:.4f}",
            f"{seconds:.1f}",
            f"{dense_s / seconds:.2f}",
        ])
    return rows


def show(title: str, rows: list[list[str]]) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index < 2 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel per model: averaged losses over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [panel for run in runs for panel in run["found"].items()]
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 4.6 * len(panels), 3.8), squeeze=False)
    for ax, (model, measured) in zip(axes[0], panels, strict=True):
        for name, run in measured["runs"].items():
            ax.plot(run["times_s"], run["averaged"], label=name)
        ax.axhline(measured["target"], color="black", linewidth=1, linestyle=":")
        ax.set_title(f"{model}, {measured['num_parameters'] / 1e6:.0f} M parameters", fontsize=9)
        ax.set_xlabel("seconds")
        ax.set_ylabel("loss")
        ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def write_page(path: Path, runs: Sequence[dict[str, Any]]) -> None:
    """A page with tables and plot of one run or several, and what it takes to repeat them."""
    plot(runs, path.with_suffix(".png"))
    sections = ["# Time to loss", INTRODUCTION, f"![Losses over time]({path.with_suffix('.png').name})"]
    for run in runs:
        table = [f"| {' | '.join(COLUMNS)} |", f"| :-- | :-- |{' --: |' * (len(COLUMNS) - 2)}"]
        table += [f"| {' | '.join(row)} |" for row in rows_of(run["found"])]
        versions = ", ".join(f"{name} {value}" for name, value in run["environment"].items())
        sections += [f"## {', '.join(run['found'])}, {run['title']}", "\n".join(table)]
        sections += [f"```\n{run['command']}\n```", f"{run['created']}; {versions}."]
    path.write_text("\n\n".join(sections) + "\n")
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
