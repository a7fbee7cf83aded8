"""How long one core selects: residual plus gradient, the largest entries, their positions and values.

    python -m recipes.benchmarks.selection
    python -m recipes.benchmarks.selection --numel 100e6 --density 0.001 --device cuda

Everything alternates in one process with one thread. `ours` does three things: it adds the gradient to the residual,
finds exactly the k largest magnitudes, and copies them out; `abs().sum()` only reads the vector once, and
`torch.topk` and `np.argpartition` only find positions. A second table compares vectors in which many magnitudes are
equal with a random one. Prints both, and if asked writes a Markdown page.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.sparse import BlockSelector, ChunkedGradient
from recipes.benchmarks.harness.turns import time_in_turns
from recipes.common.pages import Origin, Page, Table

COLUMNS = ("what", "ms", "min–max", "× abs().sum()")
TIES_COLUMNS = ("vector", "ms", "min–max", "× random")


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
    of_what = f"{numel / 1e6:g} M float32, {options.density:g} selected, {device.type}"
    how = (numel, options.density, options.rounds, device)
    tables = [
        Table(of_what, COLUMNS, rows_of(measure(*how))),
        Table(f"Equal magnitudes: {of_what}", TIES_COLUMNS, rows_of(measure_ties(*how))),
    ]
    origin = Origin.of_command("recipes.benchmarks.selection", arguments)
    page = Page("Selections", [INTRODUCTION, *tables], [origin])
    page.show()
    if options.markdown:
        page.write(options.markdown)


INTRODUCTION = """\
One thread; all alternate in one run, and the table shows medians. `ours` adds the gradient to the residual, finds \
exactly the largest magnitudes, and copies out their positions and values. `abs().sum()` reads the vector once; \
`torch.topk` and `np.argpartition` find positions only, of magnitudes that are there already. The second table is \
`ours` alone, of vectors in which many magnitudes are equal, as those of frozen or dead units are."""


def measure(numel: int, density: float, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of every run."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(numel, generator=generator)
    gradient.mul_(torch.randn(numel, generator=generator).abs_())  # heavier tails, as gradients have them
    gradient = gradient.to(device)
    residual, magnitudes, k = torch.zeros_like(gradient), gradient.abs(), max(1, round(density * numel))

    def ours() -> None:
        chosen = BlockSelector(residual, (0, numel), (k,), ChunkedGradient((gradient,))).select(0)
        assert len(chosen) == k

    ways: dict[str, Callable[[], object]] = {
        "abs().sum()": lambda: gradient.abs().sum(),
        "ours": ours,
        "torch.topk": lambda: torch.topk(magnitudes, k, sorted=False),
    }
    if device.type == "cpu":
        array: Tensor = magnitudes
        ways["np.argpartition"] = lambda: np.argpartition(array.numpy(), numel - k)
    return time_in_turns(ways, rounds, device, residual.zero_)


def measure_ties(numel: int, density: float, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every selection, the random vector first."""
    k = max(1, round(density * numel))
    residual = torch.zeros(numel, device=device)

    def select(vector: Tensor) -> None:
        assert len(BlockSelector(residual, (0, numel), (k,), ChunkedGradient((vector,))).select(0)) == k

    ways = {name: partial(select, vector.to(device)) for name, vector in with_ties(numel, k).items()}
    return time_in_turns(ways, rounds, device, residual.zero_)


def with_ties(numel: int, k: int) -> dict[str, Tensor]:
    """A random vector, and some of as many elements that are mostly equal; ``k`` are going to be selected."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(numel, generator=generator)
    mostly_equal = torch.where(torch.rand(numel, generator=generator) < 0.9, 0.5, 0.2)
    together = torch.zeros(numel)
    together[numel // 3 :][: k // 2] = random[: k // 2]
    return {
        "random": random,
        "all zeros": torch.zeros(numel),
        "90 % equal": mostly_equal,
        "all equal": torch.full((numel,), 0.5),
        "fewer non-zeros than k, together": together,
    }


def rows_of(times_s: dict[str, list[float]]) -> list[tuple[str, ...]]:
    """Cells of a table, with ratios to its first row."""
    first_s = statistics.median(next(iter(times_s.values())))
    return [
        (
            name,
            f"{1e3 * statistics.median(times):.1f}",
            f"{1e3 * min(times):.1f}–{1e3 * max(times):.1f}",
            f"{statistics.median(times) / first_s:.2f}",
        )
        for name, times in times_s.items()
    ]


if __name__ == "__main__":
    main()
