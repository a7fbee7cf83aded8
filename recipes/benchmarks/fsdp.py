"""FSDP2 on an emulated cluster: as it is, with rings, with each compression, and plain DDP and DeAR beside it.

    python -m recipes.benchmarks.fsdp
    python -m recipes.benchmarks.fsdp --models resnet50 --rate 10gbit --slow 1
    python -m recipes.benchmarks.fsdp --variants fsdp2:ahead=False fsdp2-ext fsdp2-ext:prefetch=0
    python -m recipes.benchmarks.fsdp --render a/fsdp.json b/fsdp.json --markdown docs/results/fsdp.md
    python -m recipes.benchmarks.fsdp --quick --loopback

Prints a table per model, and writes JSON and a plot.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from recipes.benchmarks.dear_table2 import command, environment, make_parser, measure_all, now, parse
from recipes.benchmarks.results import Report, Result
from recipes.benchmarks.variants import Sharding, parse_variant

STOCK = "fsdp2:ahead=False"
RING = "fsdp2-ext:block_mb=10"
VARIANTS = (
    "ddp-5mb",
    "ddp-25mb",
    "dear",
    STOCK,
    "fsdp2",
    "fsdp2-ext",
    RING,
    "fsdp2-tuned",
    f"{RING},defer=False",
    f"{STOCK},set_to_none=False",
    f"{RING},set_to_none=False",
    f"{STOCK},replicas=2",
    f"{RING},replicas=2",
    f"{STOCK},force_sums=True",
    f"{RING},force_sums=True",
    f"{RING},all_gather=bf16,reduce_scatter=bf16",
    f"{RING},all_gather=int8,reduce_scatter=int8",
    f"{RING},all_gather=int8,reduce_scatter=sparse",
)
MODELS = ("resnet50", "densenet201", "bert", "llama")
COLOURS = {"fsdp2": "tab:blue", "fsdp2-ext": "tab:orange", "fsdp2-tuned": "tab:red"}
COLUMNS = ("variant", "s/step", "min–max", "× stock", "× ring", "÷ DeAR", "exposed", "CPU s", "MB")

INTRODUCTION = f"""\
The workloads of {{doc}}`dear_table2`, and a stack of Llama's shapes (8 layers of 512, 16,384 tokens, 42 million \
parameters), sharded by FSDP2 in blocks of 25 MB unless `block_mb` says otherwise, but for a first one of 1 MB; \
parameters stay whole between forward and backward. Gradients, communication and optimizer are real: SGD with \
momentum, of all parameters at once (`foreach=True`, which PyTorch chooses by itself on accelerators). Compute is \
*emulated*: every layer sleeps for its share of the step. Every worker runs in a network namespace of its own behind \
a shaped link. All variants of a table alternate in one run.

* `{STOCK}`: FSDP2 as it is. On CPUs it waits for every collective, and gloo's reduce-scatter moves an all-reduce.
* `fsdp2`: the same, with every gather asked for at the start of a step (`unshard(async_op=True)`).
* `fsdp2-ext`: extended, with these settings of `ExtConfig`; see {{doc}}`../fsdp`. With `defer=False` the backward \
waits for every reduce-scatter, of which parts have begun as gradients came.
* `set_to_none=False`: gradients are there already, and are added to. `replicas=2`: two replicas of two shards (HSDP), \
where an all-reduce follows every reduce-scatter. `force_sums=True`: gradients are summed, and divided afterwards \
(`set_force_sum_reduction_for_comms`).
* `fsdp2-tuned`: with what `fsdp_ext.tune` has found in at most 8 trials of 4 steps, before.
* `ddp-…`, `dear`: plain DDP, and DDP with DeAR."""

LEGEND = f"""\
* `× stock`: how many times faster than `{STOCK}`, in blocks of 25 MB, used alike (`set_to_none`, `replicas`, \
`force_sums`); `× ring`: than `{RING}`.
* `÷ DeAR`: step time over that of DDP with DeAR.
* `exposed`: step minus compute, in seconds. `CPU s`: processor seconds per step, all ranks together: two cores serve \
all workers, so where these are near twice the step, the processor is the limit.
* `MB`: that one rank sends in a step, where lanes count it."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("fsdp", "Compare FSDP2 with and without fsdp_ext, DDP and DeAR.", VARIANTS)
    parser.set_defaults(models=list(MODELS), rounds=2, steps=3)
    parser.add_argument(
        "--foreach",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether optimizers update all parameters at once, as PyTorch chooses itself on accelerators only",
    )
    parser.add_argument("--render", nargs="+", type=Path, metavar="JSON", help="show saved results, and run nothing")
    options = parser.parse_args(arguments)
    if options.render:
        reports = [Report.load(path) for path in options.render]
    else:
        options = parse(parser, arguments)
        reports = [Report(command("fsdp", arguments), now(), environment(), measure_all(options))]
        options.output.mkdir(parents=True, exist_ok=True)
        reports[0].save(options.output / "fsdp.json")
        plot(reports[0].results, options.output / "fsdp.png")
    results = [result for report in reports for result in report.results]
    for result in results:
        show(result)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        plot(results, options.markdown.with_suffix(".png"))
        options.markdown.write_text(page(reports, options.markdown.with_suffix(".png").name))
    if not options.render:
        print(f"Wrote {options.output}/fsdp.json and {options.output}/fsdp.png")


def rows(result: Result) -> list[list[str]]:
    """One per variant, in the order of :data:`COLUMNS`."""
    return [_row(result, name) for name in result.variants]


def _row(result: Result, name: str) -> list[str]:
    variant = result.variants[name]

    def ratio_to(other: str) -> str:
        return f"{result.variants[other].step_s / variant.step_s:.2f}" if other in result.variants else ""

    dear = result.variants.get("dear")
    return [
        name,
        f"{variant.step_s:.3f}",
        f"{variant.fastest_s:.3f}–{variant.slowest_s:.3f}",
        ratio_to(_stock_of(name)),
        ratio_to(RING) if parse_variant(name).kind.startswith("fsdp2-") else "",
        f"{variant.step_s / dear.step_s:.3f}" if dear is not None else "",
        f"{variant.exposed_s:.3f}",
        f"{variant.cpu_s:.2f}",
        _sent_mb(result, name),
    ]


def _stock_of(name: str) -> str:
    """Stock FSDP2, used as this variant uses it."""
    sharding, default = parse_variant(name).sharding, Sharding()
    used = [key for key in ("set_to_none", "replicas", "force_sums") if getattr(sharding, key) != getattr(default, key)]
    return "".join([STOCK, *(f",{key}={getattr(sharding, key)}" for key in used)])


def _sent_mb(result: Result, name: str) -> str:
    sent_bytes = result.details.get(name, {}).get("sent_bytes_per_step")
    return "" if sent_bytes is None else f"{sent_bytes / 1e6:.1f}"


def _remark(result: Result) -> str:
    tuned = result.details.get("fsdp2-tuned", {})
    found = f" Tuning found blocks of {tuned['block_mb']:g} MB" if "block_mb" in tuned else ""
    if found and "prefetch" not in tuned:
        found += ", and nothing faster than stock."
    elif found:
        found += f", prefetch={tuned['prefetch']:g}." if tuned["prefetch"] >= 0 else ", and the default prefetching."
    return (
        f"Emulated compute {result.compute_s:.3f} s per step; {result.parameter_bytes / 1e6:.1f} MB of parameters. "
        f"The bound of every schedule that moves float32, DeAR's and ours: {result.bounds.dependency:.3f} s "
        f"({result.bounds.dependency_goodput:.3f} s at the measured {result.goodput_bytes_per_s / 1e6:.1f} MB/s). "
        f"Medians over {result.rounds} windows of {result.steps} steps, slowest rank.{found}"
    )


def show(result: Result, console: Console | None = None) -> None:
    """A table on the terminal."""
    table = Table(title=result.title, caption=_remark(result), box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    for row in rows(result):
        table.add_row(*row)
    (console or Console()).print(table)


def plot(results: list[Result], path: Path) -> None:
    """One panel per result, a bar per variant with its spread; lines for computing and for the bound."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    num_columns = min(len(results), 3)
    num_rows = -(-len(results) // num_columns)
    figure, axes = plt.subplots(num_rows, num_columns, figsize=(7.2 * num_columns, 4.2 * num_rows), squeeze=False)
    for ax in axes.flat[len(results) :]:
        ax.remove()
    for ax, result in zip(axes.flat, results, strict=False):
        names = list(result.variants)
        steps_s = [variant.step_s for variant in result.variants.values()]
        below = [variant.step_s - variant.fastest_s for variant in result.variants.values()]
        above = [variant.slowest_s - variant.step_s for variant in result.variants.values()]
        colours = [COLOURS.get(parse_variant(name).kind, "tab:grey") for name in names]
        ax.barh(names, steps_s, xerr=[below, above], color=colours, capsize=3)
        ax.axvline(result.compute_s, color="tab:green", linewidth=1, label="compute")
        ax.axvline(result.bounds.dependency, color="black", linewidth=1, label="bound of float32")
        ax.invert_yaxis()
        ax.set_title(result.title, fontsize=8)
        ax.tick_params(labelsize=6)
        ax.set_xlabel("seconds per step", fontsize=8)
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def page(reports: Sequence[Report], plot_name: str) -> str:
    """Every table, the plot, and what it takes to repeat them."""
    sections = ["# FSDP2, as it is and extended", INTRODUCTION, f"![Seconds per step of every variant]({plot_name})"]
    for report in reports:
        for result in report.results:
            lines = [
                f"## {result.title}",
                "",
                f"| {' | '.join(COLUMNS)} |",
                f"| :-- |{' --: |' * (len(COLUMNS) - 1)}",
                *(f"| {' | '.join([f'`{row[0]}`', *row[1:]])} |" for row in rows(result)),
            ]
            sections += ["\n".join(lines), _remark(result)]
    sections += ["## Reading the columns", LEGEND, "## Repeating it"]
    for report in reports:
        surroundings = ", ".join(f"{name} {value}" for name, value in report.environment.items())
        sections.append(f"```\n{report.command}\n```\n\n{report.created}; {surroundings}.")
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    main()
