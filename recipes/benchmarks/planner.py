"""What the planner predicts, beside what was measured: DDP, DeAR and SparDL on the DeAR paper's workloads.

    python -m recipes.benchmarks.planner
    python -m recipes.benchmarks.planner --models resnet50 --workers 2 8 --rate 250mbit --slow 16
    python -m recipes.benchmarks.planner --quick --loopback
    python -m recipes.benchmarks.planner --results FIRST.json SECOND.json --markdown PAGE.md

On every network the planner measures link, processor and the step's layers, as `python -m ddp_hooks plan` does; then
every strategy trains, all of them alternating. The simulator sees the first only. Compute is emulated: layers sleep.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ddp_hooks.planning import Costs, Ddp, Dear, SparDL, StepProfile, Strategy, TensorUse, fit_link, simulate
from recipes.benchmarks import workloads
from recipes.benchmarks.dear_table2 import command, environment, now
from recipes.benchmarks.launch import run_job
from recipes.benchmarks.planner_job import DENSITY, VARIANTS, PlannerJob
from recipes.cluster.network import parse_rate

STRATEGIES: dict[str, Strategy] = {
    "ddp-25mb": Ddp(25.0),
    "dear": Dear(),
    "dear:update=replicated": Dear("replicated"),
    "topk": SparDL(DENSITY),
}
CLOSE = 0.10  # what a prediction may be off by
TIE = 0.03  # measured times that differ by less are in no order, nor are those whose windows overlap
COLUMNS = (
    *("model", "workers", "rate", "slow", "strategy"),
    *("measured, s", "min–max", "predicted, s", "difference", "order"),
)

INTRODUCTION = f"""\
Parameter shapes and layer order are those of the real models; gradients, communication and optimizer (SGD with
momentum) are real, every layer sleeps for its share of the computing time. Before the timed steps of each round the
planner measures what `python -m ddp_hooks plan` measures: seconds per message and per byte of the link, and how much of
a latency it makes up for; seconds of the processor per message, and per byte that is sent, added up, copied or selected
from; and when layers compute, from real steps without communication. From that alone the simulator predicts. Measured
seconds per step are medians over rounds, of the slowest worker; predictions are means over rounds, each from its own
measurement, made when the page was. SparDL keeps {DENSITY:.0%}.

*order*: whether strategies come out in the order that was measured, where these times differ by more than {TIE:.0%} and
their windows do not overlap, since an order that the next window turns round is none; the two modes of DeAR, whose
times hardly differ, are not ranked against each other.

At 2.5 Gbit/s and with eight workers two cores carry 2.5 GB/s for all of them: there the processor limits. The model
includes what it does for messages, bytes, sums and selections, the kernel's interrupts among it, and that a worker's
training and its lanes take turns on its share of a core."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.results:
        if not options.markdown:
            parser.error("--results makes a page of what was measured before: say where with --markdown")
        write_page(options.markdown, [json.loads(path.read_text()) for path in options.results])
        return
    if options.quick:
        options.models, options.slow, options.workers = ["tiny"], 1.0, [2]
        options.steps, options.rounds = 2, 1
    try:
        for rate in options.rate:
            parse_rate(rate)
    except ValueError as error:
        parser.error(str(error))
    rates: list[str | None] = [None] if options.loopback else options.rate
    report = {"command": command("planner", arguments), "created": now(), "environment": environment(), "runs": []}
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "planner.json"
    for model in options.models:
        for workers in options.workers:
            for rate in rates:
                slow = options.slow or _balanced_slow(model, rate)
                job = PlannerJob(
                    workloads.load(model),
                    slow,
                    tuple(options.variants),
                    options.rounds,
                    timed_steps=options.steps,
                )
                try:
                    found = run_job(job, workers, rate, "recipes.benchmarks.planner_worker")
                except RuntimeError as error:  # also ClusterUnavailable, which says what is missing
                    sys.exit(f"error: {error}")
                place = {"model": model, "workers": workers, "rate": rate or "loopback", "slow": slow}
                report["runs"].append(place | found)  # type: ignore[attr-defined]
                path.write_text(json.dumps(report))  # what was measured is kept, whatever comes next
    show([report])
    print(f"Wrote {path}")
    if options.markdown:
        write_page(options.markdown, [report])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.planner", description="What the planner predicts, beside measured steps."
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=workloads.NAMES, default=["resnet50", "densenet201"])
    add("--workers", type=int, nargs="+", default=[4])
    add("--rate", nargs="+", default=["1gbit"], help="link rates, as tc writes them (default: 1gbit)")
    add("--slow", type=float, help="factor on compute time (default: in balance with communication at each rate)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--steps", type=int, default=3, help="timed steps per window (default: 3)")
    add("--rounds", type=int, default=2, help="windows per strategy (default: 2)")
    add("--output", type=Path, default=Path("build/planner"), help="folder for JSON")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page, its plot beside it")
    add("--results", type=Path, nargs="+", metavar="JSON", help="make the page of these instead of measuring")
    add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
    add("--quick", action="store_true", help="a smoke test: two workers, a tiny model, few steps")
    return parser


def _balanced_slow(model: str, rate: str | None) -> float:
    """Computing that takes about as long as communication does."""
    return workloads.default_slow(model) * (1e9 / parse_rate(rate) if rate else 1.0)


@dataclass(frozen=True)
class Compared:
    """One strategy in one run."""

    variant: str
    name: str
    measured_s: float
    fastest_s: float
    slowest_s: float
    predicted_s: float

    def beats(self, other: Compared) -> bool:
        """Whether measurements say that it is faster: by more than a tie, and in every window."""
        return self.measured_s * (1 + TIE) < other.measured_s and self.slowest_s < other.fastest_s

    @property
    def is_dear(self) -> bool:
        """Whether it is one of DeAR's modes."""
        return self.variant.startswith("dear")

    @property
    def difference(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_s / self.measured_s - 1


def compare(run: dict[str, Any]) -> list[Compared]:
    """Measured and predicted seconds per step of every strategy of a run."""
    result = []
    for variant, windows in run["windows"].items():
        strategy = STRATEGIES[variant]
        seconds = [window["step_s"] for window in windows]
        predicted = statistics.mean(_predict(strategy, measured, run["workers"]) for measured in run["measured"])
        result.append(
            Compared(variant, strategy.name, statistics.median(seconds), min(seconds), max(seconds), predicted)
        )
    return result


def _predict(strategy: Strategy, measured: dict[str, Any], workers: int) -> float:
    network = fit_link({int(size): seconds for size, seconds in measured["fit"]["seconds"].items()}).network(workers)
    tensors = tuple(TensorUse(**tensor) for tensor in measured["profile"]["tensors"])
    profile = StepProfile(**{**measured["profile"], "tensors": tensors})
    return simulate(strategy, profile, network, Costs(**measured["costs"])).step_s


def is_ordered(compared: Sequence[Compared]) -> bool:
    """Whether predictions are in the order of what was measured, but for times that are too close to tell."""
    return all(
        first.predicted_s < second.predicted_s
        for first, second in itertools.permutations(compared, 2)
        if first.beats(second) and not (first.is_dear and second.is_dear)
    )


def _rows(reports: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for run in (run for report in reports for run in report["runs"]):
        compared = compare(run)
        for place, each in enumerate(compared):
            own = (run["model"], str(run["workers"]), run["rate"], f"{run['slow']:g}") if not place else ("",) * 4
            order = "" if place else "right" if is_ordered(compared) else "wrong"
            yield [
                *own,
                each.name,
                f"{each.measured_s:.3f}",
                f"{each.fastest_s:.3f}–{each.slowest_s:.3f}",
                f"{each.predicted_s:.3f}",
                f"{each.difference:+.1%}",
                order,
            ]


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """How many combinations are close, and in order."""
    runs = [compare(run) for report in reports for run in report["runs"]]
    close = sum(all(abs(each.difference) <= CLOSE for each in compared) for compared in runs)
    ordered = sum(map(is_ordered, runs))
    most = max(abs(each.difference) for compared in runs for each in compared)
    return (
        f"Within {CLOSE:.0%} for every strategy: {close} of {len(runs)} combinations; the largest difference is "
        f"{most:.1%}. In order: {ordered} of {len(runs)}."
    )


def show(reports: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    table = Table(title="Predicted and measured", caption=summary(reports))
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if index in (0, 4) else "right")
    for row in _rows(reports):
        table.add_row(*row)
    Console().print(table)


def write_page(path: Path, reports: Sequence[dict[str, Any]]) -> None:
    """A Markdown page, its plot beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plot(reports, path.with_suffix(".png"))
    head = [f"| {' | '.join(COLUMNS)} |", "| :-- | --: | --: | --: | :-- |" + " --: |" * 4 + " :-- |"]
    table = "\n".join([*head, *(f"| {' | '.join(row)} |" for row in _rows(reports))])
    picture = f"![Predicted by measured seconds per step]({path.stem}.png)"
    sections = ["# The planner's predictions", INTRODUCTION, summary(reports), picture, table, "## Repeating it"]
    for report in reports:
        versions = ", ".join(f"{name} {value}" for name, value in report["environment"].items())
        sections.append(f"```\n{report['command']}\n```\n\n{report['created']}; {versions}.")
    path.write_text("\n\n".join(sections) + "\n")


def plot(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted by measured seconds, and what is close."""
    from matplotlib.figure import Figure

    compared = [each for report in reports for run in report["runs"] for each in compare(run)]
    figure = Figure(figsize=(5.5, 5), layout="constrained")
    ax = figure.subplots()
    for variant, marker in zip(STRATEGIES, "osD^", strict=True):
        own = [each for each in compared if each.variant == variant]
        if own:
            ax.plot(
                [e.measured_s for e in own], [e.predicted_s for e in own], marker, label=own[0].name, markersize=5
            )
    ends = [min(each.measured_s for each in compared) * 0.8, max(each.measured_s for each in compared) * 1.25]
    ax.plot(ends, ends, color="black", linewidth=0.8)
    below, above = ([end * (1 + sign * CLOSE) for end in ends] for sign in (-1, 1))
    ax.fill_between(ends, below, above, alpha=0.15, color="gray", label=f"± {CLOSE:.0%}")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("measured seconds per step")
    ax.set_ylabel("predicted")
    ax.legend(fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
