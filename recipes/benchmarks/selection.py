"""How long one core selects: residual plus gradient, the largest entries, their positions and values.

    python -m recipes.benchmarks.selection
    python -m recipes.benchmarks.selection --numel 100e6 --density 0.001 --device cuda

Everything alternates in one process with one thread. `ours` does three things: it adds the gradient to the residual,
finds exactly the k largest magnitudes, and copies them out; `abs().sum()` only reads the vector once, and
`torch.topk` and `np.argpartition` only find positions. Prints a table, and if asked writes a Markdown page.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.selection import BlockSelector
from recipes.benchmarks.dear_table2 import command, environment, now

COLUMNS = ("what", "ms", "min–max", "× abs().sum()")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.selection", description="Time selections.")
    add = parser.add_argument
    add("--numel", type=float, default=25e6, help="length of the vector, float32 (default: 25e6)")
    add("--density", type=float, default=0.01, help="part to select (default: 0.01)")
    add("--rounds", type=int, default=9, help="timed runs of each (default: 9)")
    add("--device", default="cpu", help="where the vector lies (default: cpu)")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page")
    options = parser.parse_args(arguments)
    if not 0 < options.density <= 1:
        parser.error(f"--density must be in (0, 1], got {options.density}")
    torch.set_num_threads(1)
    numel, device = int(options.numel), torch.device(options.device)
    rows = rows_of(measure(numel, options.density, options.rounds, device))
    title = f"{numel / 1e6:g} M float32, {options.density:g} selected, {device.type}"
    table = Table(title=title)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if options.markdown:
        lines = [f"| {' | '.join(COLUMNS)} |", "| :-- | --: | --: | --: |", *(f"| {' | '.join(row)} |" for row in rows)]
        versions = ", ".join(f"{name} {value}" for name, value in environment().items())
        called = f"```\n{command('selection', arguments)}\n```"
        sections = ["# Selections", INTRODUCTION, f"## {title}", "\n".join(lines), "## Repeating it", called]
        options.markdown.write_text("\n\n".join([*sections, f"{now()}; {versions}."]) + "\n")


INTRODUCTION = """\
One thread; all alternate in one run, and the table shows medians. `ours` adds the gradient to the residual, finds \
exactly the largest magnitudes, and copies out their positions and values. `abs().sum()` reads the vector once; \
`torch.topk` and `np.argpartition` find positions only, of magnitudes that are there already."""


def measure(numel: int, density: float, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every run."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(numel, generator=generator)
    gradient.mul_(torch.randn(numel, generator=generator).abs_())  # heavier tails, as gradients have them
    gradient = gradient.to(device)
    residual, magnitudes, k = torch.zeros_like(gradient), gradient.abs(), max(1, round(density * numel))

    def ours() -> None:
        chosen = BlockSelector(residual, (0, numel), (k,), Scattered((gradient,))).select(0)
        assert len(chosen) == k

    ways: dict[str, Callable[[], object]] = {
        "abs().sum()": lambda: gradient.abs().sum(),
        "ours": ours,
        "torch.topk": lambda: torch.topk(magnitudes, k, sorted=False),
    }
    if device.type == "cpu":
        array: Tensor = magnitudes
        ways["np.argpartition"] = lambda: np.argpartition(array.numpy(), numel - k)
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for index in track(range(rounds + 1), description="rounds"):  # the first one warms up
        for name, way in ways.items():
            residual.zero_()
            _wait_for(device)
            start_s = time.perf_counter()
            way()
            _wait_for(device)
            if index:
                times_s[name].append(time.perf_counter() - start_s)
    return times_s


def rows_of(times_s: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Cells of the table."""
    plain_s = statistics.median(times_s["abs().sum()"])
    return [
        (
            name,
            f"{1e3 * statistics.median(times):.1f}",
            f"{1e3 * min(times):.1f}–{1e3 * max(times):.1f}",
            f"{statistics.median(times) / plain_s:.2f}",
        )
        for name, times in times_s.items()
    ]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
