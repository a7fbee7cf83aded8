"""What it costs ranks to agree on what is ready, and what grouping makes of it (Horovod's caching and grouping).

    python -m recipes.benchmarks.coordination
    python -m recipes.benchmarks.coordination --workers 2 4 8 --patterns burst
    python -m recipes.benchmarks.coordination --quick
    python -m recipes.benchmarks.coordination --results build/coordination/coordination.json --markdown PAGE.md

Control messages, bytes and time per step between real processes on the loopback interface; one agreement of up to
27,600 ranks on the in-process fabric, with a clock; and all-reduces of a model's gradients in groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from recipes.benchmarks import workloads
from recipes.benchmarks.coordination_fabric import NEGOTIATED, Costs, sweep
from recipes.benchmarks.harness import Benchmark, add_timing, main_of, run_job
from recipes.benchmarks.workloads import Workload

VARIANTS = ("coordinator", "hierarchical", "bitvector", "verified")
Pattern: TypeAlias = Literal["burst", "spread"]
RANKS = (*(1 << power for power in range(1, 15)), 27600)  # as many GPUs as the paper's largest run


@dataclass(frozen=True)
class ControlJob:
    """Many small tensors per step, agreed upon in several ways, in turns.

    Args:
        variants: of :data:`VARIANTS`.
        patterns: whether a step asks for all tensors at once, or one after the other during a backward.
        num_tensors: of a step.
        numel: of each tensor.
        step_s: seconds of a step that computes; a third of them forward, the rest backward, all of it slept.
        num_buckets: of the verified schedule.
        rounds: windows per variant and pattern.
        warmup, steps: of a window.
    """

    variants: tuple[str, ...] = VARIANTS
    patterns: tuple[Pattern, ...] = ("burst", "spread")
    num_tensors: int = 160  # about as many as a ResNet-50 has
    numel: int = 16
    step_s: float = 0.1
    num_buckets: int = 8
    rounds: int = 3
    warmup: int = 2
    steps: int = 10


@dataclass(frozen=True)
class GroupingJob:
    """The gradients of a model, all-reduced in groups of equal numbers of tensors, in turns.

    Args:
        tensors: in the order of the backward: name, elements, and seconds of the backward before it is there.
        forward_s: seconds before the backward.
        groups: numbers of groups; 0: tensors are asked for one by one.
        rounds: windows per number of groups.
        warmup, steps: of a window.
    """

    tensors: tuple[tuple[str, int, float], ...]
    forward_s: float
    groups: tuple[int, ...]
    rounds: int = 3
    warmup: int = 1
    steps: int = 3


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    """Yield agreements of processes; with the first number of workers also those on the fabric, and groups."""
    from recipes.benchmarks.coordination_worker import agree_in_turns, group_in_turns

    variants, patterns = tuple(options.variants), tuple(options.patterns)
    timing: dict[str, Any] = {"rounds": options.rounds, "warmup": options.warmup, "steps": options.steps}
    job = ControlJob(variants, patterns, options.tensors, step_s=options.step, **timing)
    yield {"kind": "control", "job": asdict(job), **run_job(agree_in_turns, job, workers, rate)}
    if workers == options.workers[-1]:
        costs = Costs(options.alpha)
        negotiated = [name for name in NEGOTIATED if name in options.variants]
        points = sweep(negotiated, options.ranks, options.tensors, costs, options.negotiated_up_to)
        yield {"kind": "fabric", "costs": asdict(costs), "points": points}
        groups = _grouping_job(workloads.load(options.model), options)
        grouped = run_job(group_in_turns, groups, options.group_workers, rate)
        place = {"model": options.model, "num_tensors": len(groups.tensors), "group_workers": options.group_workers}
        yield {"kind": "grouping", **place, **grouped}


def _grouping_job(workload: Workload, options: argparse.Namespace) -> GroupingJob:
    """List gradients in the order of the backward; a layer's are ready when it has run."""
    times_s = workload.layer_times_s(options.slow)
    tensors: list[tuple[str, int, float]] = []
    waited_s = 0.0  # of layers that own nothing
    for layer, (_, backward_s) in zip(reversed(workload.layers), reversed(times_s), strict=True):
        waited_s += backward_s
        for spec in reversed(layer.owned):
            tensors.append((spec.name, spec.numel, waited_s))
            waited_s = 0.0
    forward_s = sum(forward for forward, _ in times_s)
    return GroupingJob(tuple(tensors), forward_s, tuple(options.groups), options.rounds)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_timing(parser, steps=10, warmup=2)
    add = parser.add_argument
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="ways to agree")
    patterns = get_args(Pattern)
    add("--patterns", nargs="+", choices=patterns, default=list(patterns), help="all tensors at once, or in a backward")
    add("--tensors", type=int, default=160, help="of a step")
    add("--step", type=float, default=0.1, help="seconds of a step that computes")
    add("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks on the fabric")
    more = "ranks of a fabric on which requests themselves travel; of more only a formula is shown"
    add("--negotiated-up-to", type=int, default=1024, help=more)
    add("--alpha", type=float, default=Costs.alpha_s, help="seconds of a message on the fabric")
    add("--model", choices=workloads.NAMES, default="resnet50", help="whose gradients are grouped")
    add("--slow", type=float, default=2.0, help="factor on its computing time")
    add("--groups", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50, 0], help="numbers of groups; 0: no groups")
    add("--group-workers", type=int, default=4, help="processes that all-reduce groups")


def _page(runs: Any) -> Any:
    from recipes.benchmarks.coordination_report import page

    return page(runs)


BENCHMARK = Benchmark(
    "coordination",
    "What ranks send each other to agree.",
    measure,
    _page,
    _add_options,
    workers=range(2, 9),
    on_links=False,
    quick={
        **{"tensors": 20, "step": 0.02, "ranks": [2, 4, 8, 64], "negotiated_up_to": 8},
        **{"model": "tiny", "groups": [1, 2, 0], "group_workers": 3, "warmup": 1},
    },
)

if __name__ == "__main__":
    main_of(__spec__)
