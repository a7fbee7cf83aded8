"""Start of the workers of a job, on the emulated cluster or as plain processes on the loopback interface."""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from recipes.cluster import Cluster
from recipes.cluster.launch import run_workers

JobT = TypeVar("JobT")

_REPOSITORY = Path(__file__).resolve().parents[3]
_GRACE_S = 5.0  # for the other workers, once one has failed
_WORKER = "recipes.benchmarks.harness.worker"


def run_job(measure: Callable[[JobT], Any], job: JobT, workers: int, rate: str | None, ranks_per_node: int = 1) -> Any:
    """Call ``measure(job)`` in every worker, and return what it returned in the first one.

    Args:
        measure: a function of a module that workers can import; what it returns can be written as JSON.
        job: its argument; travels as a pickle.
        workers: number of processes.
        rate: of the links of the emulated cluster, such as ``"1gbit"``; None: the loopback interface.
        ranks_per_node: neighbouring workers that share a link.

    Raises:
        RuntimeError: a worker failed; its own message is on standard error.
        recipes.cluster.ClusterUnavailable: the emulated cluster cannot be made here.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        Path(folder, "job.pickle").write_bytes(pickle.dumps((measure, job)))
        command = [sys.executable, "-m", _WORKER, folder, "env://" if rate else f"file://{folder}/rendezvous"]
        path = os.pathsep.join(filter(None, [str(_REPOSITORY), os.environ.get("PYTHONPATH")]))
        # One thread per rank: workers share the machine's cores with each other.
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        if rate:
            with Cluster(workers, rate, ranks_per_node=ranks_per_node) as cluster:
                code = cluster.run(command, env=environment, grace=_GRACE_S)
        else:
            code = _run_on_loopback(command, workers, environment)
        if code != 0:
            where = f"at {rate}" if rate else "on loopback"
            raise RuntimeError(
                f"a worker of {measure.__module__} {where} ended with exit code {code}; see its message above"
            )
        return json.loads(Path(folder, "result.json").read_text())


def _run_on_loopback(command: Sequence[str], workers: int, environment: Mapping[str, str]) -> int:
    shared = {**os.environ, **environment, "WORLD_SIZE": str(workers), "GLOO_SOCKET_IFNAME": "lo"}
    return run_workers(
        [command] * workers,
        [{**shared, "RANK": str(rank)} for rank in range(workers)],
        timeout_s=None,
        grace_s=_GRACE_S,
        prefix=False,
    )
