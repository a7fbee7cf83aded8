"""Figure 5 of the DeAR paper, measured: an all-reduce in two halves costs as much as in one piece.

    python -m recipes.paper.dear_fig5
    python -m recipes.paper.dear_fig5 --rate 10gbit --workers 8

On the emulated cluster: gloo's all-reduce beside our reduce-scatter, our all-gather, and both of them, alternating.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.halves_worker import KINDS, HalvesJob, time_halves
from recipes.benchmarks.harness import run_job
from recipes.paper.page import Claim, Page, Section, prose, run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODULE = "recipes.paper.dear_fig5"
PROSE = prose(Path(__file__).with_name("dear_fig5.md"))
SMALL = (1 << 14, 1 << 16, 1 << 18, 1 << 19, 1 << 20)  # bytes; Fig. 5 has a panel of small and one of large messages
LARGE = (1 << 22, 1 << 24, 1 << 25, 1 << 26)


@dataclass(frozen=True)
class Times:
    """Median seconds by size in bytes, and by kind."""

    seconds: dict[int, dict[str, float]]

    @staticmethod
    def of(found: dict[str, Any]) -> Times:
        """From what the workers report."""
        return Times(
            {
                int(size): {kind: statistics.median(rounds) for kind, rounds in kinds.items()}
                for size, kinds in found["seconds"].items()
            }
        )

    def ratio(self, size: int, kind: str, other: str) -> float:
        """Of two kinds."""
        return self.seconds[size][kind] / self.seconds[size][other]


def section(title: str, times: Times, sizes: Sequence[int]) -> Section:
    """One panel of the figure."""
    claims = [
        Claim.number(f"{_text(size)}: {what}", times.ratio(size, kind, other), paper)
        for size in sizes
        for what, kind, other, paper in (
            ("both halves ÷ all-reduce", "rsag", "all-reduce", 1.0),
            ("reduce-scatter ÷ both halves", "reduce-scatter", "rsag", 0.5),
            ("all-gather ÷ both halves", "all-gather", "rsag", 0.5),
        )
    ]
    rows = [(_text(size), *(f"{1e3 * times.seconds[size][kind]:.2f}" for kind in KINDS)) for size in sizes]
    columns = ("size", *(f"{kind}, ms" for kind in KINDS))
    panel = title.partition(":")[0]
    return Section(title, "measured", PROSE[panel], claims, columns, rows, partial(_draw, times, sizes))


def _text(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _draw(times: Times, sizes: Sequence[int], figure: Figure) -> None:
    figure.set_size_inches(6, 3.8)
    ax = figure.subplots()
    for kind in KINDS:
        ax.plot(sizes, [1e3 * times.seconds[size][kind] for size in sizes], "o-", label=kind)
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [_text(size) for size in sizes], rotation=30, fontsize=8)
    ax.set_ylabel("ms")
    ax.legend(fontsize=8)


def make(options: argparse.Namespace) -> Page:
    """Measure, and put both panels together."""
    small, large = (SMALL, LARGE) if not options.quick else (SMALL[:1], LARGE[:1])
    job = HalvesJob((*small, *large), rounds=2 if options.quick else 9)
    rate = None if options.loopback else options.rate
    try:
        times = Times.of(run_job(time_halves, job, 2 if options.quick else options.workers, rate))
    except RuntimeError as error:  # also ClusterUnavailable, which says what is missing
        sys.exit(f"error: {error}")
    sections = [
        section("Fig. 5 (a): small messages", times, small),
        section("Fig. 5 (b): large messages", times, large),
    ]
    title = f"Figure 5 of the DeAR paper: {options.workers} workers, {rate or 'loopback'}"
    return Page(title, PROSE[""], sections, MODULE)


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", default="1gbit", help="link rate, as tc writes it (default: 1gbit)")
    parser.add_argument("--loopback", action="store_true", help="plain processes instead of the emulated cluster")


def main(arguments: Sequence[str] | None = None) -> None:
    run(MODULE, "DeAR's figure 5, measured.", make, arguments, _add)


if __name__ == "__main__":
    main()
