"""Work of one worker of the tuner's benchmark."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import BucketTuner, DearConfig, DearState, dear_hook
from ddp_hooks.planning import (
    Dear,
    Measured,
    StepProfile,
    measure,
    predicted_start,
    profile_step,
    slowest_of,
)
from ddp_hooks.tuning.search import Searcher
from recipes.benchmarks.emulation import emulate
from recipes.benchmarks.harness.worker import report, slowest
from recipes.benchmarks.steps_worker import StepTimes, goodput_bytes_per_s, train_step
from recipes.benchmarks.tuner import TunerJob
from recipes.benchmarks.variants import Trainee


@contextmanager
def timed_decisions() -> Iterator[list[float]]:
    """Yield the durations of the first rank's decisions; the first one includes imports. Empty on other ranks."""
    decide = Searcher._decide
    durations_s: list[float] = []

    def timed(*args: Any) -> Any:
        start_s = time.perf_counter()
        decision = decide(*args)
        durations_s.append(time.perf_counter() - start_s)
        return decision

    with mock.patch.object(Searcher, "_decide", timed):
        yield durations_s


def search_and_compare(job: TunerJob) -> dict[str, Any]:
    """Search live, then measure the choice beside every size of the grid."""
    with timed_decisions() as advice_s:
        return {**_search_and_compare(job), "advice_s": advice_s}


def _search_and_compare(job: TunerJob) -> dict[str, Any]:
    goodput = goodput_bytes_per_s()
    tuner = BucketTuner(steps_per_trial=job.steps_per_trial, max_trials=job.max_trials, profile=None)
    ddp = DistributedDataParallel(
        emulate(job.workload, job.slow), bucket_cap_mb=job.bucket_mb, gradient_as_bucket_view=True, init_sync=False
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)
    trainee = Trainee(ddp, optimizer)
    measured, profile = measure_step(trainee)
    predicted_mb = predict(job, measured, profile, tuner).start_mb
    if job.start == "predicted":
        tuner = replace(tuner, start_mb=predicted_mb)
    state = DearState(ddp, optimizer, DearConfig(tuner=tuner))
    ddp.register_comm_hook(state, dear_hook)
    tuning, start_s, steps = state.tuning, time.perf_counter(), 0
    assert tuning is not None, "one worker has nothing to tune"
    default_mb = tuning.mb
    told = 0
    while not tuning.finished:
        train_step(trainee, StepTimes())
        steps += 1
        for trial in tuning.trials[told:]:
            report(f"{job.workload.name} trial {len(tuning.trials)}: {trial.mb:.3g} MB, {trial.step_s:.4f} s per step")
        told = len(tuning.trials)
    search_s = time.perf_counter() - start_s
    chosen_mb = tuning.mb
    report(f"{job.workload.name}: {tuning.mb:.3g} MB after {steps} steps, {search_s:.0f} s")
    result = {
        "goodput_bytes_per_s": goodput,
        "trials": [asdict(trial) for trial in tuning.trials],
        "default_mb": default_mb,
        "chosen_mb": chosen_mb,
        "predicted_mb": predicted_mb,
        "search_steps": steps,
        "search_s": search_s,
        "measured": asdict(measured) | {"profile": asdict(profile)},
        "grid": measure_sizes(job, state, trainee, sorted({*job.sizes_mb, chosen_mb, default_mb, predicted_mb})),
    }
    state.close()
    return result


def measure_step(trainee: Trainee) -> tuple[Measured, StepProfile]:
    """What the cost model is made of; collective."""
    group = dist.group.WORLD
    assert group is not None
    measured = measure(group, torch.device("cpu"))
    return measured, slowest_of(profile_step(trainee.model, lambda: train_step(trainee, StepTimes())), group)


def predict(job: TunerJob, measured: Measured, profile: StepProfile, tuner: BucketTuner) -> BucketTuner:
    """The same tuner, to begin where the cost model predicts the fastest step."""
    network = measured.fit.network(dist.get_world_size())
    return predicted_start(tuner, profile, network, measured.costs, Dear(bucket_mb=job.bucket_mb))


def measure_sizes(job: TunerJob, state: DearState, trainee: Trainee, sizes_mb: list[float]) -> list[dict[str, Any]]:
    """Median seconds per step of the slowest rank for every size, per round; sizes with equal groups are one.

    Every other round goes through the sizes from the largest on, so that what changes slowly favours none of them.
    """
    assert state.tuning is not None
    equal = [list(run) for _, run in itertools.groupby(sizes_mb, state.tuning.tunable.groups_of)]
    rounds: list[list[float]] = [[] for _ in equal]
    for number in range(job.rounds):
        indices = range(len(equal))
        for index in indices if number % 2 == 0 else reversed(indices):
            mb = equal[index][0]
            state.set_fusion("size", mb=mb)
            train_step(trainee, StepTimes())
            seconds = []
            for _ in range(job.steps):
                begin_s = time.perf_counter()
                train_step(trainee, StepTimes())
                seconds.append(time.perf_counter() - begin_s)
            (slowest_s,) = slowest(statistics.median(seconds))
            rounds[index].append(slowest_s)
            report(f"{job.workload.name} round {number + 1}/{job.rounds}, {mb:.3g} MB: {slowest_s:.4f} s per step")
    return [
        {"mb": mb, "num_groups": state.tuning.tunable.groups_of(mb).num_groups, "steps_s": steps_s}
        for sizes, steps_s in zip(equal, rounds, strict=True)
        for mb in sizes
    ]
