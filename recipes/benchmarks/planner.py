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
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_hooks.planning import Costs, Ddp, Dear, SparDL, StepProfile, Strategy, TensorUse, fit_link, simulate
from recipes.benchmarks import workloads
from recipes.benchmarks.harness import Benchmark, Run, add_timing, main_of, run_job
from recipes.benchmarks.steps import StepsJob
from recipes.cluster.network import parse_rate
from recipes.common.pages import Page, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = ("ddp-25mb", "dear", "dear:update=replicated", "topk")
DENSITY = 0.01
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


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    """Yield one result per model."""
    from recipes.benchmarks.planner_worker import measure_and_compare

    timing = (options.rounds, options.warmup, options.steps)
    for model in options.models:
        slow = options.slow or _balanced_slow(model, rate)
        job = StepsJob(workloads.load(model), slow, tuple(options.variants), *timing)
        yield {"model": model, "slow": slow, **run_job(measure_and_compare, job, workers, rate)}


def _balanced_slow(model: str, rate: str | None) -> float:
    """Return a factor with which computing takes about as long as communication."""
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
        """Return True if it was faster by more than a tie, and in every window."""
        return self.measured_s * (1 + TIE) < other.measured_s and self.slowest_s < other.fastest_s

    @property
    def is_dear(self) -> bool:
        """True for the modes of DeAR."""
        return self.variant.startswith("dear")

    @property
    def difference(self) -> float:
        """Relative difference of the prediction."""
        return self.predicted_s / self.measured_s - 1


def compare(run: dict[str, Any]) -> list[Compared]:
    """Return measured and predicted seconds per step of every strategy of a result."""
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
    """Return True if predictions are in the measured order, where times are not too close to tell."""
    return all(
        first.predicted_s < second.predicted_s
        for first, second in itertools.permutations(compared, 2)
        if first.beats(second) and not (first.is_dear and second.is_dear)
    )


def _rows(results: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    for run in results:
        compared = compare(run)
        for place, each in enumerate(compared):
            own = (run["model"], str(run["workers"]), run["rate"] or "loopback", f"{run['slow']:g}")
            own = own if not place else ("",) * 4
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


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Count the combinations that are close, and in order."""
    runs = [compare(run) for run in results]
    close = sum(all(abs(each.difference) <= CLOSE for each in compared) for compared in runs)
    ordered = sum(map(is_ordered, runs))
    most = max(abs(each.difference) for compared in runs for each in compared)
    return (
        f"Within {CLOSE:.0%} for every strategy: {close} of {len(runs)} combinations; the largest difference is "
        f"{most:.1%}. In order: {ordered} of {len(runs)}."
    )


def page(runs: Sequence[Run]) -> Page:
    results = [result for run in runs for result in run.results]
    table = Table("Predicted and measured", COLUMNS, list(_rows(results)), [summary(results)])
    picture = Picture("Predicted by measured seconds per step", partial(_draw, results), (5.5, 5))
    return Page("The planner's predictions", [INTRODUCTION, picture, table], [run.origin for run in runs])


def _draw(results: Sequence[dict[str, Any]], figure: Figure) -> None:
    compared = [each for result in results for each in compare(result)]
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



def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser, rounds=2, steps=3, warmup=2)
    add = parser.add_argument
    models = ["resnet50", "densenet201"]
    add("--models", nargs="+", choices=workloads.NAMES, default=models, help="what is trained")
    add("--slow", type=float, help="factor on compute time; None: in balance with communication at each rate")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="ways to train")


BENCHMARK = Benchmark(
    "planner",
    "What the planner predicts, beside measured steps.",
    measure,
    page,
    _add_options,
    quick={"models": ["tiny"], "slow": 1.0},
)

if __name__ == "__main__":
    main_of(__spec__)
