"""Peak memory per rank of DDP, DeAR and other variants, with AdamW on BERT-base.

    python -m recipes.benchmarks.memory
    python -m recipes.benchmarks.memory --variants ddp-25mb dear fsdp2
    python -m recipes.benchmarks.memory --quick --loopback
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from recipes.benchmarks import workloads
from recipes.benchmarks.harness import Benchmark, Run, main_of, run_job
from recipes.benchmarks.steps import StepsJob, sort_out
from recipes.common.pages import Page, Table

INTRODUCTION = """\
Bytes that a process takes beyond those before the model was made. *In use* is memory that was asked for; *resident*
also holds memory that the allocator keeps after it was freed. × is in units of the parameters. Every variant runs in
fresh processes, since a resident peak never falls."""


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    from recipes.benchmarks.steps_worker import peak_memory

    variants, _ = sort_out(options.variants, {})
    workload = workloads.load(options.model)
    jobs = {name: StepsJob(workload, 0.0, (name,), steps=1) for name in variants}
    peaks = {name: run_job(peak_memory, job, workers, rate) for name, job in jobs.items()}
    yield {"model": options.model, "parameter_bytes": workload.num_bytes, "peaks": peaks}


def table_of(result: dict[str, Any]) -> Table:
    """Return a row per variant."""
    rows = []
    for name, peak in result["peaks"].items():
        cells = [name]
        for kind in ("used", "resident"):
            cells += [f"{peak[kind] / 1e6:.0f}", f"{peak[kind] / result['parameter_bytes']:.2f}"]
        rows.append([*cells, f"{peak['all_resident'] / 1e6:.0f}"])
    title = f"{result['model']}, AdamW, {result['workers']} workers"
    return Table(title, ("variant", "in use, MB", "×", "resident, MB", "×", "whole process, MB"), rows)


def page(runs: Sequence[Run]) -> Page:
    tables = [table_of(result) for run in runs for result in run.results]
    return Page("Peak memory per rank", [INTRODUCTION, *tables], [run.origin for run in runs])


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=workloads.NAMES, default="bert", help="model")
    parser.add_argument("--variants", nargs="+", default=["ddp-25mb", "dear"], help="ways to train")


BENCHMARK = Benchmark(
    "memory", "Compare peak memory per rank.", measure, page, _add_options, quick={"model": "tiny"}
)

if __name__ == "__main__":
    main_of(__spec__)
