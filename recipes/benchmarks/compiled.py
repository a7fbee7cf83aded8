"""torch.compile with plain DDP and with DeAR: a real BERT, real compute, on the emulated cluster.

    python -m recipes.benchmarks.compiled
    python -m recipes.benchmarks.compiled --rate 500mbit --variants ddp-25mb:whole dear-25mb:whole dear-5mb:blocks
    python -m recipes.benchmarks.compiled --quick --loopback

A variant is a hook, DDP's bucket size, and what is compiled: `whole` (the DDP module, as Accelerate does it), `blocks`
(each encoder layer by itself) or `eager`. Prints a table, and writes JSON and, if asked, a Markdown page.
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

from recipes.benchmarks.compiled_job import CompiledJob, parse
from recipes.benchmarks.dear_table2 import command, environment, now
from recipes.benchmarks.launch import run_job

DEFAULT_VARIANTS = (
    *(f"ddp-{mb}mb:whole" for mb in (1, 5, 25, 64)),
    *(f"ddp-{mb}mb:blocks" for mb in (5, 25)),
    *(f"dear-{mb}mb:whole" for mb in (5, 25)),
    *(f"dear-{mb}mb:blocks" for mb in (5, 25)),
    "ddp-5mb:eager",
    "dear-5mb:eager",
)
COLUMNS = ("variant", "s/step", "min–max", "× compiled DDP", "graphs")

INTRODUCTION = """\
A BERT of `transformers` learns from random tokens; everything is computed, on one core per worker. Every worker runs \
in a network namespace of its own behind a shaped link. All variants alternate in one run. `× compiled DDP`: how many \
times as fast as the fastest plain DDP that is compiled. `graphs`: how many different ones Dynamo made, before \
DDP's own cuts."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.quick:
        options.workers, options.steps, options.warmup, options.rounds = 2, 1, 2, 1
        options.layers, options.hidden, options.tokens, options.backend = 2, 64, 64, "aot_eager"
        options.variants = ["ddp-25mb:whole", "dear-25mb:whole", "dear-25mb:blocks"]
    try:
        for name in options.variants:
            parse(name)
    except ValueError as error:
        parser.error(str(error))
    job = CompiledJob(
        tuple(options.variants), options.layers, options.hidden, options.tokens, options.backend,
        rounds=options.rounds, warmup_steps=options.warmup, timed_steps=options.steps,
    )  # fmt: skip
    rate = None if options.loopback else options.rate
    try:
        measured = run_job(job, options.workers, rate, "recipes.benchmarks.compiled_worker")
    except RuntimeError as error:  # also ClusterUnavailable, which says what is missing
        sys.exit(f"error: {error}")
    rows = table_rows(measured)
    title = (
        f"BERT with {measured['num_parameters'] / 1e6:.1f} M parameters, {options.tokens} tokens, {options.workers} "
        f"workers, {rate or 'loopback'}, backend {options.backend}"
    )
    show(title, rows)
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "compiled.json"
    path.write_text(json.dumps({"job": asdict(job), **measured}, indent=1))
    print(f"Wrote {path}")
    if options.markdown:
        options.markdown.write_text(markdown(title, rows, command("compiled", arguments)))
        print(f"Wrote {options.markdown}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.compiled", description="Compare compiled DDP and compiled DeAR on a BERT."
    )
    add = parser.add_argument
    add("--workers", type=int, default=2)
    add("--rate", default="1gbit", help="link rate, as tc writes it (default: 1gbit)")
    add("--layers", type=int, default=6, help="encoder layers (default: 6)")
    add("--hidden", type=int, default=512, help="hidden size (default: 512)")
    add("--tokens", type=int, default=512, help="tokens per worker and step, a multiple of 64 (default: 512)")
    add("--steps", type=int, default=5, help="timed steps per window (default: 5)")
    add("--warmup", type=int, default=4, help="untimed steps before each window, which compile (default: 4)")
    add("--rounds", type=int, default=2, help="windows per variant (default: 2)")
    add("--variants", nargs="+", default=list(DEFAULT_VARIANTS), help="such as ddp-25mb:whole dear-5mb:blocks")
    add("--backend", default="inductor", help="of torch.compile (default: inductor, which needs a C++ compiler)")
    add("--output", type=Path, default=Path("build/compiled"), help="folder for JSON")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page")
    add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
    add("--quick", action="store_true", help="a smoke test: a tiny model, few steps, no C++ compiler")
    return parser


def table_rows(measured: dict[str, Any]) -> list[list[str]]:
    """One row per variant: medians over rounds, of the slowest rank."""
    steps_s = {name: [window["step_s"] for window in windows] for name, windows in measured["windows"].items()}
    medians = {name: statistics.median(values) for name, values in steps_s.items()}
    rivals = [median for name, median in medians.items() if parse(name).hook == "ddp" and parse(name).what != "eager"]
    return [
        [
            name,
            f"{medians[name]:.3f}",
            f"{min(values):.3f}–{max(values):.3f}",
            f"{min(rivals) / medians[name]:.3f}" if rivals else "",
            str(measured["graphs"][name]),
        ]
        for name, values in steps_s.items()
    ]


def show(title: str, rows: list[list[str]]) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def markdown(title: str, rows: list[list[str]], call: str) -> str:
    """A page with the table and what it takes to repeat it."""
    table = [f"| {' | '.join(COLUMNS)} |", f"| :-- |{' --: |' * (len(COLUMNS) - 1)}"]
    table += [f"| {' | '.join(row)} |" for row in rows]
    versions = ", ".join(f"{name} {value}" for name, value in environment().items())
    sections = ["# Compiled DDP and compiled DeAR", INTRODUCTION, f"## {title}", "\n".join(table)]
    return "\n\n".join([*sections, "## Repeating it", f"```\n{call}\n```", f"{now()}; {versions}."]) + "\n"


if __name__ == "__main__":
    main()
