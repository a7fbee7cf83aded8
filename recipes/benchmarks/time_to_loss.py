"""How much sooner a sparse all-reduce, or another hook, brings a model to the loss of plain DDP.

    python -m recipes.benchmarks.time_to_loss
    python -m recipes.benchmarks.time_to_loss --models gpt2 --rate 500mbit --variants ddp-25mb dear topk:density=0.02
    python -m recipes.benchmarks.time_to_loss --quick --loopback

Everything is computed: a VGG-16 on scikit-learn's digits, a GPT-2 on Python's documentation.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.harness import Benchmark, Run, main_of, run_job
from recipes.benchmarks.variants import parse_variant, why_unavailable
from recipes.common.pages import Page, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DENSE = ("ddp-5mb", "ddp-25mb", "ddp-64mb")
DEFAULT_VARIANTS = {
    # Nine tenths of VGG-16 are its linear layers; the convolutions learn sooner from full gradients. Its optimizer has
    # momentum: summed up before the selection, it needs as many steps as dense training; after it, a third more.
    "vgg16": (*DENSE, "topk:density=0.01,momentum=0.9,dense_below_numel=3000000"),
    "gpt2": (*DENSE, "topk:density=0.01"),
    "tiny": ("ddp-25mb", "topk:density=0.05"),
}
STEPS = {"vgg16": 60, "gpt2": 100, "tiny": 30}  # of plain DDP
MODELS = tuple(DEFAULT_VARIANTS)
COLUMNS = ("variant", "steps", "s/step", "loss", "s to loss", "× DDP")

INTRODUCTION = """\
The fastest plain DDP trains for a number of steps; its loss then, averaged over twenty steps and all workers, is the \
target, for it and for the other variants, from the same weights and on the same batches. Everything is computed, by \
all workers on the cores of one machine. Every worker runs in a network namespace of its own behind a shaped link. \
`steps`, `s to loss`: until the average is at the target for the first time; `× DDP`: how many times sooner."""


@dataclass(frozen=True)
class LossJob:
    """One model, trained by every variant from the same weights on the same batches.

    Args:
        model: of :data:`MODELS`.
        variants: plain DDP ones, of which the fastest one is trained to the end, and others.
        steps: of that run; its loss then is what the others are to reach.
        patience: the others may take this many times as many.
        trial_steps: of every plain DDP variant, to find the fastest.
        window: steps over which losses are averaged.
    """

    model: str
    variants: tuple[str, ...]
    steps: int
    patience: float = 1.5
    trial_steps: int = 6
    window: int = 20
    seed: int = 0


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    """Yield one result per model."""
    jobs = [
        LossJob(model, tuple(options.variants or DEFAULT_VARIANTS[model]), options.steps or STEPS[model])
        for model in options.models
    ]
    for job in jobs:
        _check(job.variants)
    from recipes.benchmarks.loss_worker import compare  # imports torchvision and transformers

    for job in jobs:
        yield {"model": job.model, **run_job(compare, job, workers, rate)}


def _check(variants: Sequence[str]) -> None:
    """Raise a ValueError if these cannot be compared."""
    specs = [parse_variant(name) for name in variants]
    if not any(spec.is_plain_ddp for spec in specs):
        raise ValueError("one variant at least must be plain DDP, such as ddp-25mb")
    for spec in specs:
        if spec.kind == "fsdp2":
            raise ValueError("fsdp2 is not compared here: it is no hook of DDP")
        if missing := why_unavailable(spec):
            raise ValueError(f"{spec.name}: {missing}")


def table_of(result: dict[str, Any]) -> Table:
    """Return one row per variant; one that did not get there says so."""
    runs = result["runs"]
    best = runs[result["best"]]
    dense_s = best["times_s"][best["reached"]]
    rows = []
    for name, run in runs.items():
        reached = run["reached"]
        if reached is None:
            rows.append([name, "", f"{run['step_s']:.2f}", f"{run['averaged'][-1]:.4f}", "not reached", ""])
            continue
        seconds, loss = run["times_s"][reached], run["averaged"][reached]
        rows.append([
            name,
            str(reached + 1),
            f"{run['step_s']:.2f}",
            f"{loss:.4f}",
            f"{seconds:.1f}",
            f"{dense_s / seconds:.2f}",
        ])
    return Table(f"{result['model']}, {result['workers']} workers, {result['rate'] or 'loopback'}", COLUMNS, rows)


def page(runs: Sequence[Run]) -> Page:
    results = [result for run in runs for result in run.results]
    picture = Picture("Losses over time", partial(_draw, results), (1 + 4.6 * len(results), 3.8))
    return Page("Time to loss", [INTRODUCTION, picture, *map(table_of, results)], [run.origin for run in runs])


def _draw(results: Sequence[dict[str, Any]], figure: Figure) -> None:
    """Draw a panel per model: averaged losses over time."""
    for ax, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        for name, run in result["runs"].items():
            ax.plot(run["times_s"], run["averaged"], label=name)
        ax.axhline(result["target"], color="black", linewidth=1, linestyle=":")
        ax.set_title(f"{result['model']}, {result['num_parameters'] / 1e6:.0f} M parameters", fontsize=9)
        ax.set_xlabel("seconds")
        ax.set_ylabel("loss")
        ax.legend(fontsize=8)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["vgg16", "gpt2"], help="what is trained")
    add("--steps", type=int, help=f"of plain DDP; None: by model, {STEPS}")
    add("--variants", nargs="+", help="such as ddp-25mb dear topk:density=0.02; None: by model")


BENCHMARK = Benchmark(
    "time_to_loss",
    "Compare how soon plain DDP and other hooks reach a loss.",
    measure,
    page,
    _add_options,
    workers=(2,),
    quick={"models": ["tiny"], "steps": 30, "variants": None},
)

if __name__ == "__main__":
    main_of(__spec__)
