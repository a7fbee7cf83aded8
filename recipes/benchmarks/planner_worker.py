"""Work of one worker of the planner's benchmark."""

from __future__ import annotations

import gc
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_hooks.planning import StepProfile, measure, profile_step, slowest_of
from recipes.benchmarks.harness.worker import report
from recipes.benchmarks.steps import StepsJob
from recipes.benchmarks.steps_worker import StepTimes, run_variant, train_step
from recipes.benchmarks.variants import OptimizerFactory, build, parse_variant


def measure_and_compare(job: StepsJob) -> dict[str, Any]:
    """What a planner would measure, in every round before the real steps of all variants."""
    factory = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
    group = dist.group.WORLD
    assert group is not None
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in job.variants}
    measured = []
    for number in range(job.rounds):
        found = measure(group, torch.device("cpu"))
        profile = _profile(job, factory)
        measured.append(asdict(found) | {"profile": asdict(profile)})
        report(f"{job.workload.name}: {found.fit}; {found.costs}")
        for name in job.variants:
            window, _ = run_variant(job, name, factory)
            gc.collect()  # DDP and its reducer refer to each other
            windows[name].append(asdict(window))
            report(f"{job.workload.name} round {number + 1}/{job.rounds} {name}: {window.step_s:.3f} s per step")
    return {"measured": measured, "windows": windows}


def _profile(job: StepsJob, factory: OptimizerFactory) -> StepProfile:
    """A step of plain DDP without its communication, of the slowest worker."""
    trainee = build(parse_variant("ddp-25mb"), job.workload, job.slow, factory)
    profile = profile_step(trainee.model, lambda: train_step(trainee, StepTimes()))
    return slowest_of(profile, dist.group.WORLD)
