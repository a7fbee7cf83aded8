"""The workloads of the DeAR paper's Table II on an emulated cluster: DDP, FSDP2 and DeAR side by side.

    python -m recipes.benchmarks.dear_table2
    python -m recipes.benchmarks.dear_table2 --models resnet50 --rate 2.5gbit --slow 2
    python -m recipes.benchmarks.dear_table2 --variants ddp-25mb dear dear:lanes=1 --dear slice_mb=4
    python -m recipes.benchmarks.dear_table2 --quick --loopback
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from recipes.benchmarks import workloads
from recipes.benchmarks.harness import Benchmark, Run, main_of
from recipes.benchmarks.steps import add_options, measure, picture_of, summarise, title_of
from recipes.benchmarks.variants import DEFAULT_VARIANTS
from recipes.common.pages import Page, Part, Table

BOUNDS = {
    "dependency": "dependency-aware bound",
    "half": "… 16 bits both ways",
    "one_step": "… one optimizer step",
    "eq7": "Eq. 7 bound (DeAR)",
    "eq8": "Eq. 8 bound (DDP)",
}
COLUMNS = ("variant", "s/step", "min–max", "× DDP", "÷ bound", "exposed", "optim.", "CPU s")
COLOURS = {"dear": "tab:orange", "ddp": "tab:blue", "fsdp2": "tab:purple"}

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
  gathers. No schedule that sends float32 is faster, and with *16 bits both ways* none that sends 16 bits. With *one
  optimizer step*, gathers also wait for all reduce-scatters.
* `ddp-alone` sends nothing. Every rank has half a core here, and hooks, updates and copies take their time.
* `exposed`: step minus compute, in seconds; the optimizer and Python are in it.
* `optim.`: seconds inside `optimizer.step()`, where DeAR waits for its last reduce-scatters.
* `CPU s`: processor seconds per step, all ranks together."""


def table_of(result: dict[str, Any]) -> Table:
    """Return a row per variant, then one per bound."""
    rows = [
        [
            name,
            f"{found.step_s:.3f}",
            f"{found.fastest_s:.3f}–{found.slowest_s:.3f}",
            "" if found.speedup is None else f"{found.speedup:.3f}",
            f"{found.over_bound:.3f}",
            f"{found.exposed_s:.3f}",
            f"{found.optimizer_s:.3f}",
            f"{found.cpu_s:.2f}",
        ]
        for name, found in summarise(result).items()
    ]
    bounds = {label: result["bounds"][name] for name, label in BOUNDS.items() if name in result["bounds"]}
    rows += [[label, f"{bound_s:.3f}", *[""] * (len(COLUMNS) - 2)] for label, bound_s in bounds.items()]
    measured = result["bounds_goodput"]
    remarks = [
        f"Emulated compute {result['compute_s']:.3f} s per step; {result['parameter_bytes'] / 1e6:.1f} MB in "
        f"{result['num_tensors']} tensors of {result['num_layers']} layers. "
        f"Medians over {result['rounds']} rounds of {result['steps']} steps, slowest rank.",
        f"Bounds are for {result['link_bytes_per_s'] / 1e6:.1f} MB/s. At the measured "
        f"{result['goodput_bytes_per_s'] / 1e6:.1f} MB/s they are {measured['dependency']:.3f} s "
        f"(dependency-aware), {measured['eq7']:.3f} s (Eq. 7) and {measured['eq8']:.3f} s (Eq. 8).",
        *(f"{name} did not run: {reason}" for name, reason in result["unavailable"].items()),
    ]
    return Table(title_of(result), COLUMNS, rows, remarks)


def page(runs: Sequence[Run]) -> Page:
    results = [result for run in runs for result in run.results]
    tables = [table_of(result) for result in results]
    parts: list[Part] = [INTRODUCTION, picture_of(results, BOUNDS, COLOURS), *tables, "## Reading the columns", LEGEND]
    return Page("DeAR against DDP and FSDP2", parts, [run.origin for run in runs])


BENCHMARK = Benchmark(
    "dear_table2",
    "Compare DDP, FSDP2 and DeAR on the DeAR paper's workloads. Compute is emulated.",
    measure,
    page,
    partial(add_options, models=workloads.PAPER_MODELS, variants=DEFAULT_VARIANTS),
    quick={"models": ["tiny"], "slow": None},
)

if __name__ == "__main__":
    main_of(__spec__)
