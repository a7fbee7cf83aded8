"""Starts the workers of a job, on the emulated cluster or as plain processes on the loopback interface."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from recipes.benchmarks.compiled_job import CompiledJob
from recipes.benchmarks.conditional_job import ConditionalJob
from recipes.benchmarks.coordination_job import ControlJob, GroupingJob
from recipes.benchmarks.embrace_job import EmbraceJob
from recipes.benchmarks.halves_job import HalvesJob
from recipes.benchmarks.job import Job
from recipes.benchmarks.loss_job import LossJob
from recipes.benchmarks.planner_job import PlannerJob
from recipes.benchmarks.sparse_job import SparseJob
from recipes.benchmarks.trainer_job import TrainerJob
from recipes.benchmarks.tuner_job import TunerJob
from recipes.cluster import Cluster
from recipes.cluster.launch import run_workers

AnyJob: TypeAlias = (
    Job
    | CompiledJob
    | ConditionalJob
    | ControlJob
    | EmbraceJob
    | GroupingJob
    | HalvesJob
    | SparseJob
    | LossJob
    | PlannerJob
    | TrainerJob
    | TunerJob
)

REPOSITORY = Path(__file__).resolve().parents[2]
GRACE_S = 5.0  # for the other workers, once one has failed


def run_job(
    job: AnyJob, workers: int, rate: str | None, worker: str = "recipes.benchmarks.worker"
) -> dict[str, Any]:
    """Runs `job` on `workers` workers behind links of `rate` ("1gbit"), or on loopback if that is None.

    `worker` is the module that reads the job's file in every worker.

    Returns what rank 0 wrote.

    Raises:
        RuntimeError: a worker failed; its own message is on standard error.
        recipes.cluster.ClusterUnavailable: the emulated cluster cannot be made here.
    """
    with tempfile.TemporaryDirectory(prefix="dear_table2_") as folder:
        result = Path(folder, "result.json")
        job_file = Path(folder, "job.json")
        rendezvous = "env://" if rate else f"file://{folder}/rendezvous"
        replace(job, result_path=str(result), rendezvous=rendezvous).save(job_file)
        command = [sys.executable, "-m", worker, str(job_file)]
        # One thread per rank: workers share the machine's cores with each other.
        environment = {"PYTHONPATH": _python_path(), "OMP_NUM_THREADS": "1"}
        if rate:
            with Cluster(workers, rate) as cluster:
                code = cluster.run(command, env=environment, grace=GRACE_S)
        else:
            code = _run_on_loopback(command, workers, environment)
        if code != 0:
            where = f"{job.name} {f'at {rate}' if rate else 'on loopback'}"
            raise RuntimeError(f"a worker of {where} ended with exit code {code}; see its message above")
        data: dict[str, Any] = json.loads(result.read_text())
        return data


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def _run_on_loopback(command: Sequence[str], workers: int, environment: Mapping[str, str]) -> int:
    shared = {**os.environ, **environment, "WORLD_SIZE": str(workers), "GLOO_SOCKET_IFNAME": "lo"}
    return run_workers(
        [command] * workers,
        [{**shared, "RANK": str(rank)} for rank in range(workers)],
        timeout_s=None,
        grace_s=GRACE_S,
        prefix=False,
    )
