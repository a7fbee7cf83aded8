"""A network of which every step uses some branches: DDP that looks for unused parameters, and coordination.

    python -m recipes.benchmarks.conditional
    python -m recipes.benchmarks.conditional --workers 8 --rate 2.5gbit --choices rank
    python -m recipes.benchmarks.conditional --quick --loopback

Prints a table for each way to choose branches, and writes JSON and, if asked, a Markdown page.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from recipes.benchmarks.conditional_job import VARIANTS, Choice, ConditionalJob
from recipes.benchmarks.dear_table2 import command, environment, now
from recipes.benchmarks.launch import run_job

COLUMNS = ("variant", "s/step", "min–max", "× the fastest DDP", "CPU s", "MB sent", "weights")
INTRODUCTION = """\
A trunk and eight branches of equal size, of which every rank uses two in a step: all ranks the same two (a task per \
step), or each its own (a task per rank). Gradients, communication and optimizer are real; computing is slept. Every \
worker runs in a network namespace of its own behind a shaped link; all variants in turns in one run, medians over \
windows, of the slowest rank. *ddp-…mb* is `DistributedDataParallel(find_unused_parameters=True)` with buckets of this \
size; *coordinated* is `coordinate(model, optimizer)`. `MB sent`: by the first worker per step, for DDP calculated as \
a ring's. `weights`: a digest of them after training, to four places behind the point."""
CHOICES = {"step": "all ranks use the same two branches", "rank": "every rank uses two branches of its own"}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.quick:
        options.workers, options.steps, options.warmup, options.rounds, options.hidden = 2, 2, 2, 1, 32
        options.compute = 0.002
    rate = None if options.loopback else options.rate
    results = [_measure(options, choice, rate) for choice in options.choices]
    report = {
        "command": command("conditional", arguments),
        "created": now(),
        "environment": environment(),
        "results": results,
    }
    for result in results:
        show(result)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "conditional.json"
    path.write_text(json.dumps(report, indent=1))
    print(f"Wrote {path}")
    if options.markdown:
        options.markdown.write_text(markdown(report))
        print(f"Wrote {options.markdown}")


def _measure(options: argparse.Namespace, choice: Choice, rate: str | None) -> dict[str, Any]:
    job = ConditionalJob(
        tuple(options.variants), choice, hidden=options.hidden, compute_s=options.compute,
        rounds=options.rounds, warmup_steps=options.warmup, timed_steps=options.steps,
    )  # fmt: skip
    try:
        measured = run_job(job, options.workers, rate, "recipes.benchmarks.conditional_worker")
    except RuntimeError as error:  # also ClusterUnavailable, which says what is missing
        sys.exit(f"error: {error}")
    title = f"{CHOICES[choice]}, {options.workers} workers, {rate or 'loopback'}".capitalize()
    return {"title": title, "job": asdict(job), "workers": options.workers, **measured}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.conditional", description="Compare ways to train a conditional network."
    )
    add = parser.add_argument
    add("--workers", type=int, default=4)
    add("--rate", default="1gbit", help="link rate, as tc writes it (default: 1gbit)")
    add("--choices", nargs="+", choices=get_args(Choice), default=list(get_args(Choice)), help="who draws branches")
    add("--hidden", type=int, default=1024, help="size of layers (default: 1024)")
    add("--compute", type=float, default=0.05, help="seconds of the trunk and of each branch (default: 0.05)")
    add("--steps", type=int, default=10, help="timed steps per window (default: 10)")
    add("--warmup", type=int, default=8, help="untimed steps before each window (default: 8)")
    add("--rounds", type=int, default=3, help="windows per variant (default: 3)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--output", type=Path, default=Path("build/conditional"), help="folder for JSON")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page")
    add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
    add("--quick", action="store_true", help="a smoke test: a tiny network, few steps")
    return parser


def table_rows(result: dict[str, Any]) -> list[list[str]]:
    """One row per variant: medians over rounds."""
    windows = result["windows"]
    medians = {name: statistics.median(window["step_s"] for window in windows[name]) for name in windows}
    rivals = [median for name, median in medians.items() if name.startswith("ddp")]
    workers, nbytes = result["workers"], result["parameter_bytes"]
    rows = []
    for name, each in windows.items():
        sent_mb = each[-1]["sent_mb"] or 2 * (workers - 1) / workers * nbytes / 1e6
        steps_s = [window["step_s"] for window in each]
        rows.append([
            name,
            f"{medians[name]:.3f}",
            f"{min(steps_s):.3f}–{max(steps_s):.3f}",
            f"{min(rivals) / medians[name]:.2f}" if rivals else "",
            f"{statistics.median(window['cpu_s'] for window in each):.2f}",
            f"{sent_mb:.1f}",
            result["digests"][name],
        ])  # fmt: skip
    return rows


def show(result: dict[str, Any]) -> None:
    table = Table(title=result["title"], box=box.SIMPLE_HEAD)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for row in table_rows(result):
        table.add_row(*row)
    Console().print(table)


def markdown(report: dict[str, Any]) -> str:
    """A page with the tables and what it takes to repeat them."""
    versions = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
    sections = ["# Networks that change from step to step", INTRODUCTION]
    for result in report["results"]:
        table = [f"| {' | '.join(COLUMNS)} |", f"| :-- |{' --: |' * (len(COLUMNS) - 1)}"]
        table += [f"| {' | '.join(row)} |" for row in table_rows(result)]
        sections += [f"## {result['title']}", "\n".join(table)]
    sections += ["## Repeating it", f"```\n{report['command']}\n```", f"{report['created']}; {versions}."]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    main()
