"""torch.compile with plain DDP and with DeAR: a real BERT, real compute, on the emulated cluster.

    python -m recipes.benchmarks.compiled
    python -m recipes.benchmarks.compiled --rate 500mbit --variants ddp-25mb:whole dear-25mb:whole dear-5mb:blocks
    python -m recipes.benchmarks.compiled --quick --loopback

A variant is a hook, DDP's bucket size, and what is compiled: `whole` (the DDP module, as Accelerate does it), `blocks`
(each encoder layer by itself) or `eager`.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.benchmarks.harness import Benchmark, Run, add_timing, main_of, run_job
from recipes.common.pages import Page, Table

DEFAULT_VARIANTS = (
    *(f"ddp-{mb}mb:whole" for mb in (1, 5, 25, 64)),
    *(f"ddp-{mb}mb:blocks" for mb in (5, 25)),
    *(f"dear-{mb}mb:whole" for mb in (5, 25)),
    *(f"dear-{mb}mb:blocks" for mb in (5, 25)),
    "ddp-5mb:eager",
    "dear-5mb:eager",
)
INTRODUCTION = """\
A BERT of `transformers` learns from random tokens; everything is computed, on one core per worker. Every worker runs \
in a network namespace of its own behind a shaped link. All variants alternate in one run. `× compiled DDP`: how many \
times as fast as the fastest plain DDP that is compiled. `graphs`: how many different ones Dynamo made, before \
DDP's own cuts."""


@dataclass(frozen=True)
class CompiledVariant:
    """A variant's name, taken apart."""

    hook: str  # "ddp" or "dear"
    bucket_mb: float
    what: str  # is compiled: "whole", "blocks" or "eager"


def parse(name: str) -> CompiledVariant:
    """Take the name of a variant apart."""
    match = re.fullmatch(r"(ddp|dear)-(\d+(?:\.\d+)?)mb:(whole|blocks|eager)", name)
    if match is None:
        raise ValueError(f"variant must read ddp-<size>mb:whole|blocks|eager or dear-<size>mb:…, got {name!r}")
    return CompiledVariant(match[1], float(match[2]), match[3])


@dataclass(frozen=True)
class CompiledJob:
    """All variants of one model on one network."""

    variants: tuple[str, ...]
    layers: int
    hidden: int
    tokens: int  # per worker and step
    backend: str
    rounds: int
    warmup: int  # graphs are compiled in the first steps
    steps: int


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    for name in options.variants:
        parse(name)
    from recipes.benchmarks.compiled_worker import train_in_turns  # imports transformers

    sizes = (options.layers, options.hidden, options.tokens)
    job = CompiledJob(
        tuple(options.variants), *sizes, options.backend, options.rounds, options.warmup, options.steps
    )
    yield {"tokens": job.tokens, "backend": job.backend, **run_job(train_in_turns, job, workers, rate)}


def table_of(result: dict[str, Any]) -> Table:
    """Return one row per variant: medians over rounds, of the slowest rank."""
    steps_s = {name: [window["step_s"] for window in windows] for name, windows in result["windows"].items()}
    medians = {name: statistics.median(values) for name, values in steps_s.items()}
    rivals = [median for name, median in medians.items() if parse(name).hook == "ddp" and parse(name).what != "eager"]
    rows = [
        [
            name,
            f"{medians[name]:.3f}",
            f"{min(values):.3f}–{max(values):.3f}",
            f"{min(rivals) / medians[name]:.3f}" if rivals else "",
            str(result["windows"][name][-1]["graphs"]),
        ]
        for name, values in steps_s.items()
    ]
    title = (
        f"BERT with {result['num_parameters'] / 1e6:.1f} M parameters, {result['tokens']} tokens, "
        f"{result['workers']} workers, {result['rate'] or 'loopback'}, backend {result['backend']}"
    )
    return Table(title, ("variant", "s/step", "min–max", "× compiled DDP", "graphs"), rows)


def page(runs: Sequence[Run]) -> Page:
    tables = [table_of(result) for run in runs for result in run.results]
    return Page("Compiled DDP and compiled DeAR", [INTRODUCTION, *tables], [run.origin for run in runs])


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser, rounds=2, warmup=4)
    add = parser.add_argument
    add("--layers", type=int, default=6, help="encoder layers")
    add("--hidden", type=int, default=512, help="hidden size")
    add("--tokens", type=int, default=512, help="tokens per worker and step, a multiple of 64")
    add("--variants", nargs="+", default=list(DEFAULT_VARIANTS), help="such as ddp-25mb:whole dear-5mb:blocks")
    add("--backend", default="inductor", help="of torch.compile; inductor needs a C++ compiler")


BENCHMARK = Benchmark(
    "compiled",
    "Compare compiled DDP and compiled DeAR on a BERT.",
    measure,
    page,
    _add_options,
    workers=(2,),
    quick={
        **{"steps": 1, "layers": 2, "hidden": 64, "tokens": 64, "backend": "aot_eager"},
        "variants": ["ddp-25mb:whole", "dear-25mb:whole", "dear-25mb:blocks"],
    },
)

if __name__ == "__main__":
    main_of(__spec__)
