"""A network of which every step uses some branches: DDP that looks for unused parameters, and coordination.

    python -m recipes.benchmarks.conditional
    python -m recipes.benchmarks.conditional --workers 8 --rate 2.5gbit --choices rank
    python -m recipes.benchmarks.conditional --quick --loopback
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from recipes.benchmarks.harness import Benchmark, Run, add_timing, main_of, run_job
from recipes.common.pages import Page, Table

Choice: TypeAlias = Literal["step", "rank"]
VARIANTS = ("ddp-5mb", "ddp-25mb", "coordinated")
COLUMNS = ("variant", "s/step", "min–max", "× the fastest DDP", "CPU s", "MB sent", "weights")
INTRODUCTION = """\
A trunk and eight branches of equal size, of which every rank uses two in a step: all ranks the same two (a task per \
step), or each its own (a task per rank). Gradients, communication and optimizer are real; computing is slept. Every \
worker runs in a network namespace of its own behind a shaped link; all variants in turns in one run, medians over \
windows, of the slowest rank. *ddp-…mb* is `DistributedDataParallel(find_unused_parameters=True)` with buckets of this \
size; *coordinated* is `coordinate(model, optimizer)`. `MB sent`: by the first worker per step, for DDP calculated as \
a ring's. `weights`: a digest of them after training, to four places behind the point."""
CHOICES = {"step": "All ranks use the same two branches", "rank": "Every rank uses two branches of its own"}


@dataclass(frozen=True)
class ConditionalJob:
    """A network of a trunk and branches, of which each step uses some, in several ways, in turns.

    Args:
        variants: of :data:`VARIANTS`.
        choice: who draws the branches: all ranks the same in a step, or every rank its own.
        num_branches: that the network has.
        num_used: of them in a step, by each rank.
        hidden: size of the layers; a branch and the trunk have four of them each.
        compute_s: seconds that the forward and backward of the trunk or of a branch sleep.
        rounds: windows per variant.
        warmup, steps: untimed and timed steps of a window.
    """

    variants: tuple[str, ...]
    choice: Choice
    hidden: int
    compute_s: float
    rounds: int
    warmup: int
    steps: int
    num_branches: int = 8
    num_used: int = 2


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    from recipes.benchmarks.conditional_worker import train_in_turns

    timing = (options.compute, options.rounds, options.warmup, options.steps)
    for choice in options.choices:
        job = ConditionalJob(tuple(options.variants), choice, options.hidden, *timing)
        yield {"choice": choice, **run_job(train_in_turns, job, workers, rate)}


def table_of(result: dict[str, Any]) -> Table:
    """Return one row per variant: medians over rounds."""
    windows, workers = result["windows"], result["workers"]
    medians = {name: statistics.median(window["step_s"] for window in windows[name]) for name in windows}
    rivals = [median for name, median in medians.items() if name.startswith("ddp")]
    rows = []
    for name, each in windows.items():
        sent_mb = each[-1]["sent_mb"] or 2 * (workers - 1) / workers * result["parameter_bytes"] / 1e6
        steps_s = [window["step_s"] for window in each]
        rows.append([
            name,
            f"{medians[name]:.3f}",
            f"{min(steps_s):.3f}–{max(steps_s):.3f}",
            f"{min(rivals) / medians[name]:.2f}" if rivals else "",
            f"{statistics.median(window['cpu_s'] for window in each):.2f}",
            f"{sent_mb:.1f}",
            each[-1]["digest"],
        ])  # fmt: skip
    title = f"{CHOICES[result['choice']]}, {workers} workers, {result['rate'] or 'loopback'}"
    return Table(title, COLUMNS, rows)


def page(runs: Sequence[Run]) -> Page:
    tables = [table_of(result) for run in runs for result in run.results]
    return Page("Networks that change from step to step", [INTRODUCTION, *tables], [run.origin for run in runs])


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser, steps=10, warmup=8)
    add = parser.add_argument
    add("--choices", nargs="+", choices=get_args(Choice), default=list(get_args(Choice)), help="who draws branches")
    add("--hidden", type=int, default=1024, help="size of layers")
    add("--compute", type=float, default=0.05, help="seconds of the trunk and of each branch")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="ways to train")


BENCHMARK = Benchmark(
    "conditional",
    "Compare ways to train a conditional network.",
    measure,
    page,
    _add_options,
    quick={"hidden": 32, "compute": 0.002},
)

if __name__ == "__main__":
    main_of(__spec__)
