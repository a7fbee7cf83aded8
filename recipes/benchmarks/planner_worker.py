"""One worker of the planner's benchmark: `python -m recipes.benchmarks.planner_worker JOB.json`, once per rank."""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_hooks.planning import StepProfile, measure, profile_step, slowest_of
from ddp_hooks.planning.measurement.selection_cost import selection_cost
from recipes.benchmarks.planner_job import DENSITY, PlannerJob
from recipes.benchmarks.variants import OptimizerFactory, build, parse_variant
from recipes.benchmarks.worker import StepTimes, cpu_seconds, over_ranks, report, run, timed_window, train_step


def main() -> None:
    job = PlannerJob.load(Path(sys.argv[1]))
    run(job, lambda: measure_and_compare(job))


def measure_and_compare(job: PlannerJob) -> dict[str, Any]:
    """What a planner would measure, in every round before the real steps of all variants."""
    factory = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
    group = dist.group.WORLD
    assert group is not None
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in job.variants}
    measured = []
    for number in range(job.rounds):
        select_s = partial(selection_cost, density=DENSITY, workers=dist.get_world_size())
        found = measure(group, torch.device("cpu"), select_s)
        profile = _profile(job, factory)
        measured.append(asdict(found) | {"profile": asdict(profile)})
        report(f"{job.name}: {found.fit}; {found.costs}")
        for name in job.variants:
            trainee = build(parse_variant(name), job.workload, job.slow, factory)
            window = timed_window(trainee, job.warmup_steps, job.timed_steps)
            dist.barrier()
            trainee.finish()
            del trainee
            gc.collect()  # DDP and its reducer refer to each other
            windows[name].append(asdict(window))
            report(f"{job.name} round {number + 1}/{job.rounds} {name}: {window.step_s:.3f} s per step")
    (cpu_s,) = over_ranks([cpu_seconds()], dist.ReduceOp.SUM)
    return {"measured": measured, "windows": windows, "cpu_s": cpu_s}


def _profile(job: PlannerJob, factory: OptimizerFactory) -> StepProfile:
    """A step of plain DDP without its communication, of the slowest worker."""
    trainee = build(parse_variant("ddp-25mb"), job.workload, job.slow, factory)
    profile = profile_step(trainee.model, lambda: train_step(trainee, StepTimes()))
    return slowest_of(profile, dist.group.WORLD)


if __name__ == "__main__":
    main()
