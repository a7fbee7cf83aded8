"""The workloads of the DeAR paper's Table II on an emulated cluster: DDP, FSDP2 and DeAR side by side.

    python -m recipes.benchmarks.dear_table2
    python -m recipes.benchmarks.dear_table2 --models resnet50 --rate 2.5gbit --slow 2
    python -m recipes.benchmarks.dear_table2 --variants ddp-25mb dear dear:lanes=1 --dear slice_mb=4
    python -m recipes.benchmarks.dear_table2 --memory
    python -m recipes.benchmarks.dear_table2 --quick --loopback

Prints a table per model, and writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from recipes.benchmarks import workloads
from recipes.benchmarks.job import Job
from recipes.benchmarks.launch import run_job
from recipes.benchmarks.report import plot, print_results, write_markdown
from recipes.benchmarks.results import Report, Result, bounds_of, summarise
from recipes.benchmarks.variants import DEFAULT_VARIANTS, parse_settings, parse_variant, why_unavailable
from recipes.cluster.network import parse_rate

MEMORY_VARIANTS = ("ddp-25mb", "dear")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("dear_table2", "Compare DDP, FSDP2 and DeAR on the DeAR paper's workloads.", DEFAULT_VARIANTS)
    add = parser.add_argument
    add("--dear", nargs="+", default=[], metavar="KEY=VALUE", help="DearConfig fields of all DeAR variants")
    add("--memory", action="store_true", help="peak memory on BERT-base with AdamW instead of times")
    options = parse(parser, arguments)
    if options.memory:
        with exiting():
            compare_memory(options, options.available, options.rates[0])
        return
    results = measure_all(options)
    report = Report(command("dear_table2", arguments), now(), environment(), results)
    save(report, options.output)
    if options.markdown:
        write_markdown([report], options.markdown)
    print_results(results)
    print(f"Wrote {options.output}/dear_table2.json and {options.output}/dear_table2.png")


def make_parser(benchmark: str, description: str, variants: Sequence[str]) -> argparse.ArgumentParser:
    """What benchmarks of whole steps can be asked for."""
    parser = argparse.ArgumentParser(
        prog=f"python -m recipes.benchmarks.{benchmark}", description=f"{description} Compute is emulated."
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=workloads.NAMES, default=list(workloads.PAPER_MODELS))
    add("--workers", type=int, default=4)
    add("--rate", nargs="+", default=["1gbit"], help="link rates, as tc writes them (default: 1gbit)")
    add("--slow", type=float, nargs="+", help="factor on compute time, one or one per model (default: 4 4 10)")
    add("--steps", type=int, default=5, help="timed steps per window (default: 5)")
    add("--warmup", type=int, default=3, help="untimed steps before each window (default: 3)")
    add("--rounds", type=int, default=3, help="windows per variant (default: 3)")
    add("--variants", nargs="+", default=list(variants), help="such as ddp-25mb fsdp2 dear:lanes=1")
    add("--output", type=Path, default=Path("build") / benchmark, help="folder for JSON and plot")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page, its plot beside it")
    add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
    add("--quick", action="store_true", help="a smoke test: two workers, a tiny model, few steps")
    parser.set_defaults(dear=[], foreach=None)
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for, checked, with `slows`, `rates`, and which variants are `available` and `unavailable`."""
    options = parser.parse_args(arguments)
    if options.quick:
        _shrink(options)
    try:
        options.slows = slow_per_model(options.models, options.slow)
        options.dear = parse_settings(options.dear)
        options.available, options.unavailable = sort_out(options.variants, options.dear)
        options.rates = [None] if options.loopback else options.rate
        for rate in filter(None, options.rates):
            parse_rate(rate)
    except ValueError as error:
        parser.error(str(error))
    if not options.available:
        parser.error(f"no variant can run: {options.unavailable}")
    return options


def measure_all(options: argparse.Namespace) -> list[Result]:
    """Every model on every network."""
    with exiting():
        return [
            measure(options, model, slow, options.available, options.unavailable, rate)
            for rate in options.rates
            for model, slow in zip(options.models, options.slows, strict=True)
        ]


@contextmanager
def exiting() -> Iterator[None]:
    """End with what is missing on this machine, or what a worker said."""
    try:
        yield
    except RuntimeError as error:  # also ClusterUnavailable
        sys.exit(f"error: {error}")


def _shrink(options: argparse.Namespace) -> None:
    options.models, options.slow, options.workers = ["tiny"], None, 2
    options.steps, options.warmup, options.rounds = 2, 2, 1


def slow_per_model(models: Sequence[str], slow: Sequence[float] | None) -> list[float]:
    """One factor per model: as given, one for all, or each model's default."""
    if slow is None:
        return [workloads.default_slow(model) for model in models]
    if len(slow) == 1:
        return [slow[0]] * len(models)
    if len(slow) != len(models):
        raise ValueError(f"--slow takes one factor or one per model ({len(models)}), got {len(slow)}")
    return list(slow)


def sort_out(variants: Sequence[str], dear_settings: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """(variants that can run, the others with the reason)."""
    reasons = {name: why_unavailable(parse_variant(name, dear_settings)) for name in variants}
    unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
    return tuple(name for name in reasons if name not in unavailable), unavailable


def measure(
    options: argparse.Namespace,
    model: str,
    slow: float,
    variants: tuple[str, ...],
    unavailable: dict[str, str],
    rate: str | None,
) -> Result:
    """Runs all variants of one model on one network, alternating."""
    workload = workloads.load(model)
    measured = run_job(
        Job(
            workload,
            slow,
            variants,
            rounds=options.rounds,
            warmup_steps=options.warmup,
            timed_steps=options.steps,
            dear_settings=options.dear,
            foreach=options.foreach,
        ),
        options.workers,
        rate,
    )
    goodput: float = measured["goodput_bytes_per_s"]
    link = parse_rate(rate) / 8 if rate else goodput
    bounds = bounds_of(workload, slow, options.workers, link, goodput)
    compute_s = workload.compute_s * slow
    return Result(
        model=model,
        workers=options.workers,
        rate=rate,
        slow=slow,
        steps=options.steps,
        rounds=options.rounds,
        num_layers=len(workload.layers),
        num_tensors=workload.num_tensors,
        parameter_bytes=workload.num_bytes,
        compute_s=compute_s,
        link_bytes_per_s=link,
        goodput_bytes_per_s=goodput,
        bounds=bounds,
        variants=summarise(measured["windows"], compute_s, bounds.dependency),
        unavailable=unavailable,
        windows=measured["windows"],
        details=measured["details"],
    )


def compare_memory(options: argparse.Namespace, available: tuple[str, ...], rate: str | None) -> None:
    """Prints peak memory per rank, of DDP and DeAR or the variants asked for, with AdamW, on BERT-base.

    Bytes in use are what was asked for; resident ones also what the allocator keeps of what was freed.
    """
    workload = workloads.load("tiny" if options.quick else "bert")
    table = Table(
        title=f"Peak memory per rank: {workload.name}, AdamW, {options.workers} workers",
        caption="From the model on; × is in units of the parameters.",
    )
    for column in ("variant", "in use, MB", "×", "resident, MB", "×", "whole process, MB"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    by_default = options.variants == list(DEFAULT_VARIANTS)
    for name in MEMORY_VARIANTS if by_default else available:
        job = Job(workload, 0.0, (name,), memory=True, timed_steps=1, dear_settings=options.dear)
        peak = run_job(job, options.workers, rate)
        cells = [
            cell
            for kind in ("used", "resident")
            for cell in (f"{peak[kind] / 1e6:.0f}", f"{peak[kind] / peak['parameters']:.2f}")
        ]
        table.add_row(name, *cells, f"{peak['all_resident'] / 1e6:.0f}")
    Console().print(table)


def save(report: Report, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    report.save(folder / "dear_table2.json")
    plot(report.results, folder / "dear_table2.png")


def environment() -> dict[str, str]:
    """Versions and hardware, as a performance claim needs them."""
    packages = {name: importlib.metadata.version(name) for name in ("torch", "torchvision", "transformers")}
    return {
        "Python": platform.python_version(),
        **packages,
        "Linux": platform.release(),
        "CPU": f"{_cpu_model()} ({os.cpu_count()} cores)",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def command(benchmark: str, arguments: Sequence[str] | None) -> str:
    """How the benchmark was called."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    return shlex.join(["python", "-m", f"recipes.benchmarks.{benchmark}", *given])


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


if __name__ == "__main__":
    main()
