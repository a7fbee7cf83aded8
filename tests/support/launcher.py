"""Scripts on several ranks as torchrun starts them, without its seconds of imports per rank and run.

Ranks are fresh processes, forked from a server that has imported what the scripts import. They find what torchrun
leaves them: its environment variables, a store to meet at, the script as ``__main__`` with its arguments, and an end
by force when another rank fails. Every kind of script, with a Trainer, Accelerate, Lightning, FSDP2 or a loop of its
own, is started by torchrun itself in one test at least, which is what shows that it can be.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.workers import server_context

ROOT = Path(__file__).resolve().parents[2]


def launch(
    script: str, arguments: Sequence[str], num_processes: int = 2, fails: bool = False, timeout_s: float = 100.0
) -> str:
    """Run a script, or the module ``-m NAME``, and return what its ranks print; without any ranks it runs alone.

    Args:
        script: below the root of the repository, or a module with ``-m`` before it.
        arguments: of its command line.
        num_processes: ranks; 0 starts one process that no launcher has told anything.
        fails: whether it has to.
        timeout_s: until ranks are killed, which is a failure.
    """
    context = server_context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if num_processes else None
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="ddp_hooks_launched_") as folder:
        output = Path(folder) / "output"
        processes = []
        for rank in range(num_processes or 1):
            told = _told_by_torchrun(rank, num_processes, store.port) if store is not None else {}
            given = script, list(arguments), {**surroundings, **told}, str(output)
            process = context.Process(target=_run, args=given)
            process.start()
            processes.append(process)
        in_time = _join(processes, time.monotonic() + timeout_s)
        text = output.read_text(errors="replace") if output.exists() else ""
        text = text.partition("\nExtension modules: ")[0]  # faulthandler's list of hundreds
        codes = [process.exitcode for process in processes]
    assert in_time, f"{script} took more than {timeout_s} s:\n{text[-5000:]}"
    assert any(codes) == fails, f"exit codes {codes}:\n{text[-5000:]}"
    return text


def _join(processes: list[Any], deadline: float) -> bool:
    """Wait for the ranks, and end all of them with the first that fails; whether that was in time."""
    alive = list(processes)
    in_time = failed = False
    try:
        while alive and not failed and time.monotonic() < deadline:
            wait([process.sentinel for process in alive], timeout=max(0.0, deadline - time.monotonic()))
            alive = [process for process in alive if process.is_alive()]
            failed = any(process.exitcode for process in processes if process not in alive)
        in_time = failed or not alive
    finally:
        for process in alive:
            process.terminate() if in_time else process.kill()
        for process in alive:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    return in_time


def _told_by_torchrun(rank: int, num_processes: int, port: int) -> dict[str, str]:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "ROLE_RANK": rank,
        "WORLD_SIZE": num_processes,
        "LOCAL_WORLD_SIZE": num_processes,
        "ROLE_WORLD_SIZE": num_processes,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # the server of the store is the launcher's, not rank 0's
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": "tests",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return {name: str(value) for name, value in variables.items()}


def _run(script: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """In a process of its own: become the script."""
    gc.freeze()  # see tests/support/workers.py
    said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    faulthandler.enable(2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    import torch

    torch.set_num_threads(1)  # OMP_NUM_THREADS came after the server had imported torch
    if script.startswith("-m "):
        sys.argv = [script, *arguments]
        runpy.run_module(script.removeprefix("-m "), run_name="__main__", alter_sys=True)
    else:
        sys.argv = [script, *arguments]
        sys.path.insert(0, str((ROOT / script).parent))  # as the interpreter does
        runpy.run_path(script, run_name="__main__")
