"""One worker of the benchmark: `python -m recipes.benchmarks.worker JOB.json`, started once per rank."""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from recipes.benchmarks.heap import HeapWatch, used_heap_bytes
from recipes.benchmarks.job import Job
from recipes.benchmarks.variants import OptimizerFactory, Trainee, build, parse_variant

GOODPUT_PROBE_BYTES = 16 * 10**6
# The longest legitimate wait: BERT-base on a slow link takes a minute per step.
COLLECTIVE_TIMEOUT = timedelta(minutes=5)


class Meeting(Protocol):
    """What every job says: where workers meet, and where the result belongs."""

    @property
    def rendezvous(self) -> str: ...

    @property
    def result_path(self) -> str: ...


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


def main() -> None:
    job = Job.load(Path(sys.argv[1]))
    run(job, lambda: peak_memory(job) if job.memory else compare(job))


def run(job: Meeting, measure: Callable[[], dict[str, Any]]) -> None:
    """Meets the other workers, measures, and writes rank 0's result where the job says."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=job.rendezvous,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=COLLECTIVE_TIMEOUT,
    )
    spare_the_collector()
    result = measure()
    if dist.get_rank() == 0:
        Path(job.result_path).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def spare_the_collector() -> None:
    """Going through all that was imported stops a rank, and those that wait for it, for 0.15 s, once in a while."""
    gc.collect()
    gc.freeze()


def compare(job: Job) -> dict[str, Any]:
    """Runs every variant once per round, so that slow phases of the machine hit all of them alike."""
    goodput = goodput_bytes_per_s()
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in job.variants}
    details: dict[str, dict[str, float]] = {}
    make_optimizer = partial(torch.optim.SGD, lr=1e-4, momentum=0.9, foreach=job.foreach)
    for round_index in range(job.rounds):
        for name in job.variants:
            window, details[name] = run_variant(job, name, make_optimizer)
            windows[name].append(asdict(window))
            place = f"{job.workload.name} round {round_index + 1}/{job.rounds}"
            report(f"{place} {name}: {window.step_s:.3f} s per step")
    return {"goodput_bytes_per_s": goodput, "windows": windows, "details": details}


def run_variant(job: Job, name: str, make_optimizer: OptimizerFactory) -> tuple[Window, dict[str, float]]:
    """Builds one variant, times it, and drops it again: only one model is alive at a time."""
    trainee = build(parse_variant(name, job.dear_settings), job.workload, job.slow, make_optimizer)
    window = timed_window(trainee, job.warmup_steps, job.timed_steps)
    dist.barrier()
    details = trainee.finish()
    del trainee
    gc.collect()  # DDP and its reducer refer to each other
    return window, details


def timed_window(trainee: Trainee, warmup_steps: int, timed_steps: int) -> Window:
    """Times consecutive steps in the middle of a run, from one `optimizer.step()` to a later one.

    The window holds exactly `timed_steps` forwards, backwards and updates, and as many gathers: what the step
    before it left in flight it receives, what its last step leaves in flight it gives away. Ranks meet one
    step before the window, not at its start, so that nothing in flight gets a free head start.
    """
    for _ in range(warmup_steps):
        train_step(trainee, StepTimes())
    dist.barrier()
    train_step(trainee, StepTimes())
    times = StepTimes()
    start_s, start_cpu_s = time.perf_counter(), cpu_seconds()
    for _ in range(timed_steps):
        train_step(trainee, times)
    step_s = (time.perf_counter() - start_s) / timed_steps
    cpu_s = (cpu_seconds() - start_cpu_s) / timed_steps
    per_step = [seconds / timed_steps for seconds in (times.forward_s, times.backward_s, times.optimizer_s)]
    slowest = over_ranks([step_s, *per_step], dist.ReduceOp.MAX)
    return Window(*slowest, *over_ranks([cpu_s], dist.ReduceOp.SUM))


def train_step(trainee: Trainee, times: StepTimes) -> None:
    start_s = time.perf_counter()
    trainee.optimizer.zero_grad()
    trainee.begin_step()
    loss = trainee.model(*trainee.inputs).sum()
    forward_end_s = time.perf_counter()
    loss.backward()
    backward_end_s = time.perf_counter()
    trainee.optimizer.step()
    times.forward_s += forward_end_s - start_s
    times.backward_s += backward_end_s - forward_end_s
    times.optimizer_s += time.perf_counter() - backward_end_s


def peak_memory(job: Job) -> dict[str, Any]:
    """Peak bytes per rank of one variant with AdamW, beyond what was there before the model.

    In a fresh process each: the resident peak never falls.
    """
    (name,) = job.variants
    resident_before, used_before = peak_resident_bytes(), used_heap_bytes()
    with HeapWatch() as watch:
        run_variant(job, name, partial(torch.optim.AdamW, lr=1e-4))
    resident, used = peak_resident_bytes() - resident_before, watch.peak_bytes - used_before
    most = over_ranks([used, resident, peak_resident_bytes()], dist.ReduceOp.MAX)
    return {**dict(zip(("used", "resident", "all_resident"), most, strict=True)), "parameters": job.workload.num_bytes}


def goodput_bytes_per_s(repeats: int = 3) -> float:
    """What the link carries: every rank sends to its right neighbour while it receives from its left one."""
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
    return over_ranks([time.perf_counter() - start_s], dist.ReduceOp.MAX)[0]


def over_ranks(values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def cpu_seconds() -> float:
    """CPU seconds of this process so far, all threads, in user and in kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_resident_bytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
