"""The bucket tuner on the workloads of the DeAR paper: what it finds, beside every size of a grid.

    python -m recipes.benchmarks.tuner
    python -m recipes.benchmarks.tuner --models resnet50 --rate 2.5gbit --slow 2
    python -m recipes.benchmarks.tuner --quick --loopback

A live search per model on an emulated cluster, then its choice and a grid of sizes, alternating in the same run; and
the recorded curve searched again by Gaussian process, at random and in order, with ten seeds (zhang2023dear, Fig. 10).
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

from recipes.benchmarks import alternating, workloads
from recipes.benchmarks.dear_table2 import command, environment, now, slow_per_model
from recipes.benchmarks.launch import run_job
from recipes.benchmarks.tuner_job import TunerJob
from recipes.benchmarks.tuner_replay import NEAR, Curve, SearchName, trials_needed

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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.results:
        if not options.markdown:
            parser.error("--results makes a page of what was measured before: say where with --markdown")
        write_page(options.markdown, [json.loads(path.read_text()) for path in options.results])
        return
    if options.quick:
        options.models, options.slow, options.workers = ["tiny"], None, 2
        options.steps_per_trial, options.max_trials, options.rounds, options.steps, options.sizes = 2, 3, 1, 2, 3
    try:
        slows = slow_per_model(options.models, options.slow)
    except ValueError as error:
        parser.error(str(error))
    sizes_mb = tuple(100 ** (i / (options.sizes - 1)) for i in range(options.sizes))
    rate = None if options.loopback else options.rate
    jobs = [
        TunerJob(
            workloads.load(model),
            slow,
            options.bucket_mb,
            options.steps_per_trial,
            options.max_trials,
            sizes_mb,
            options.rounds,
            options.steps,
            options.start,
        )
        for model, slow in zip(options.models, slows, strict=True)
    ]
    try:
        found = [run_job(job, options.workers, rate, "recipes.benchmarks.tuner_worker") for job in jobs]
    except RuntimeError as error:  # also ClusterUnavailable, which says what is missing
        sys.exit(f"error: {error}")
    for job, result in zip(jobs, found, strict=True):
        result |= {"model": job.name, "slow": job.slow}
    measured = {
        "command": command("tuner", arguments),
        "created": now(),
        "environment": environment(),
        "title": f"{options.workers} workers, {rate or 'loopback'}",
        "jobs": [asdict(job) | {"workload": job.name} for job in jobs],
        "found": found,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "tuner.json"
    path.write_text(json.dumps(measured, indent=1))
    plot([measured], path.with_suffix(".png"))
    show(measured)
    print(f"Wrote {path} and {path.with_suffix('.png')}")
    if options.markdown:
        write_page(options.markdown, [measured])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.tuner", description="What the bucket tuner finds, beside a grid of sizes."
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=workloads.NAMES, default=list(workloads.PAPER_MODELS))
    add("--workers", type=int, default=4)
    add("--rate", default="1gbit", help="link rate, as tc writes it (default: 1gbit)")
    add("--slow", type=float, nargs="+", help="factor on compute time, one or one per model (default: 4 4 10)")
    add("--bucket-mb", type=float, default=5.0, help="of DDP (default: 5)")
    add("--steps-per-trial", type=int, default=10, help="of the search (default: 10)")
    add("--max-trials", type=int, default=10, help="of the search (default: 10)")
    add("--start", choices=["predicted", "25mb"], default="predicted", help="first trial of the live search")
    add("--sizes", type=int, default=12, help="of the grid, from 1 to 100 MB (default: 12)")
    add("--rounds", type=int, default=3, help="windows per size of the grid (default: 3)")
    add("--steps", type=int, default=3, help="timed steps per window, after one that is not (default: 3)")
    add("--output", type=Path, default=Path("build/tuner"), help="folder for JSON and plot")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page, its plot beside it")
    add("--results", type=Path, nargs="+", metavar="JSON", help="make the page of these instead of measuring")
    add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
    add("--quick", action="store_true", help="a smoke test: two workers, a tiny model, few steps")
    return parser


def medians_of(result: dict[str, Any]) -> dict[float, float]:
    """Seconds per step by size, medians over the rounds."""
    return {point["mb"]: statistics.median(point["steps_s"]) for point in result["grid"]}


def found_row(result: dict[str, Any], sizes_mb: Sequence[float]) -> list[str]:
    """What was found, the best size of the grid, and the size that is used without a tuner."""
    steps_s = medians_of(result)
    chosen, default, predicted = result["chosen_mb"], result["default_mb"], result["predicted_mb"]
    best = min(sizes_mb, key=lambda mb: steps_s[mb])
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
    """How many trials searches need on the recorded curve, and what they cost."""
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


def show(measured: dict[str, Any]) -> None:
    """Print the tables."""
    for title, columns, rows in _tables(measured):
        alternating.show(title, columns, rows)


def _tables(measured: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    pairs = list(zip(measured["jobs"], measured["found"], strict=True))
    return [
        (f"What was found, {measured['title']}", FOUND_COLUMNS, [found_row(r, job["sizes_mb"]) for job, r in pairs]),
        (f"Trials to come within 3 % / 1 %, {measured['title']}", COST_COLUMNS, [cost_row(r) for _, r in pairs]),
    ]


def plot(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Per model: the curve of the grid, the trials, and what was found."""
    from matplotlib.figure import Figure

    panels = [(report["title"], result) for report in reports for result in report["found"]]
    figure = Figure(figsize=(4.5 * len(panels), 3.8), layout="constrained")
    for ax, (title, result) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
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
        ax.set_title(f"{result['model']}, {title}, slow {result['slow']:g}", fontsize=9)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)


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


def write_page(path: Path, reports: Sequence[dict[str, Any]]) -> None:
    """A page with all tables, and its plot beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(reports, path.with_suffix(".png"))
    sections = ["# The bucket tuner", INTRODUCTION, f"![Seconds per step by fusion size]({path.stem}.png)"]
    for report in reports:
        for title, columns, rows in _tables(report):
            head = [f"## {title}", "", f"| {' | '.join(columns)} |", "| --- |" + " --: |" * (len(columns) - 1)]
            sections.append("\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]))
    sections.append("## Repeating it")
    for report in reports:
        versions = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
        sections.append(f"```\n{report['command']}\n```\n\n{report['created']}; {versions}.")
    path.write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__":
    main()
