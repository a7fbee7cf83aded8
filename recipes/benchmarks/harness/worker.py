"""One worker of a benchmark, and helpers of the functions that workers run.

    python -m recipes.benchmarks.harness.worker FOLDER RENDEZVOUS

:func:`~recipes.benchmarks.harness.launch.run_job` starts it once per rank.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import resource
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

ResultT = TypeVar("ResultT")

# The longest legitimate wait: BERT-base on a slow link takes a minute per step.
_TIMEOUT = timedelta(minutes=5)


def main(folder: str, rendezvous: str) -> None:
    """Meet the other workers, measure, and write the first rank's result."""
    measure, job = pickle.loads(Path(folder, "job.pickle").read_bytes())
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    spare_the_collector()
    result = measure(job)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def spare_the_collector() -> None:
    """Collect garbage now, and leave out all that is there from later collections, which take 0.15 s of a rank."""
    gc.collect()
    gc.freeze()


def take_turns(variants: Iterable[str], rounds: int, measure: Callable[[str], ResultT]) -> dict[str, list[ResultT]]:
    """Measure every variant once per round, so that slow phases of the machine hit all of them alike."""
    results: dict[str, list[ResultT]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, found in results.items():
            found.append(measure(name))
            gc.collect()  # DDP and its reducer refer to each other
            report(f"round {number + 1}/{rounds}, {name}: {_brief(found[-1])}")
    return results


def report(line: str) -> None:
    """Print a line of progress on the first rank."""
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def slowest(*values: float) -> list[float]:
    """Return the largest of each value over ranks; collective."""
    return _over_ranks(values, dist.ReduceOp.MAX)


def total(*values: float) -> list[float]:
    """Return the sum of each value over ranks; collective."""
    return _over_ranks(values, dist.ReduceOp.SUM)


def processor_s() -> float:
    """Return the processor seconds of this process so far: all threads, in user and in kernel mode."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _over_ranks(values: Iterable[float], op: dist.ReduceOp.RedOpType) -> list[float]:
    tensor = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


def _brief(found: object) -> str:
    if isinstance(found, dict):
        return ", ".join(f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, float))
    return str(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
