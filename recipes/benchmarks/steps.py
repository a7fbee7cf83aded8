"""Whole training steps of known models with emulated compute: options, job, bounds and summary.

:mod:`~recipes.benchmarks.dear_table2` and :mod:`~recipes.benchmarks.fsdp` compare different variants of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from ddp_hooks.planning.step import collective_s, dependency_bound_s
from recipes.benchmarks import workloads
from recipes.benchmarks.harness import add_timing, run_job
from recipes.benchmarks.variants import parse_settings, parse_variant, why_unavailable
from recipes.benchmarks.workloads import Workload
from recipes.cluster.network import parse_rate
from recipes.common.pages import Picture
from recipes.paper.bounds import baseline_bound_s, dear_bound_s

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class StepsJob:
    """All variants of one workload on one network."""

    workload: Workload
    slow: float
    variants: tuple[str, ...]
    rounds: int = 3
    warmup: int = 3  # DDP rebuilds its buckets after the first
    steps: int = 5
    dear_settings: dict[str, Any] = field(default_factory=dict)
    foreach: bool | None = None  # of the optimizer: all parameters at once, or, by default on CPUs, one by one


@dataclass(frozen=True)
class Summary:
    """One variant: medians over rounds, seconds per step of the slowest rank."""

    step_s: float
    fastest_s: float
    slowest_s: float
    optimizer_s: float
    exposed_s: float  # step minus compute: communication, optimizer and Python time that nothing hides
    cpu_s: float  # processor seconds per step, all ranks together
    speedup: float | None  # over the best plain DDP
    over_bound: float  # step over the dependency-aware bound


def add_options(
    parser: argparse.ArgumentParser, models: Sequence[str], variants: Sequence[str], **defaults: Any
) -> None:
    """Add the options of both benchmarks."""
    add_timing(parser)
    add = parser.add_argument
    add("--models", nargs="+", choices=workloads.NAMES, default=list(models), help="what is trained")
    add("--slow", type=float, nargs="+", help="factor on compute time, one or one per model; None: 4 4 10")
    add("--variants", nargs="+", default=list(variants), help="such as ddp-25mb fsdp2 dear:lanes=1")
    add("--dear", nargs="+", default=[], metavar="KEY=VALUE", help="DearConfig fields of all DeAR variants")
    add(
        "--gradients",
        choices=get_args(workloads.Gradients),
        default="float32",
        help="autocast: those of linear and convolutional layers have 16 bits; bfloat16: all of them",
    )
    add("--ranks-per-node", type=int, default=1, metavar="N", help="neighbouring workers that share a link")
    add("--foreach", action=argparse.BooleanOptionalAction, help="optimizers update all parameters at once")
    parser.set_defaults(**defaults)


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    """Yield one result per model."""
    from recipes.benchmarks.steps_worker import compare

    dear_settings = parse_settings(options.dear)
    variants, unavailable = sort_out(options.variants, dear_settings)
    timing = (options.rounds, options.warmup, options.steps)
    for model, slow in zip(options.models, slow_per_model(options.models, options.slow), strict=True):
        workload = replace(workloads.load(model), gradients=options.gradients)
        job = StepsJob(workload, slow, variants, *timing, dear_settings, options.foreach)
        measured = run_job(compare, job, workers, rate, options.ranks_per_node)
        goodput = measured["goodput_bytes_per_s"]
        link = parse_rate(rate) / 8 if rate else goodput
        yield {
            "model": model,
            "slow": slow,
            "gradients": options.gradients,
            "ranks_per_node": options.ranks_per_node,
            "steps": options.steps,
            "rounds": options.rounds,
            "num_layers": len(workload.layers),
            "num_tensors": workload.num_tensors,
            "parameter_bytes": workload.num_bytes,
            "compute_s": workload.compute_s * slow,
            "link_bytes_per_s": link,
            "bounds": bounds_of(workload, slow, workers, link),
            "bounds_goodput": bounds_of(workload, slow, workers, goodput),
            "unavailable": unavailable,
            **measured,
        }


def slow_per_model(models: Sequence[str], slow: Sequence[float] | None) -> list[float]:
    """Return one factor per model: as given, one for all, or each model's default."""
    if slow is None:
        return [workloads.default_slow(model) for model in models]
    if len(slow) == 1:
        return [slow[0]] * len(models)
    if len(slow) != len(models):
        raise ValueError(f"--slow takes one factor or one per model ({len(models)}), got {len(slow)}")
    return list(slow)


def sort_out(variants: Sequence[str], dear_settings: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the variants that can run, and the others with the reason."""
    reasons = {name: why_unavailable(parse_variant(name, dear_settings)) for name in variants}
    unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
    available = tuple(name for name in reasons if name not in unavailable)
    if not available:
        raise ValueError(f"no variant can run: {unavailable}")
    return available, unavailable


def bounds_of(workload: Workload, slow: float, workers: int, bytes_per_s: float) -> dict[str, float]:
    """Return the seconds per step below which no schedule of a kind can go.

    ``dependency``: of every schedule that sends float32; ``half``: 16 bits both ways. ``one_step``: of those whose
    gathers wait for all reduce-scatters. ``eq7`` and ``eq8``: of the DeAR paper.
    """
    step = workload.step_profile(slow)
    half_s = collective_s(step.num_bytes, workers, bytes_per_s)
    return {
        "dependency": dependency_bound_s(step, workers, bytes_per_s),
        "half": dependency_bound_s(step, workers, 2 * bytes_per_s),
        "one_step": dependency_bound_s(step, workers, bytes_per_s, gathers_wait_for_step=True),
        "eq7": dear_bound_s(step.forward_s, step.backward_s, half_s, half_s),
        "eq8": baseline_bound_s(step.forward_s, step.backward_s, 2 * half_s),
    }


_KINDS = {"float32": "", "autocast": ", under autocast", "bfloat16": ", all gradients of 16 bits"}


def title_of(result: dict[str, Any]) -> str:
    """Return the heading of a result."""
    kind = _KINDS[result.get("gradients", "float32")]
    per_node = f", {n} per link" if (n := result.get("ranks_per_node", 1)) > 1 else ""
    where = f"{result['workers']} workers{per_node}, {result['rate'] or 'loopback'}, slow {result['slow']:g}"
    return f"{result['model']}, {where}{kind}"


def summarise(result: dict[str, Any]) -> dict[str, Summary]:
    """Summarise all variants of a result, in the order in which they ran."""
    windows = result["windows"]
    medians = {
        name: {key: statistics.median(window[key] for window in rounds) for key in rounds[0]}
        for name, rounds in windows.items()
    }
    plain = [median["step_s"] for name, median in medians.items() if parse_variant(name).is_plain_ddp]
    return {
        name: Summary(
            step_s=median["step_s"],
            fastest_s=min(window["step_s"] for window in windows[name]),
            slowest_s=max(window["step_s"] for window in windows[name]),
            optimizer_s=median["optimizer_s"],
            exposed_s=median["step_s"] - result["compute_s"] * parse_variant(name).sharding.micro_batches,
            cpu_s=median["cpu_s"],
            speedup=min(plain) / median["step_s"] if plain else None,
            over_bound=median["step_s"] / result["bounds"]["dependency"],
        )
        for name, median in medians.items()
    }


def picture_of(results: Sequence[dict[str, Any]], lines: dict[str, str], colours: dict[str, str]) -> Picture:
    """Draw a panel per result: a bar per variant with its spread, and a line per bound.

    Args:
        lines: labels of the bounds that are drawn, by name.
        colours: of bars, by kind of variant; the others are grey.
    """
    num_columns = min(len(results), 3)
    num_rows = -(-len(results) // num_columns)
    draw = partial(_draw, results, lines, colours, num_rows, num_columns)
    return Picture("Seconds per step of every variant, and the bounds", draw, (6.4 * num_columns, 4.2 * num_rows))


def _draw(
    results: Sequence[dict[str, Any]],
    lines: dict[str, str],
    colours: dict[str, str],
    num_rows: int,
    num_columns: int,
    figure: Figure,
) -> None:
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    for ax in panels.flat[len(results) :]:
        ax.remove()
    for ax, result in zip(panels.flat, results, strict=False):
        found = summarise(result)
        steps_s = [each.step_s for each in found.values()]
        spread = [
            [each.step_s - each.fastest_s for each in found.values()],
            [each.slowest_s - each.step_s for each in found.values()],
        ]
        own_colours = [colours.get(parse_variant(name).kind, "tab:grey") for name in found]
        ax.barh(list(found), steps_s, xerr=spread, color=own_colours, capsize=3)
        for (name, label), style in zip(lines.items(), ("-", "-.", "--", ":"), strict=False):
            ax.axvline(result["bounds"][name], color="black", linestyle=style, linewidth=1, label=label)
        ax.axvline(result["compute_s"], color="tab:green", linewidth=1, label="compute")
        ax.invert_yaxis()
        ax.set_title(title_of(result), fontsize=8)
        ax.tick_params(labelsize=6)
        ax.set_xlabel("seconds per step", fontsize=8)
    panels[0][0].legend(fontsize=7, loc="lower right")
