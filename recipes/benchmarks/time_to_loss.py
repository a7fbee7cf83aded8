"""How much sooner hooks bring a model to the loss of plain DDP, on slow links.

    python -m recipes.benchmarks.time_to_loss
    python -m recipes.benchmarks.time_to_loss --models gpt2 --rate 500mbit --variants ddp-25mb dear topk:density=0.02
    python -m recipes.benchmarks.time_to_loss --quick --loopback

Everything is computed: a VGG-16 on scikit-learn's digits, a GPT-2 on Python's documentation. Losses by step do not
depend on links, so every variant is trained once, on the loopback interface; steps are timed on every link. Finished
trainings are appended to a file of records. A run that was ended goes on there: give it the same command.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.harness import Benchmark, Run, add_timing, append_record, main_of, read_records, run_job
from recipes.benchmarks.variants import parse_variant, why_unavailable
from recipes.common.pages import Page, Picture, Table, now

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMMON = ("ddp-5mb", "ddp-25mb", "ddp-64mb", "ddp-bf16", "ddp-powersgd", "dear:wire=int8", "dear:wire=int4")
DEFAULT_VARIANTS = {
    # Nine tenths of VGG-16 are its linear layers; the convolutions learn sooner from full gradients. Its optimizer has
    # momentum: summed up before the selection, it needs as many steps as dense training; after it, a third more.
    "vgg16": (*_COMMON, "topk:density=0.01,momentum=0.9,dense_below_numel=3000000"),
    "gpt2": (*_COMMON, "topk:density=0.01"),
    "tiny": ("ddp-25mb", "dear:wire=int8", "topk:density=0.05"),
}
MODELS = tuple(DEFAULT_VARIANTS)
PATIENCE = 1.5  # the others may take this many times as many steps as plain DDP
VALIDATED_EVERY = 20  # steps
WINDOW = 3  # validations over which losses are averaged
COLUMNS = ("variant", "steps", "s/step", "min–max", "loss", "s to loss", "× DDP")

INTRODUCTION = f"""\
Plain DDP trains for a number of steps; its validation loss then is the target for the others, from the same weights \
and on the same batches; learning rates fall to a tenth until then. Losses are those of an average of the weights \
(decay 0.98), over {WINDOW} validations, one every {VALIDATED_EVERY} steps. `steps`: until the average is at the \
target for the first time, at most {PATIENCE} times as many as DDP's. `s to loss`: these steps at the median `s/step`; \
PowerSGD begins after a tenth of the steps, which go at DDP's pace. `× DDP`: how many times sooner than the fastest \
plain DDP. Every variant was trained once, on the loopback interface; its steps were timed on every link, in turns. \
Everything is computed, by all workers on the cores of one machine, with every worker in a network namespace of its \
own behind a shaped link."""


@dataclass(frozen=True)
class CurveJob:
    """One training.

    Args:
        model: of :data:`MODELS`.
        variant: name of a variant; any plain DDP has the same losses.
        steps: of plain DDP.
        workers: how many.
        target: averaged loss at which the training ends; None: it ends after ``steps``.
    """

    model: str
    variant: str
    steps: int
    workers: int
    target: float | None = None


@dataclass(frozen=True)
class TimingJob:
    """Steps of all variants, timed in turns, as in :func:`~recipes.benchmarks.harness.add_timing`."""

    model: str
    variants: tuple[str, ...]
    rounds: int
    steps: int
    warmup: int


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    """Yield one result per model."""
    variants = {model: tuple(options.variants or DEFAULT_VARIANTS[model]) for model in options.models}
    for names in variants.values():
        _check(names)
    if options.train_steps % VALIDATED_EVERY or options.train_steps < WINDOW * VALIDATED_EVERY:
        least = WINDOW * VALIDATED_EVERY
        raise ValueError(
            f"--train-steps must be a multiple of {VALIDATED_EVERY}, at least {least}, got {options.train_steps}"
        )
    from recipes.benchmarks.loss_worker import time_variants  # imports torchvision and transformers

    path = options.records or options.output / "records.jsonl"
    for model, names in variants.items():
        curves = _curves(path, model, names, options.train_steps, workers)
        timing = TimingJob(model, names, options.rounds, options.steps, options.warmup)
        yield {
            "model": model,
            "steps": options.train_steps,
            "curves": curves,
            **run_job(time_variants, timing, workers, rate),
        }


def _curves(path: Path, model: str, variants: Sequence[str], steps: int, workers: int) -> dict[str, Any]:
    """Return every variant's record of a training, from the file, or new; all plain DDP ones have the same."""
    from recipes.benchmarks.loss_worker import train

    known = {
        (record["model"], record["variant"], record["steps"], record["workers"]): record
        for record in read_records(path)
    }
    dense = [name for name in variants if parse_variant(name).is_plain_ddp]
    curves: dict[str, Any] = {}
    for name in (dense[0], *(name for name in variants if name not in dense)):
        target = averaged(curves[dense[0]]["losses"])[-1] if curves else None
        job = CurveJob(model, name, steps, workers, target)
        if (found := known.get((model, name, steps, workers))) is None or found["target"] != target:
            found = {**asdict(job), **run_job(train, job, workers, None), "date": now()}
            append_record(path, found)
        curves[name] = found
    return {name: curves[dense[0] if name in dense else name] for name in variants}


def _check(variants: Sequence[str]) -> None:
    """Raise a ValueError if these cannot be compared."""
    specs = [parse_variant(name) for name in variants]
    if not any(spec.is_plain_ddp for spec in specs):
        raise ValueError("one variant at least must be plain DDP, such as ddp-25mb")
    for spec in specs:
        if spec.kind.startswith("fsdp2"):
            raise ValueError("fsdp2 is not compared here: it is no hook of DDP")
        if missing := why_unavailable(spec):
            raise ValueError(f"{spec.name}: {missing}")


def averaged(losses: Sequence[float]) -> list[float]:
    """Return means over :data:`WINDOW` validations; the first is that of the first full window."""
    return [statistics.fmean(losses[end - WINDOW : end]) for end in range(WINDOW, len(losses) + 1)]


def steps_to(target: float, losses: Sequence[float]) -> int | None:
    """Return the steps after which the average is at most the target for the first time; None if it never is."""
    reached = [index for index, loss in enumerate(averaged(losses)) if loss <= target]
    return (reached[0] + WINDOW) * VALIDATED_EVERY if reached else None


def seconds_to_loss(result: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """Return the steps and seconds that variants needed; those that did not get there are missing."""
    step_s = {name: statistics.median(times) for name, times in result["step_s"].items()}
    dense = fastest_ddp(result)
    target = averaged(result["curves"][dense]["losses"])[-1]
    found = {}
    for name, curve in result["curves"].items():
        if (steps := steps_to(target, curve["losses"])) is not None:
            slow = min(steps, powersgd_after(result["steps"])) if parse_variant(name).kind == "ddp-powersgd" else 0
            found[name] = (steps, slow * step_s[dense] + (steps - slow) * step_s[name])
    return found


def powersgd_after(steps: int) -> int:
    """Return the steps after which PowerSGD begins, where plain DDP takes ``steps``."""
    return max(2, steps // 10)


def fastest_ddp(result: dict[str, Any]) -> str:
    dense = [name for name in result["curves"] if parse_variant(name).is_plain_ddp]
    return min(dense, key=lambda name: statistics.median(result["step_s"][name]))


def table_of(result: dict[str, Any]) -> Table:
    """Return one row per variant; one that did not get there says so."""
    found = seconds_to_loss(result)
    dense_s = found[fastest_ddp(result)][1]
    rows = []
    for name, times_s in result["step_s"].items():
        steps, seconds = found.get(name, (None, None))
        means = averaged(result["curves"][name]["losses"])
        loss = means[-1] if steps is None else means[steps // VALIDATED_EVERY - WINDOW]
        rows.append(
            [
                name,
                "not reached" if steps is None else str(steps),
                f"{statistics.median(times_s):.2f}",
                f"{min(times_s):.2f}–{max(times_s):.2f}",
                f"{loss:.4f}",
                "" if seconds is None else f"{seconds:.0f}",
                "" if seconds is None else f"{dense_s / seconds:.2f}",
            ]
        )
    title = f"{result['model']}, {result['workers']} workers, {result['rate'] or 'loopback'}"
    remark = f"{result['num_parameters'] / 1e6:.0f} M parameters; {result['steps']} steps of plain DDP."
    return Table(title, COLUMNS, rows, [remark])


def page(runs: Sequence[Run]) -> Page:
    results = [result for run in runs for result in run.results]
    picture = Picture("Losses over time", partial(_draw, results), (1 + 4.6 * len(results), 3.8))
    return Page("Time to loss", [INTRODUCTION, picture, *map(table_of, results)], [run.origin for run in runs])


def _draw(results: Sequence[dict[str, Any]], figure: Figure) -> None:
    """Draw a panel per result: averaged losses over time."""
    for ax, result in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        dense = fastest_ddp(result)
        for name, curve in result["curves"].items():
            if name != dense and parse_variant(name).is_plain_ddp:
                continue
            means, step_s = averaged(curve["losses"]), statistics.median(result["step_s"][name])
            ax.plot([(index + WINDOW) * VALIDATED_EVERY * step_s for index in range(len(means))], means, label=name)
        ax.axhline(averaged(result["curves"][dense]["losses"])[-1], color="black", linewidth=1, linestyle=":")
        ax.set_title(f"{result['model']}, {result['rate'] or 'loopback'}", fontsize=9)
        ax.set_xlabel("seconds")
        ax.set_ylabel("validation loss")
        ax.legend(fontsize=7)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["vgg16", "gpt2"], help="what is trained")
    add("--train-steps", type=int, default=400, help=f"of plain DDP, a multiple of {VALIDATED_EVERY}")
    add("--variants", nargs="+", help="such as ddp-25mb dear topk:density=0.02; None: by model")
    add("--records", type=Path, metavar="FILE", help="of finished trainings; None: records.jsonl in the output folder")
    add_timing(parser, rounds=2, steps=2, warmup=2)


BENCHMARK = Benchmark(
    "time_to_loss",
    "Compare how soon plain DDP and other hooks reach a loss.",
    measure,
    page,
    _add_options,
    workers=(2,),
    quick={"models": ["tiny"], "train_steps": 60, "variants": None},
)

if __name__ == "__main__":
    main_of(__spec__)
