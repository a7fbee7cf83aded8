"""FSDP2 on an emulated cluster: as it is, with rings, with each compression, and plain DDP and DeAR beside it.

    python -m recipes.benchmarks.fsdp
    python -m recipes.benchmarks.fsdp --models resnet50 --rate 10gbit --slow 1
    python -m recipes.benchmarks.fsdp --variants fsdp2:ahead=False fsdp2-ext fsdp2-ext:prefetch=0
    python -m recipes.benchmarks.fsdp --results a/fsdp.json b/fsdp.json --markdown docs/results/fsdp.md
    python -m recipes.benchmarks.fsdp --quick --loopback
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from recipes.benchmarks.harness import Benchmark, Run, main_of
from recipes.benchmarks.steps import add_options, measure, picture_of, summarise, title_of
from recipes.benchmarks.variants import Sharding, parse_variant
from recipes.common.pages import Page, Part, Table

STOCK = "fsdp2:ahead=False"
EXTENDED = "fsdp2-ext:block_mb=10"
VARIANTS = (
    "ddp-5mb",
    "ddp-25mb",
    "dear",
    STOCK,
    "fsdp2",
    "fsdp2-ext",
    EXTENDED,
    "fsdp2-tuned",
    f"{EXTENDED},defer=False",
    f"{STOCK},set_to_none=False",
    f"{EXTENDED},set_to_none=False",
    f"{STOCK},replicas=2",
    f"{EXTENDED},replicas=2",
    f"{STOCK},replicas=2,micro_batches=4",
    f"{EXTENDED},replicas=2,micro_batches=4",
    f"{EXTENDED},replicas=2,micro_batches=4,reduce_once=True",
    f"{STOCK},force_sums=True",
    f"{EXTENDED},force_sums=True",
    f"{EXTENDED},all_gather=bf16,reduce_scatter=bf16",
    f"{EXTENDED},all_gather=int8,reduce_scatter=int8",
    f"{EXTENDED},all_gather=int8,reduce_scatter=sparse",
)
MODELS = ("resnet50", "densenet201", "bert", "llama")
COLOURS = {"fsdp2": "tab:blue", "fsdp2-ext": "tab:orange", "fsdp2-tuned": "tab:red"}
COLUMNS = ("variant", "s/step", "min–max", "× stock", "× extended", "÷ DeAR", "exposed", "CPU s", "MB")

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
where an all-reduce follows every reduce-scatter; `micro_batches=4`: of four backwards, with `reduce_once=True` only \
in the last (`set_requires_all_reduce`). `force_sums=True`: gradients are summed, and divided afterwards \
(`set_force_sum_reduction_for_comms`).
* `fsdp2-tuned`: with what `fsdp_ext.tune` has found in at most 8 trials of 4 steps, before.
* `ddp-…`, `dear`: plain DDP, and DDP with DeAR."""

LEGEND = f"""\
* `× stock`: how many times faster than `{STOCK}`, in blocks of 25 MB, used alike (`set_to_none`, `replicas`, \
`force_sums`, `micro_batches`); `× extended`: than `{EXTENDED}`.
* `÷ DeAR`: step time over that of DDP with DeAR.
* `exposed`: step minus compute, in seconds. `CPU s`: processor seconds per step, all ranks together: two cores serve \
all workers, so where these are near twice the step, the processor is the limit.
* `MB`: that one rank sends in a step, where lanes count it."""


def table_of(result: dict[str, Any]) -> Table:
    """Return a row per variant."""
    variants = summarise(result)

    def ratio_to(other: str, step_s: float) -> str:
        return f"{variants[other].step_s / step_s:.2f}" if other in variants else ""

    rows = []
    for name, found in variants.items():
        sent_bytes = result["details"].get(name, {}).get("sent_bytes_per_step")
        rows.append([
            f"`{name}`",
            f"{found.step_s:.3f}",
            f"{found.fastest_s:.3f}–{found.slowest_s:.3f}",
            ratio_to(_stock_of(name), found.step_s),
            ratio_to(EXTENDED, found.step_s) if parse_variant(name).kind.startswith("fsdp2-") else "",
            f"{found.step_s / variants['dear'].step_s:.3f}" if "dear" in variants else "",
            f"{found.exposed_s:.3f}",
            f"{found.cpu_s:.2f}",
            "" if sent_bytes is None else f"{sent_bytes / 1e6:.1f}",
        ])  # fmt: skip
    return Table(title_of(result), COLUMNS, rows, [_remark(result)])


def page(runs: Sequence[Run]) -> Page:
    results = [result for run in runs for result in run.results]
    picture = picture_of(results, {"dependency": "bound of float32"}, COLOURS)
    parts: list[Part] = [INTRODUCTION, picture, *map(table_of, results), "## Reading the columns", LEGEND]
    return Page("FSDP2, as it is and extended", parts, [run.origin for run in runs])


def _stock_of(name: str) -> str:
    """Return the name of stock FSDP2, used as this variant uses it."""
    sharding, default = parse_variant(name).sharding, Sharding()
    keys = ("set_to_none", "replicas", "force_sums", "micro_batches")
    used = [key for key in keys if getattr(sharding, key) != getattr(default, key)]
    return "".join([STOCK, *(f",{key}={getattr(sharding, key)}" for key in used)])


def _remark(result: dict[str, Any]) -> str:
    tuned = result["details"].get("fsdp2-tuned", {})
    found = f" Tuning found blocks of {tuned['block_mb']:g} MB" if "block_mb" in tuned else ""
    if found and "prefetch" not in tuned:
        found += ", and nothing faster than stock."
    elif found:
        found += f", prefetch={tuned['prefetch']:g}." if tuned["prefetch"] >= 0 else ", and the default prefetching."
    bound_s, measured_s = result["bounds"]["dependency"], result["bounds_goodput"]["dependency"]
    return (
        f"Emulated compute {result['compute_s']:.3f} s per backward; {result['parameter_bytes'] / 1e6:.1f} MB of "
        f"parameters. The bound of every schedule of one backward that moves float32, DeAR's and ours: {bound_s:.3f} s "
        f"({measured_s:.3f} s at the measured {result['goodput_bytes_per_s'] / 1e6:.1f} MB/s). "
        f"Medians over {result['rounds']} windows of {result['steps']} steps, slowest rank.{found}"
    )


BENCHMARK = Benchmark(
    "fsdp",
    "Compare FSDP2 with and without fsdp_ext, DDP and DeAR. Compute is emulated.",
    measure,
    page,
    partial(add_options, models=MODELS, variants=VARIANTS, rounds=2, steps=3, foreach=True),
    quick={"models": ["tiny"], "slow": None},
)

if __name__ == "__main__":
    main_of(__spec__)
