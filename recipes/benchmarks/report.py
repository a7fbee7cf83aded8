"""Shows results: a table on the terminal, a plot, and a Markdown page.

    python -m recipes.benchmarks.report RESULT.json... --markdown docs/results/dear_table2.md

renders several runs of the benchmark (other rates, other factors) as one page.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from recipes.benchmarks.results import Report, Result, VariantResult

LINE_RATE_BOUNDS = {
    "dependency": "dependency-aware bound",
    "dependency_one_step": "… one optimizer step",
    "eq7": "Eq. 7 bound (DeAR)",
    "eq8": "Eq. 8 bound (DDP)",
}
COLUMNS = ("variant", "s/step", "min–max", "× DDP", "÷ bound", "exposed", "optim.", "CPU s")

INTRODUCTION = """\
Parameter shapes and layer order are those of the real models; gradients, communication and optimizer (SGD \
with momentum) are real. Compute is *emulated*: every layer sleeps for its share of the step, in proportion \
to its FLOPs. The total per step comes from the DeAR paper's Table II through its Eq. 6 (for DenseNet-201 \
that is a lower bound), times `slow`. Every worker runs in a network namespace of its own behind a shaped \
link, unless the title says loopback. All variants alternate in one run."""

LEGEND = """\
* `× DDP`: how many times faster than the fastest plain DDP.
* `÷ bound`: step time over the dependency-aware bound: an ideal link at line rate, without latency, on which
  no reduce-scatter starts before its gradient, no gather before its reduce-scatter and no layer before its
  gathers. No schedule that sends float32 is faster; `ddp-bf16` sends half the bytes. With *one optimizer
  step*, gathers also wait for all reduce-scatters.
* `exposed`: step minus compute, in seconds; the optimizer and Python are in it.
* `optim.`: seconds inside `optimizer.step()`, where DeAR waits for its last reduce-scatters.
* `CPU s`: processor seconds per step, all ranks together."""


def print_results(results: list[Result], console: Console | None = None) -> None:
    console = console or Console()
    for result in results:
        # Narrow enough for a terminal of 80 columns: names of variants are folded, numbers never.
        table = Table(title=result.title, box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
        for index, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
        for row in _variant_rows(result):
            table.add_row(*row)
        table.add_section()
        for row in _bound_rows(result):
            table.add_row(*row)
        console.print(table)
        for line in _remarks(result):
            console.print(line, highlight=False)
        console.print()


def _variant_rows(result: Result) -> list[list[str]]:
    return [[name, *_cells(variant)] for name, variant in result.variants.items()]


def _cells(variant: VariantResult) -> list[str]:
    return [
        f"{variant.step_s:.3f}",
        f"{variant.fastest_s:.3f}–{variant.slowest_s:.3f}",
        "" if variant.speedup is None else f"{variant.speedup:.3f}",
        f"{variant.over_bound:.3f}",
        f"{variant.exposed_s:.3f}",
        f"{variant.optimizer_s:.3f}",
        f"{variant.cpu_s:.2f}",
    ]


def _bound_rows(result: Result) -> list[list[str]]:
    empty = [""] * (len(COLUMNS) - 2)
    return [[label, f"{getattr(result.bounds, key):.3f}", *empty] for key, label in LINE_RATE_BOUNDS.items()]


def _remarks(result: Result) -> list[str]:
    bounds = result.bounds
    return [
        f"Emulated compute {result.compute_s:.3f} s per step; {result.parameter_bytes / 1e6:.1f} MB in "
        f"{result.num_tensors} tensors of {result.num_layers} layers. "
        f"Medians over {result.rounds} rounds of {result.steps} steps, slowest rank.",
        f"Bounds are for {result.link_bytes_per_s / 1e6:.1f} MB/s. At the measured "
        f"{result.goodput_bytes_per_s / 1e6:.1f} MB/s they are {bounds.dependency_goodput:.3f} s "
        f"(dependency-aware), {bounds.eq7_goodput:.3f} s (Eq. 7) and {bounds.eq8_goodput:.3f} s (Eq. 8).",
        *(f"{name} did not run: {reason}" for name, reason in result.unavailable.items()),
    ]


def plot(results: list[Result], path: Path) -> None:
    """One panel per result: a bar per variant with its spread, and a line per bound at line rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(1 + 4.2 * len(results), 4.4), squeeze=False)
    for ax, result in zip(axes[0], results, strict=True):
        names = list(result.variants)
        steps_s = [variant.step_s for variant in result.variants.values()]
        below = [variant.step_s - variant.fastest_s for variant in result.variants.values()]
        above = [variant.slowest_s - variant.step_s for variant in result.variants.values()]
        colours = ["tab:orange" if name.startswith("dear") else "tab:blue" for name in names]
        ax.bar(names, steps_s, yerr=[below, above], color=colours, capsize=3)
        for (key, label), style in zip(LINE_RATE_BOUNDS.items(), ("-", "-.", "--", ":"), strict=True):
            bound_s = getattr(result.bounds, key)
            ax.axhline(bound_s, color="black", linestyle=style, linewidth=1, label=label)
        ax.axhline(result.compute_s, color="tab:green", linewidth=1, label="compute")
        ax.set_title(result.title, fontsize=9)
        ax.tick_params(axis="x", rotation=60, labelsize=8)
        ax.set_ylabel("seconds per step")
    figure.tight_layout()
    lines, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def markdown(reports: list[Report], plot_name: str) -> str:
    """A page with every table, the plot, and what it takes to repeat them."""
    sections = [
        "# DeAR against DDP and FSDP2",
        INTRODUCTION,
        f"![Seconds per step of every variant, and the bounds]({plot_name})",
        *(_markdown_result(result) for report in reports for result in report.results),
        "## Reading the columns",
        LEGEND,
        "## Repeating it",
    ]
    for report in reports:
        environment = ", ".join(f"{name} {value}" for name, value in report.environment.items())
        sections.append(f"```\n{report.command}\n```\n\n{report.created}; {environment}.")
    return "\n\n".join(sections) + "\n"


def _markdown_result(result: Result) -> str:
    rows = [*_variant_rows(result), *_bound_rows(result)]
    lines = [
        f"## {result.title}",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"| :-- |{' --: |' * (len(COLUMNS) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n\n" + "\n\n".join(_remarks(result))


def write_markdown(reports: list[Report], path: Path) -> None:
    """Writes the page, and its plot beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = path.with_suffix(".png")
    plot([result for report in reports for result in report.results], image)
    path.write_text(markdown(reports, image.name))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.report", description="Show saved results of the DeAR benchmark."
    )
    parser.add_argument("results", type=Path, nargs="+", help="JSON files that dear_table2 wrote")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write a page, its plot beside it")
    arguments = parser.parse_args()
    reports = [Report.load(path) for path in arguments.results]
    print_results([result for report in reports for result in report.results])
    if arguments.markdown:
        write_markdown(reports, arguments.markdown)


if __name__ == "__main__":
    main()
