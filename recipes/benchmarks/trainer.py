"""transformers' Trainer, plain and with hooks: a real GPT-2, real compute, on the emulated cluster.

    python -m recipes.benchmarks.trainer
    python -m recipes.benchmarks.trainer --rate 500mbit --variants plain dear topk
    python -m recipes.benchmarks.trainer --quick --loopback

All variants alternate in one run. Prints a table, and writes JSON and, if asked, a Markdown page.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
from recipes.benchmarks.trainer_job import VARIANTS, TrainerJob

COLUMNS = ("variant", "s/step", "min–max", "× the fastest plain one", "training loss")

INTRODUCTION = """\
A GPT-2 of `transformers` learns from random tokens in a `Trainer`; everything is computed, on one core per worker.
Every worker runs in a network namespace of its own behind a shaped link. A fresh Trainer per variant and round, all
variants in turns in one run; seconds are medians of steps, of the slowest rank. *plain* is the Trainer as it comes,
which looks for unused parameters in every step; the other plain ones are told not to. `× the fastest plain one`: how
many times as fast. *topk*, sparse all-reduce with a hundredth of the elements, is not exact; the losses of all others
are equal."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    if options.quick:
        options.workers, options.steps, options.warmup, options.rounds = 2, 2, 2, 1
        options.layers, options.hidden, options.tokens = 1, 64, 64
    job = TrainerJob(
        tuple(options.variants), options.layers, options.hidden, options.tokens,
        rounds=options.rounds, warmup_steps=options.warmup, timed_steps=options.steps,
    )  # fmt: skip
    rate = None if options.loopback else options.rate
    try:
        measured = run_job(job, options.workers, rate, "recipes.benchmarks.trainer_worker")
    except RuntimeError as error:  # also ClusterUnavailable, which says what is missing
        sys.exit(f"error: {error}")
    title = (
        f"GPT-2 with {measured['num_parameters'] / 1e6:.1f} M parameters, {options.tokens} tokens, {options.workers} "
        f"workers, {rate or 'loopback'}"
    )
    made: dict[str, Any] = {"command": command("trainer", arguments), "created": now(), "environment": environment()}
    report = {"title": title, **made, "job": asdict(job), **measured}
    show(title, table_rows(measured))
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "trainer.json"
    path.write_text(json.dumps(report, indent=1))
    print(f"Wrote {path}")
    if options.markdown:
        options.markdown.write_text(markdown(report))
        print(f"Wrote {options.markdown}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.trainer", description="Compare Trainers, plain and with hooks."
    )
    add = parser.add_argument
    add("--workers", type=int, default=2)
    add("--rate", default="1gbit", help="link rate, as tc writes it (default: 1gbit)")
    add("--layers", type=int, default=6, help="(default: 6)")
    add("--hidden", type=int, default=512, help="hidden size (default: 512)")
    add("--tokens", type=int, default=128, help="per worker and step, a multiple of 64 (default: 128)")
    add("--steps", type=int, default=8, help="timed steps per window (default: 8)")
    add("--warmup", type=int, default=5, help="untimed steps before each window (default: 5)")
    add("--rounds", type=int, default=3, help="windows per variant (default: 3)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--output", type=Path, default=Path("build/trainer"), help="folder for JSON")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page")
    add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
    add("--quick", action="store_true", help="a smoke test: a tiny model, few steps")
    return parser


def table_rows(measured: dict[str, Any]) -> list[list[str]]:
    """One row per variant: medians over rounds."""
    steps_s = {name: [window["step_s"] for window in windows] for name, windows in measured["windows"].items()}
    medians = {name: statistics.median(values) for name, values in steps_s.items()}
    rivals = [median for name, median in medians.items() if VARIANTS[name][1] is None]
    return [
        [
            name,
            f"{medians[name]:.3f}",
            f"{min(values):.3f}–{max(values):.3f}",
            f"{min(rivals) / medians[name]:.3f}" if rivals else "",
            f"{measured['windows'][name][-1]['loss']:.4f}",
        ]
        for name, values in steps_s.items()
    ]


def show(title: str, rows: list[list[str]]) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def markdown(report: dict[str, Any]) -> str:
    """A page with the table and what it takes to repeat it."""
    table = [f"| {' | '.join(COLUMNS)} |", f"| :-- |{' --: |' * (len(COLUMNS) - 1)}"]
    table += [f"| {' | '.join(row)} |" for row in table_rows(report)]
    versions = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
    sections = ["# Trainer, plain and with hooks", INTRODUCTION, f"## {report['title']}", "\n".join(table)]
    sections += ["## Repeating it", f"```\n{report['command']}\n```", f"{report['created']}; {versions}."]
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    main()
