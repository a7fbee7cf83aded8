"""What it costs ranks to agree on what is ready, and what grouping makes of it (Horovod's caching and grouping).

    python -m recipes.benchmarks.coordination
    python -m recipes.benchmarks.coordination --workers 2 4 8 --patterns burst
    python -m recipes.benchmarks.coordination --quick
    python -m recipes.benchmarks.coordination --render build/coordination/coordination.json --markdown PAGE.md

Control messages, bytes and time per step between real processes on the loopback interface; one agreement of up to
27,600 ranks on the in-process fabric, with a clock; and all-reduces of a model's gradients in groups. Prints tables,
and writes JSON, pictures and, if asked, a Markdown page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from recipes.benchmarks import workloads
from recipes.benchmarks.coordination_fabric import NEGOTIATED, Costs, sweep
from recipes.benchmarks.coordination_job import VARIANTS, ControlJob, GroupingJob, Pattern
from recipes.benchmarks.coordination_report import draw, show, write_page
from recipes.benchmarks.dear_table2 import command, environment, now
from recipes.benchmarks.launch import run_job
from recipes.benchmarks.workloads import Workload

WORKER = "recipes.benchmarks.coordination_worker"
RANKS = (*(1 << power for power in range(1, 15)), 27600)  # as many GPUs as the paper's largest run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.render:
        report = json.loads(options.render.read_text())
    else:
        if options.quick:
            _make_quick(options)
        report = {"command": command("coordination", arguments), "created": now(), "environment": environment()}
        try:
            report |= _measure(options)
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / "coordination.json"
        path.write_text(json.dumps(report, indent=1))
        print(f"Wrote {path} and {', '.join(each.name for each in draw(report, path))}")
    show(report)
    if options.markdown:
        write_page(report, options.markdown)
        print(f"Wrote {options.markdown}")


def _make_quick(options: argparse.Namespace) -> None:
    options.workers, options.tensors, options.rounds, options.steps, options.warmup = [2], 20, 1, 2, 1
    options.step, options.ranks, options.negotiated_up_to = 0.02, [2, 4, 8, 64], 8
    options.model, options.groups, options.group_workers = "tiny", [1, 2, 0], 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmarks.coordination", description="What ranks send each other to agree."
    )
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=list(range(2, 9)), help="processes that agree (default: 2 to 8)")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    add("--patterns", nargs="+", choices=get_args(Pattern), default=list(get_args(Pattern)),
        help="all tensors at once, or spread over a backward")  # fmt: skip
    add("--tensors", type=int, default=160, help="of a step (default: 160)")
    add("--step", type=float, default=0.1, help="seconds of a step that computes (default: 0.1)")
    add("--steps", type=int, default=10, help="timed steps per window (default: 10)")
    add("--warmup", type=int, default=2, help="untimed steps before each window (default: 2)")
    add("--rounds", type=int, default=3, help="windows per variant (default: 3)")
    add("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks on the fabric")
    add("--negotiated-up-to", type=int, default=1024,
        help="ranks of a fabric on which requests themselves travel; of more only a formula is shown (default: 1024)",
        )  # fmt: skip
    add("--alpha", type=float, default=Costs.alpha_s, help="seconds of a message on the fabric (default: 5e-6)")
    add("--model", choices=workloads.NAMES, default="resnet50", help="whose gradients are grouped (default: resnet50)")
    add("--slow", type=float, default=2.0, help="factor on its computing time (default: 2)")
    add("--groups", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50, 0], help="numbers of groups; 0: no groups")
    add("--group-workers", type=int, default=4, help="processes that all-reduce groups (default: 4)")
    add("--output", type=Path, default=Path("build/coordination"), help="folder for JSON and pictures")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page, its pictures beside it")
    add("--render", type=Path, metavar="JSON", help="show what was measured before instead of measuring")
    add("--quick", action="store_true", help="a smoke test: two workers, few tensors, few steps")
    return parser


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    job = ControlJob(
        tuple(options.variants), tuple(options.patterns), options.tensors, step_s=options.step,
        rounds=options.rounds, warmup_steps=options.warmup, timed_steps=options.steps,
    )  # fmt: skip
    measured = [{"workers": workers, **run_job(job, workers, None, WORKER)} for workers in options.workers]
    groups = _grouping_job(workloads.load(options.model), options)
    grouped = run_job(groups, options.group_workers, None, WORKER)
    costs = Costs(options.alpha)
    negotiated = [name for name in NEGOTIATED if name in options.variants]
    points = sweep(negotiated, options.ranks, options.tensors, costs, options.negotiated_up_to)
    return {
        "control": {"job": asdict(job), "measured": measured},
        "fabric": {"costs": asdict(costs), "points": points},
        "grouping": {
            "model": options.model, "workers": options.group_workers, "num_tensors": len(groups.tensors), **grouped,
        },
    }  # fmt: skip


def _grouping_job(workload: Workload, options: argparse.Namespace) -> GroupingJob:
    """Gradients in the order of the backward; a layer's are there when it has run."""
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


if __name__ == "__main__":
    main()
