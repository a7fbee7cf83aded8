"""Worker processes that stay alive between tests: one pool per world size, whose store the tests' own process serves.

Starting ranks costs seconds, a task on a running pool milliseconds. A pool in which anything failed is ended and
replaced, so that one test's failure cannot reach the next. Between tasks processes are stopped: each of gloo's threads
wakes 100 times a second, and those of idle pools would take half a core.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PRELOAD = [
    *["torch", "torch.distributed", "torchvision", "transformers", "ddp_hooks", "ddp_hooks.tuning.surrogate"],
    # What is imported late takes seconds in every rank of every pool, and of every script of tests/support/launcher.py.
    *["accelerate", "lightning.pytorch", "transformers.trainer", "torch._dynamo", "ddp_hooks.integrations"],
    *[f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "t5")],
]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
GROUP_TIMEOUT_S = 30.0
TASK_TIMEOUT_S = 90.0


class WorkerFailed(AssertionError):
    """A task raised, died or took too long in at least one rank; the message holds every rank's traceback."""


def server_context() -> Any:
    """Where processes come from: forked from a server that has imported what takes seconds to import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _end_with_parent() -> None:
    """Let the kernel kill this process when the one that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(rank: int, world_size: int, port: int, folder: str, connection: Connection, device: str) -> None:
    _end_with_parent()  # a stopped process would not notice that its connection has ended
    gc.freeze()  # a full collection would visit, and so copy, all that the server has imported: a second each time
    gc.set_threshold(100_000, 20, 100)  # collecting often costs more than it frees
    os.environ |= _ENVIRONMENT
    # A process that a signal ends cannot report: what it and its libraries print at last is kept for _outcome.
    said = os.open(os.path.join(folder, f"stderr{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # optimizers would look for NVIDIA's library in each step
        torch.manual_seed = torch.default_generator.manual_seed  # torch's own formats a stack for each kind of GPU
    else:
        if world_size > torch.cuda.device_count():
            # Ranks share a GPU if they seem to be on hosts of their own. They take turns: none sees another's kernels.
            os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_MAX_CTAS": "2"}
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.TCPStore("localhost", port, is_master=False),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if task is None:
            break
        function, args = task
        # Lightning resets what is done at signals when it is through.
        faulthandler.disable()
        faulthandler.enable(2)
        try:
            torch.manual_seed(0)
            connection.send(("ok", function(rank, world_size, *args)))
        except BaseException as error:
            connection.send(("failed", f"{type(error).__name__}: {error}", traceback.format_exc()))
    # The interpreter's own exit would wait for peers of half-finished tests.
    os._exit(0)


class Workers:
    """``world_size`` processes of one group that run functions ``f(rank, world_size, *args)``.

    With ``device="cuda"`` the group is NCCL's; see :mod:`tests.support.devices`.
    """

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        import torch

        # What the server has imported may have asked for GPUs; processes forked from it then cannot use them, or die.
        context = multiprocessing.get_context("spawn") if torch.cuda.is_available() else server_context()
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ddp_hooks_tests_")
        # A file would be polled, and a store of one rank would end with it.
        self._store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.processes: list[Any] = []
        self._connections: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            given = rank, world_size, self._store.port, self._folder.name, theirs, device
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = TASK_TIMEOUT_S) -> list[Any]:
        """The results of all ranks; raises :class:`WorkerFailed` if any rank fails, and ends the pool then."""
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        if any(kind != "ok" for kind, *_ in outcomes):
            self.end()
            texts = [f"--- rank {rank}: {outcome[0]}\n{outcome[-1]}" for rank, outcome in enumerate(outcomes)]
            raise WorkerFailed("\n".join(text for text in texts if not text.split("\n")[0].endswith("ok")))
        return [result for _, result in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = TASK_TIMEOUT_S
    ) -> list[tuple[Any, ...]]:
        """Per rank ``("ok", result)``, ``("failed", message, traceback)`` or ``("lost", why)``."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send((function, args))
        deadline = time.monotonic() + timeout_s
        found = [self._outcome(rank, deadline) for rank in range(self.world_size)]
        self._signal(signal.SIGSTOP)
        return found

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _outcome(self, rank: int, deadline: float) -> tuple[Any, ...]:
        connection = self._connections[rank]
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            os.kill(self.processes[rank].pid, signal.SIGABRT)  # so that it says where its threads are
            return "lost", f"no answer from rank {rank} in time; {self._last_words(rank)}"
        try:
            outcome: tuple[Any, ...] = connection.recv()
        except EOFError:
            return "lost", f"rank {rank} died, {self._last_words(rank)}"
        return outcome

    def _last_words(self, rank: int) -> str:
        self.processes[rank].join(5)
        said = Path(self._folder.name, f"stderr{rank}").read_text(errors="replace")
        said = said.partition("\nExtension modules: ")[0]  # faulthandler's list of hundreds
        return f"exit code {self.processes[rank].exitcode}; its last words:\n{said[-6000:]}"

    @property
    def usable(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def end(self) -> None:
        """End the processes, by force."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)
        for connection in self._connections:
            connection.close()
        self.processes, self._connections = [], []
        self._folder.cleanup()


class WorkerPools:
    """The pools that are alive, by world size; of processes with a GPU, if ``device`` is "cuda"."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._pools: dict[int, Workers] = {}

    def __call__(self, world_size: int) -> Workers:
        pool = self._pools.get(world_size)
        if pool is None or not pool.usable:
            if pool is not None:
                pool.end()
            pool = self._pools[world_size] = Workers(world_size, self._device)
        return pool

    def end(self) -> None:
        for pool in self._pools.values():
            pool.end()
        self._pools.clear()
