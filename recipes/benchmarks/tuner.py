"""The bucket tuner on the workloads of the DeAR paper: what it finds, beside every size of a grid.

    python -m recipes.benchmarks.tuner
    python -m recipes.benchmarks.tuner --models resnet50 --rate 2.5gbit --slow 2
    python -m recipes.benchmarks.tuner --quick --loopback

A live search per model on an emulated cluster, then its choice and a grid of sizes, alternating in the same run; and
the recorded curve searched again by Gaussian process, at random and in order, with ten seeds (zhang2023dear, Fig. 10).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.benchmarks import workloads
from recipes.benchmarks.harness import Benchmark, Run, main_of, run_job
from recipes.benchmarks.steps import slow_per_model, title_of
from recipes.benchmarks.tuner_replay import NEAR, Curve, SearchName, trials_needed
from recipes.benchmarks.workloads import Workload
from recipes.common.pages import Page, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER_ADVICE_S = 0.207  # "the average cost of BO is 0.207 seconds per trial" (section VI-G)
SEEDS = range(10)

FOUND_COLUMNS = (
    *("model", "found", "s/step", "best of grid", "s/step", "found ÷ best"),
    *("predicted", "predicted ÷ best", "without", "s/step", "trials"),
)
COST_COLUMNS = (
    *("model", "GP from the prediction", "GP", "random", "grid"),
    *("decide", "paper", "import", "s per trial", "steps of the search"),
)
BARS = (NEAR, 0.01)  # how near to the best size counts

INTRODUCTION = """\
A live search (`DearConfig(tuner=…)`) on each of the DeAR paper's workloads, which begins where the cost model predicts
the fastest step (`ddp_hooks.planning.predicted_start`, from the link and the layers as they are measured before), then
in the same run what it has found, what was predicted, the size that is used without a tuner, and twelve sizes from 1 to
100 MB, in turns, up and down the range; sizes that make the same groups are one. All of them with the smaller atoms
that a tuner asks for. Gradients, communication and optimizer are real; every layer sleeps for its share of the
computing time. *found ÷ best*: at most 1.03 is within 3 % of the best size of the grid. *trials*: of the search,
and of the check at its end. Shaded: what repeated windows of one size differ by; where that is as much as sizes differ
by, any choice is one by chance, and the check leaves things as they were.

*GP*, *random*, *grid*: trials until a size within 3 % of the best was tried, then within 1 %, the median of ten seeds,
each search replayed on the recorded curve, with the noise of its windows; 41 stands for more than forty. All begin with
25 MB, but for the one that begins where the cost model says; where 25 MB is within 3 % already, as on BERT, everybody
needs one trial, the least there is, and only the finer bar tells them apart. *decide*: seconds per trial that choosing
the next size takes, in a thread beside training, next to the paper's figure for its own; *import*: seconds to import
what it needs, once, before the first trial; *s per trial*: everything, most of it training steps."""


@dataclass(frozen=True)
class TunerJob:
    """One workload under DeAR: a live search, then every size of a grid and what was found, alternating.

    Args:
        workload: the model.
        slow: factor on its computing time.
        bucket_mb: of DDP.
        steps_per_trial: of the search.
        start: its first trial: what the cost model predicts, or the tuner's default.
        sizes_mb: the grid.
        rounds: how often every size of it is measured.
        steps: steps each time, after one that does not count.
    """

    workload: Workload
    slow: float
    bucket_mb: float
    steps_per_trial: int
    max_trials: int
    sizes_mb: tuple[float, ...]
    rounds: int
    steps: int
    start: str


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    """Yield one result per model."""
    from recipes.benchmarks.tuner_worker import search_and_compare

    sizes_mb = tuple(100 ** (i / (options.sizes - 1)) for i in range(options.sizes))
    search = (options.bucket_mb, options.steps_per_trial, options.max_trials)
    for model, slow in zip(options.models, slow_per_model(options.models, options.slow), strict=True):
        job = TunerJob(
            workloads.load(model), slow, *search, sizes_mb, options.rounds, options.steps, options.start
        )
        found = run_job(search_and_compare, job, workers, rate)
        yield {"model": model, "slow": slow, "sizes_mb": sizes_mb, **found}


def medians_of(result: dict[str, Any]) -> dict[float, float]:
    """Return seconds per step by size, medians over the rounds."""
    return {point["mb"]: statistics.median(point["steps_s"]) for point in result["grid"]}


def found_row(result: dict[str, Any]) -> list[str]:
    """Return what was found, the best size of the grid, and the size that is used without a tuner."""
    steps_s = medians_of(result)
    chosen, default, predicted = result["chosen_mb"], result["default_mb"], result["predicted_mb"]
    best = min(result["sizes_mb"], key=lambda mb: steps_s[mb])
    searched = sum(trial["role"] == "search" for trial in result["trials"])
    return [
        result["model"],
        f"{chosen:.3g} MB",
        f"{steps_s[chosen]:.3f}",
        f"{best:.3g} MB",
        f"{steps_s[best]:.3f}",
        f"{steps_s[chosen] / steps_s[best]:.3f}",
        f"{predicted:.3g} MB",
        f"{steps_s[predicted] / steps_s[best]:.3f}",
        f"{default:.3g} MB",
        f"{steps_s[default]:.3f}",
        f"{searched} + {len(result['trials']) - searched}",
    ]


def cost_row(result: dict[str, Any]) -> list[str]:
    """Return the trials that searches need on the recorded curve, and their costs."""
    curve, predicted_mb = Curve.of(result["grid"]), result["predicted_mb"]
    searches: tuple[tuple[SearchName, float | None], ...]
    searches = (("gp", predicted_mb), ("gp", None), ("random", None), ("grid", None))
    importing_s, *decisions_s = result["advice_s"]
    searched = sum(trial["role"] == "search" for trial in result["trials"])
    trials_s = [trial["trial_s"] for trial in result["trials"]]
    return [
        result["model"],
        *(" / ".join(_replayed(curve, search, start_mb, near) for near in BARS) for search, start_mb in searches),
        f"{sum(decisions_s) / max(1, searched):.3f}",
        f"{PAPER_ADVICE_S}",
        f"{importing_s:.1f}",
        f"{statistics.mean(trials_s):.1f}" if trials_s else "",
        f"{result['search_steps']}",
    ]


def _replayed(curve: Curve, search: SearchName, start_mb: float | None, near: float) -> str:
    needed = [trials_needed(curve, search, seed, start_mb=start_mb, near=near) for seed in SEEDS]
    return f"{statistics.median(needed):g}"


def page(runs: Sequence[Run]) -> Page:
    parts: list[Table] = []
    for run in runs:
        place = f"{run.results[0]['workers']} workers, {run.results[0]['rate'] or 'loopback'}"
        parts += [
            Table(f"What was found, {place}", FOUND_COLUMNS, [found_row(result) for result in run.results]),
            Table(f"Trials to come within 3 % / 1 %, {place}", COST_COLUMNS, list(map(cost_row, run.results))),
        ]
    results = [result for run in runs for result in run.results]
    picture = Picture("Seconds per step by fusion size", partial(_draw, results), (4.5 * len(results), 3.8))
    return Page("The bucket tuner", [INTRODUCTION, picture, *parts], [run.origin for run in runs])


def _draw(results: Sequence[dict[str, Any]], figure: Figure) -> None:
    """Draw per model the curve of the grid, the trials, and what was found."""
    for ax, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        steps_s = medians_of(result)
        sizes = sorted(steps_s)
        low = [min(point["steps_s"]) for point in sorted(result["grid"], key=lambda point: point["mb"])]
        high = [max(point["steps_s"]) for point in sorted(result["grid"], key=lambda point: point["mb"])]
        ax.fill_between(sizes, low, high, alpha=0.2)
        ax.plot(sizes, [steps_s[mb] for mb in sizes], "-", label="grid, alternating")
        for role, marker in (("search", "o"), ("check", "x")):
            trials = [trial for trial in result["trials"] if trial["role"] == role]
            ax.plot([t["mb"] for t in trials], [t["step_s"] for t in trials], marker, label=f"trials, {role}")
        ax.axvline(result["chosen_mb"], color="gray", linestyle=":", label="found")
        ax.axvline(result["predicted_mb"], color="tab:red", linestyle="--", linewidth=1, label="predicted")
        ax.set_xscale("log")
        ax.set_xlabel("fusion size, MB")
        ax.set_ylabel("seconds per step")
        ax.set_title(title_of(result), fontsize=9)
    figure.axes[0].legend(fontsize="small")


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", choices=workloads.NAMES, default=list(workloads.PAPER_MODELS), help="what is trained")
    add("--slow", type=float, nargs="+", help="factor on compute time, one or one per model; None: 4 4 10")
    add("--bucket-mb", type=float, default=5.0, help="of DDP")
    add("--steps-per-trial", type=int, default=10, help="of the search")
    add("--max-trials", type=int, default=10, help="of the search")
    add("--start", choices=["predicted", "25mb"], default="predicted", help="first trial of the live search")
    add("--rounds", type=int, default=3, help="windows per size of the grid")
    add("--steps", type=int, default=3, help="timed steps per window, after one that is not")
    add("--sizes", type=int, default=12, help="of the grid, from 1 to 100 MB")


BENCHMARK = Benchmark(
    "tuner",
    "What the bucket tuner finds, beside a grid of sizes.",
    measure,
    page,
    _add_options,
    quick={"models": ["tiny"], "slow": None, "steps_per_trial": 2, "max_trials": 3, "sizes": 3},
)

if __name__ == "__main__":
    main_of(__spec__)
