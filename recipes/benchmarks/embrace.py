"""The language models of the EmbRace paper on an emulated cluster: DDP, other baselines, and sharded tables.

    python -m recipes.benchmarks.embrace
    python -m recipes.benchmarks.embrace --models lm bert --workers 4 8 --rate 1gbit 10gbit
    python -m recipes.benchmarks.embrace --sweep --workers 4
    python -m recipes.benchmarks.embrace --results build/a/embrace.json build/b/embrace.json --markdown PAGE.md
    python -m recipes.benchmarks.embrace --quick --loopback
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.benchmarks import embrace_workloads as workloads
from recipes.benchmarks.embrace_workloads import EmbraceWorkload
from recipes.benchmarks.harness import Benchmark, Run, add_timing, main_of, run_job
from recipes.cluster.network import parse_rate
from recipes.common.pages import Page, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIANTS = {
    "ddp-dense": "plain DDP, dense gradients of tables",
    "ddp-sparse": "plain DDP, sparse gradients (gloo: all-gather of all rows)",
    "push-pull": "rows partitioned, pulled and pushed (as in Parallax), plain DDP",
    "dense-priority": "dense gradients by DeAR: in parts, in the order of the next forward (as ByteScheduler has them)",
    "embedding-hook": "sparse gradients by partition and exchange (embedding_hook), plain DDP",
    "sharded": "columns by AlltoAll without scheduling, plain DDP",
    "horizontal": "columns by AlltoAll, looked up ahead, DeAR",
    "2d-ddp": "columns by AlltoAll, prior and delayed rows, plain DDP",
    "2d": "columns by AlltoAll, prior and delayed rows, DeAR",
    "2d-topk": "columns by AlltoAll, prior and delayed rows, dense layers by SparDL at 1 %, which is not exact",
}
BASELINES = ("ddp-dense", "ddp-sparse", "push-pull", "dense-priority")
SWEPT = ("all-reduce", "all-gather", "push-pull", "alltoall")
DENSITIES = (0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
COLUMNS = ("variant", "tokens/s", "s/step", "min–max", "× best", "stall", "MB sent", "CPU s")

INTRODUCTION = """\
Tables, ids, vectors, gradients, communication and updates (SGD) are real. Dense layers have real parameters and \
gradients, and *emulated* compute: they sleep, in proportion to their size. Every worker runs in a network namespace \
of its own behind a shaped link. All variants of a table alternate in one run.

Sizes are those of the paper's Table 1, in width times the factor in the title (`scale`), so that plain DDP's dense \
gradients fit one machine for every worker; ids are made so that a batch looks up as many rows, as many different \
ones, and shares as many with the next batches as its Table 3 says. The paper gives no computing times: floating-point \
operations, two per parameter and id forwards and four backwards, over 10 TFLOP/s, times a factor with which computing \
takes about as long as communication at 1 Gbit/s with four workers, or the one in the title (`slow`)."""

LEGEND = """\
* `tokens/s`: ids of all workers that are not padding, per second.
* `× best`: how many times as many as the fastest of those marked with a star.
* `stall`: seconds per step that are not computing: waiting for communication, splitting rows, updates and Python. The
  paper's *computation stall*, with what it leaves out.
* `MB sent`: by a worker's network interface per step, headers included.
* `CPU s`: processor seconds per step, all workers together; they share two cores."""


@dataclass(frozen=True)
class EmbraceJob:
    """All variants of one model, or with ``densities`` one exchange of its tables by all approaches.

    Args:
        variants: of :data:`VARIANTS`.
        rounds: windows of each variant.
        warmup, steps: of a window.
        densities: of the rows that are looked up; empty: none of that.
    """

    workload: EmbraceWorkload
    variants: tuple[str, ...]
    rounds: int = 2
    warmup: int = 3
    steps: int = 5
    densities: tuple[float, ...] = ()


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    """Yield a result per model, or that of the sweep."""
    from recipes.benchmarks.embrace_worker import compare, sweep

    timing = (options.rounds, options.warmup, options.steps)
    slow = f", slow {options.slow:g}" if options.slow is not None else ""
    for model in options.models[:1] if options.sweep else options.models:
        workload = workloads.load(model, options.scale, options.slow)
        if options.sweep:
            found = run_job(sweep, EmbraceJob(workload, SWEPT, *timing, tuple(options.densities)), workers, rate)
        else:
            found = run_job(compare, EmbraceJob(workload, tuple(options.variants), *timing), workers, rate)
        yield {
            **found,
            "title": f"{model}, {workers} workers, {rate or 'loopback'}, scale {options.scale:g}{slow}",
            "model": model,
            "workload": asdict(workload),
            "table_mb": workload.table_bytes / 1e6,
            "dense_mb": workload.dense_bytes / 1e6,
            "compute_s": workload.compute_s,
            "tokens": workload.tokens * workers,
        }


def columns_of(one: dict[str, Any]) -> tuple[str, ...]:
    return ("density", *one["sweep"]) if "sweep" in one else COLUMNS


def rows_of(one: dict[str, Any]) -> list[list[str]]:
    """Cells of the table of one model on one network."""
    if "sweep" in one:
        densities = list(next(iter(one["sweep"].values())))
        return [
            [density, *(f"{statistics.median(one['sweep'][name][density]):.3f}" for name in one["sweep"])]
            for density in densities
        ]
    return [_row(one, name) for name in one["windows"]]


def step_s(one: dict[str, Any], name: str) -> float:
    """Seconds per step, the median of the windows."""
    return statistics.median(window["step_s"] for window in one["windows"][name])


def least(one: dict[str, Any]) -> tuple[float, float | None]:
    """MB that a worker sends in a step whose dense gradients are summed exactly, and the seconds of such a step.

    It sends 2 (P - 1) / P of the dense gradients (in two halves, as every all-reduce here), and the rows of tables both
    ways. No step is shorter than that takes at the link's own rate; nor than computing and the first block's share of
    it, because that block's gradients come last in backward, and the next forward begins with its parameters.
    """
    workload, world_size = one["workload"], one["workers"]
    rows_mb = sum(table["num_rows_used"] * table["dim"] * 4 for table in workload["tables"]) / 1e6
    both_halves = 2 * (world_size - 1) / world_size
    sent_mb = both_halves * (one["dense_mb"] + rows_mb)
    if one["rate"] is None:
        return sent_mb, None
    mb_per_s = parse_rate(one["rate"]) / 8e6
    first_block_mb = both_halves * workload["block_numels"][0] * 4 / 1e6
    return sent_mb, max(sent_mb / mb_per_s, one["compute_s"] + first_block_mb / mb_per_s)


def best_baseline(one: dict[str, Any]) -> str | None:
    """The fastest of the baselines that ran."""
    present = [name for name in BASELINES if name in one["windows"]]
    return min(present, key=lambda name: step_s(one, name)) if present else None


def _row(one: dict[str, Any], name: str) -> list[str]:
    windows = one["windows"][name]
    seconds, every = step_s(one, name), [window["step_s"] for window in windows]
    best = best_baseline(one)
    return [
        f"{name}*" if name in BASELINES else name,
        f"{one['tokens'] / seconds:.0f}",
        f"{seconds:.3f}",
        f"{min(every):.3f}–{max(every):.3f}",
        f"{step_s(one, best) / seconds:.2f}" if best is not None else "",
        f"{seconds - one['compute_s']:.3f}",
        f"{statistics.median(window['sent_bytes'] for window in windows) / 1e6:.1f}",
        f"{statistics.median(window['cpu_s'] for window in windows):.2f}",
    ]


def remarks(one: dict[str, Any]) -> list[str]:
    """Sentences on one table."""
    goodput = f"goodput {one['goodput_bytes_per_s'] / 1e6:.1f} MB/s"
    if "sweep" in one:
        table = one["workload"]["tables"][0]
        return [f"Seconds per step for a table of {table['num_rows']} rows of {table['dim']} numbers; {goodput}."]
    texts = [
        f"Tables {one['table_mb']:.0f} MB, dense layers {one['dense_mb']:.0f} MB, computing {one['compute_s']:.3f} s "
        f"per step; {goodput}."
    ]
    missing = [name for name in VARIANTS if name not in one["windows"]]
    if missing:
        texts.append(f"Not run here: {', '.join(missing)}.")
    bound_mb, bound_s = least(one)
    texts.append(f"An exact step sends {bound_mb:.1f} MB at least (float32, rows of 2d).")
    best = best_baseline(one)
    if bound_s is not None and best is not None:
        texts.append(
            f"It takes {bound_s:.3f} s at least, which is {step_s(one, best) / bound_s:.2f} × best: the link is no "
            f"faster, and the first block's gradients come last and are needed first."
        )
    details = one["details"].get("2d") or one["details"].get("2d-ddp")
    if details:
        rows = [details[key] for key in ("num_ids", "num_rows", "num_prior_rows", "num_delayed_rows")]
        kinds = [f"{details[f'{kind}_bytes'] / 1e3:.0f} KB {kind}" for kind in ("id", "lookup", "prior", "delayed")]
        texts.append(
            "2d: {:.0f} ids, {:.0f} different rows, {:.0f} prior and {:.0f} delayed per worker; sends ".format(*rows)
            + ", ".join(kinds)
            + "."
        )
    if "sharded" in one["windows"] and "2d" in one["windows"]:
        without, scheduled = (step_s(one, name) - one["compute_s"] for name in ("sharded", "2d"))
        texts.append(f"2D scheduling: {1 - scheduled / without:.0%} less stall than without.")
    return texts


def page(runs: Sequence[Run]) -> Page:
    results = [result for run in runs for result in run.results]
    legend = "\n".join(f"* `{name}`: {text}." for name, text in VARIANTS.items())
    texts = [INTRODUCTION, "## Variants", legend, "## Reading the columns", LEGEND]
    tables = [Table(one["title"], columns_of(one), rows_of(one), [" ".join(remarks(one))]) for one in results]
    return Page("Sharded tables", [texts[0], picture_of(results), *texts[1:], *tables], [run.origin for run in runs])


def picture_of(results: Sequence[dict[str, Any]]) -> Picture:
    """Draw a panel per table: seconds per step, or over density; and tokens per second over workers."""
    panels: list[Callable[[Any], None]] = [partial(_plot_one, one) for one in results]
    panels += [partial(_plot_scaling, title, lines) for title, lines in scaling_of(results).items()]
    width = min(4, len(panels))
    height = -(-len(panels) // width)
    return Picture("Seconds per step", partial(_draw, panels, width, height), (1 + 4 * width, 3.9 * height))


def _draw(panels: Sequence[Callable[[Any], None]], width: int, height: int, figure: Figure) -> None:
    axes = figure.subplots(height, width, squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, panel in zip(axes.flat, panels, strict=False):
        panel(ax)


def scaling_of(measured: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Tokens per second, by model and network, variant and workers; where there are several numbers of workers."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for one in measured:
        for name in one.get("windows", {}):
            title = one["title"].replace(f" {one['workers']} workers,", "")
            found.setdefault(title, {}).setdefault(name, {})[one["workers"]] = one["tokens"] / step_s(one, name)
    return {title: lines for title, lines in found.items() if max(map(len, lines.values())) > 1}


def _plot_one(one: dict[str, Any], ax: Any) -> None:
    ax.set_title(one["title"], fontsize=8)
    if "sweep" in one:
        for name, by_density in one["sweep"].items():
            seconds = [statistics.median(values) for values in by_density.values()]
            ax.plot([float(density) for density in by_density], seconds, marker=".", label=name)
        ax.set_xlabel("density of rows")
        ax.set_ylabel("seconds")
    else:
        names = list(one["windows"])
        colours = ["tab:gray" if name in BASELINES else "tab:orange" for name in names]
        ax.bar(names, [step_s(one, name) for name in names], color=colours)
        ax.axhline(one["compute_s"], color="tab:green", linewidth=1, label="computing")
        ax.tick_params(axis="x", rotation=60, labelsize=7)
        ax.set_ylabel("seconds per step")
    ax.legend(fontsize=7)


def _plot_scaling(title: str, lines: dict[str, dict[int, float]], ax: Any) -> None:
    ax.set_title(f"{title}: scaling", fontsize=8)
    for name, by_workers in lines.items():
        workers = sorted(by_workers)
        ax.plot(workers, [by_workers[count] for count in workers], marker=".", label=name)
    ours = lines.get("2d") or next(iter(lines.values()))
    fewest = min(ours)
    ax.plot(sorted(ours), [ours[fewest] * count / fewest for count in sorted(ours)], "k:", label="2d, linear")
    ax.set_xlabel("workers")
    ax.set_ylabel("tokens per second")
    ax.legend(fontsize=6)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser, rounds=2)
    add = parser.add_argument
    add("--models", nargs="+", choices=workloads.NAMES, default=list(workloads.PAPER_MODELS), help="what is trained")
    add("--scale", type=float, default=0.25, help="factor on the width of tables and dense layers")
    add("--slow", type=float, help="factor on computing time; None: by model")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="ways to train")
    add("--sweep", action="store_true", help="one exchange of the first model's first table, for several densities")
    add("--densities", nargs="+", type=float, default=list(DENSITIES), help="of --sweep")


BENCHMARK = Benchmark(
    "embrace",
    "Compare how DDP, other baselines and sharded tables train the EmbRace paper's models.",
    measure,
    page,
    _add_options,
    quick={"models": ["tiny"], "scale": 1.0, "densities": [0.1, 1.0]},
)

if __name__ == "__main__":
    main_of(__spec__)
