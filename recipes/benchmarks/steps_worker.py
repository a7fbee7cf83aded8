"""Work of one worker whose model only sleeps: windows of steps, peak memory, and what the link carries."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from recipes.benchmarks.harness.worker import processor_s, slowest, take_turns, total
from recipes.benchmarks.heap import HeapWatch, used_heap_bytes
from recipes.benchmarks.steps import StepsJob
from recipes.benchmarks.variants import OptimizerFactory, Trainee, build, parse_variant

GOODPUT_PROBE_BYTES = 16 * 10**6


@dataclass(frozen=True)
class Window:
    """One timed window, per step. Times are the slowest rank's, CPU seconds the sum over ranks."""

    step_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float  # DeAR waits here for its reduce-scatters
    cpu_s: float


@dataclass
class StepTimes:
    """Sums over steps of where this rank's training thread was."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0


def compare(job: StepsJob) -> dict[str, Any]:
    """Train with all variants in turns."""
    goodput = goodput_bytes_per_s()
    details: dict[str, dict[str, float]] = {}
    make_optimizer = partial(torch.optim.SGD, lr=1e-4, momentum=0.9, foreach=job.foreach)

    def measure(name: str) -> dict[str, float]:
        window, details[name] = run_variant(job, name, make_optimizer)
        return asdict(window)

    windows = take_turns(job.variants, job.rounds, measure)
    return {"goodput_bytes_per_s": goodput, "windows": windows, "details": details}


def run_variant(job: StepsJob, name: str, make_optimizer: OptimizerFactory) -> tuple[Window, dict[str, float]]:
    """Build one variant, time it, and drop it again: only one model is alive at a time."""
    trainee = build(parse_variant(name, job.dear_settings), job.workload, job.slow, make_optimizer)
    window = timed_window(trainee, job.warmup, job.steps)
    dist.barrier()
    return window, trainee.finish()


def timed_window(trainee: Trainee, warmup_steps: int, timed_steps: int) -> Window:
    """Time consecutive steps in the middle of a run, from one `optimizer.step()` to a later one.

    The window holds exactly `timed_steps` forwards, backwards and updates, and as many gathers: what the step
    before it left in flight it receives, what its last step leaves in flight it gives away. Ranks meet one
    step before the window, not at its start, so that nothing in flight gets a free head start.
    """
    for _ in range(warmup_steps):
        train_step(trainee, StepTimes())
    dist.barrier()
    train_step(trainee, StepTimes())
    times = StepTimes()
    start_s, start_cpu_s = time.perf_counter(), processor_s()
    for _ in range(timed_steps):
        train_step(trainee, times)
    step_s = (time.perf_counter() - start_s) / timed_steps
    cpu_s = (processor_s() - start_cpu_s) / timed_steps
    per_step = [seconds / timed_steps for seconds in (times.forward_s, times.backward_s, times.optimizer_s)]
    return Window(*slowest(step_s, *per_step), *total(cpu_s))


def train_step(trainee: Trainee, times: StepTimes) -> None:
    start_s = time.perf_counter()
    trainee.optimizer.zero_grad()
    trainee.begin_step()
    for left in reversed(range(trainee.micro_batches)):
        trainee.begin_micro_batch(left == 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=trainee.autocast):
            loss = trainee.model(*trainee.inputs).sum()
        forward_end_s = time.perf_counter()
        loss.backward()
        backward_end_s = time.perf_counter()
        times.forward_s += forward_end_s - start_s
        times.backward_s += backward_end_s - forward_end_s
        start_s = backward_end_s
    trainee.optimizer.step()
    times.optimizer_s += time.perf_counter() - start_s


def peak_memory(job: StepsJob) -> dict[str, Any]:
    """Return peak bytes per rank of one variant with AdamW, beyond those before the model.

    In a fresh process each: the resident peak never falls.
    """
    (name,) = job.variants
    resident_before, used_before = peak_resident_bytes(), used_heap_bytes()
    with HeapWatch() as watch:
        run_variant(job, name, partial(torch.optim.AdamW, lr=1e-4))
    resident, used = peak_resident_bytes() - resident_before, watch.peak_bytes - used_before
    most = slowest(used, resident, peak_resident_bytes())
    return dict(zip(("used", "resident", "all_resident"), most, strict=True))


def goodput_bytes_per_s(repeats: int = 3) -> float:
    """Measure the link: every rank sends to its right neighbour while it receives from its left one."""
    workers, rank = dist.get_world_size(), dist.get_rank()
    if workers == 1:
        return float("inf")
    sent, received = torch.zeros(GOODPUT_PROBE_BYTES // 4), torch.zeros(GOODPUT_PROBE_BYTES // 4)

    def exchange() -> None:
        requests = [dist.isend(sent, (rank + 1) % workers), dist.irecv(received, (rank - 1) % workers)]
        for request in requests:
            assert request is not None  # None is for ranks outside the group
            request.wait()

    exchange()  # connects, and uses up what the shaper lets through unshaped
    return statistics.median(GOODPUT_PROBE_BYTES / _slowest_s(exchange) for _ in range(repeats))


def _slowest_s(action: Callable[[], None]) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    action()
    return slowest(time.perf_counter() - start_s)[0]


def peak_resident_bytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
