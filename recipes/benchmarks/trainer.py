"""transformers' Trainer, plain and with hooks: a real GPT-2, real compute, on the emulated cluster.

    python -m recipes.benchmarks.trainer
    python -m recipes.benchmarks.trainer --rate 500mbit --variants plain dear topk
    python -m recipes.benchmarks.trainer --quick --loopback
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_hooks import DearConfig, TopKConfig
from recipes.benchmarks.harness import Benchmark, Run, add_timing, main_of, run_job
from recipes.common.pages import Page, Table

# Settings of the Trainer, and the hook that is attached to it.
VARIANTS: dict[str, tuple[dict[str, Any], DearConfig | TopKConfig | None]] = {
    "plain": ({}, None),
    "plain, no search for unused": ({"ddp_find_unused_parameters": False}, None),
    "plain, 5 MB buckets": ({"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 5}, None),
    "dear": ({}, DearConfig()),
    "topk": ({}, TopKConfig(density=0.01)),
}

INTRODUCTION = """\
A GPT-2 of `transformers` learns from random tokens in a `Trainer`; everything is computed, on one core per worker.
Every worker runs in a network namespace of its own behind a shaped link. A fresh Trainer per variant and round, all
variants in turns in one run; seconds are medians of steps, of the slowest rank. *plain* is the Trainer as it comes,
which looks for unused parameters in every step; the other plain ones are told not to. `× the fastest plain one`: how
many times as fast. *topk*, sparse all-reduce with a hundredth of the elements, is not exact; the losses of all others
are equal."""


@dataclass(frozen=True)
class TrainerJob:
    """A GPT-2 in several Trainers, in turns."""

    variants: tuple[str, ...]
    layers: int
    hidden: int
    tokens: int  # per worker and step
    rounds: int
    warmup: int
    steps: int


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    from recipes.benchmarks.trainer_worker import train_in_turns  # imports transformers

    sizes = (options.layers, options.hidden, options.tokens)
    job = TrainerJob(tuple(options.variants), *sizes, options.rounds, options.warmup, options.steps)
    yield {"tokens": options.tokens, **run_job(train_in_turns, job, workers, rate)}


def table_of(result: dict[str, Any]) -> Table:
    """Return one row per variant: medians over rounds."""
    steps_s = {name: [window["step_s"] for window in windows] for name, windows in result["windows"].items()}
    medians = {name: statistics.median(values) for name, values in steps_s.items()}
    rivals = [median for name, median in medians.items() if VARIANTS[name][1] is None]
    rows = [
        [
            name,
            f"{medians[name]:.3f}",
            f"{min(values):.3f}–{max(values):.3f}",
            f"{min(rivals) / medians[name]:.3f}" if rivals else "",
            f"{result['windows'][name][-1]['loss']:.4f}",
        ]
        for name, values in steps_s.items()
    ]
    title = (
        f"GPT-2 with {result['num_parameters'] / 1e6:.1f} M parameters, {result['tokens']} tokens, "
        f"{result['workers']} workers, {result['rate'] or 'loopback'}"
    )
    return Table(title, ("variant", "s/step", "min–max", "× the fastest plain one", "training loss"), rows)


def page(runs: Sequence[Run]) -> Page:
    tables = [table_of(result) for run in runs for result in run.results]
    return Page("Trainer, plain and with hooks", [INTRODUCTION, *tables], [run.origin for run in runs])


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser, steps=8, warmup=5)
    add = parser.add_argument
    add("--layers", type=int, default=6, help="of the model")
    add("--hidden", type=int, default=512, help="hidden size")
    add("--tokens", type=int, default=128, help="per worker and step, a multiple of 64")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="ways to train")


BENCHMARK = Benchmark(
    "trainer",
    "Compare Trainers, plain and with hooks.",
    measure,
    page,
    _add_options,
    workers=(2,),
    quick={"layers": 1, "hidden": 64, "tokens": 64},
)

if __name__ == "__main__":
    main_of(__spec__)
