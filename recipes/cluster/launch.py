"""Runs one command per worker and waits for all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO

from recipes.cluster.network import INTERFACE, address

MASTER_PORT = 29500
TIMED_OUT = 124  # as timeout(1)
STOP_S = 5.0  # from the signal that asks a worker to stop to the one that it cannot ignore
POLL_S = 0.05


class Stopped(BaseException):
    """A signal asked this process to stop, raised from its handler.

    Attributes:
        number: the signal's.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Worker:
    """One running worker: a process group of its own, led by the command.

    Args:
        rank: its place in the cluster.
        command: what to run, the way into its namespace included.
        environment: all of its environment variables.
        prefix: show standard output as well; rank 0's outputs are always passed on unchanged.
    """

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], prefix: bool) -> None:
        self.rank = rank
        first = rank == 0
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if first else subprocess.PIPE if prefix else subprocess.DEVNULL,
            stderr=None if first else subprocess.PIPE,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=_pass_on, args=(source, target, rank), daemon=True)
            for source, target in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
            if source is not None
        ]
        for reader in self._readers:
            reader.start()

    def exit_code(self) -> int | None:
        """None while it runs; 128 + the signal's number if a signal ended it, as shells have it."""
        # WNOWAIT: the id stays taken until `end`, so that signals to the group cannot meet a stranger.
        result = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else 128 + result.si_status

    def send(self, number: int) -> None:
        """Sends a signal to the worker and the processes it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Kills what is left of the process group and shows the last of its output."""
        self.send(signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            # A process that left the group may hold the pipe; it ends with the cluster.
            reader.join(timeout=1.0)


def worker_environment(
    base: Mapping[str, str], rank: int, num_workers: int, ranks_per_node: int = 1
) -> dict[str, str]:
    """Environment of one worker: torchrun's variables, every node having some neighbouring workers.

    On top come the network interface for gloo and NCCL, and defaults that `base` may override.
    """
    node, local_rank = divmod(rank, ranks_per_node)
    # A surrounding torchrun's variables would send workers to its store instead of rank 0's.
    inherited = {name: value for name, value in base.items() if not name.startswith("TORCHELASTIC_")}
    defaults = {
        "OMP_NUM_THREADS": "1",
        # NCCL would see that all workers share one machine and go around the emulated network.
        "NCCL_HOSTID": f"worker{node}",
        "NCCL_IB_DISABLE": "1",
        # torch would warn once per connection that no name server knows the cluster's addresses.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    torchrun = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_workers),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
        "NODE_RANK": str(node),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(num_workers // ranks_per_node),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(MASTER_PORT),
    }
    interface = {"GLOO_SOCKET_IFNAME": INTERFACE, "NCCL_SOCKET_IFNAME": INTERFACE}
    return defaults | inherited | torchrun | interface


def run_workers(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout_s: float | None,
    grace_s: float,
    prefix: bool,
) -> int:
    """Runs one command per rank and returns when none of them runs any more.

    Returns:
        0 if all succeeded, the exit code of the first that failed, or 124 after `timeout_s`.
    """
    workers: list[Worker] = []
    try:
        with _signals_held():
            for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
                workers.append(Worker(rank, command, environment, prefix))
        return _wait(workers, timeout_s, grace_s)
    except KeyboardInterrupt:
        _stop(workers, signal.SIGINT)
        raise
    except Stopped as stopped:
        _stop(workers, stopped.number)
        raise
    finally:
        for worker in workers:
            worker.end()


def say(message: str) -> None:
    """A message of the cluster itself, on standard error: standard output is rank 0's."""
    print(f"cluster: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Lets signals that we handle come only when the block is left, so that no worker is started and forgotten."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python runs handlers in the main thread only
        return
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    # Blocking them would be shorter, but workers inherit blocked and ignored signals.
    handled = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handled:
        signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for held_number in held:
            os.kill(os.getpid(), held_number)


def _wait(workers: Sequence[Worker], timeout_s: float | None, grace_s: float) -> int:
    deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    code = 0
    running = list(workers)
    while running:
        for worker in list(running):
            worker_code = worker.exit_code()
            if worker_code is None:
                continue
            running.remove(worker)
            if worker_code and not code:
                code = worker_code
                # The others see the failure too: time for them to say what they saw.
                deadline = min(deadline, time.monotonic() + grace_s)
                say(f"rank {worker.rank} {_describe(code)}; the others get {grace_s:g} s to end")
        if running and time.monotonic() >= deadline:
            ranks = ", ".join(str(worker.rank) for worker in running)
            if not code:
                code = TIMED_OUT
                say(f"timeout of {timeout_s:g} s: stopping ranks {ranks}")
            _stop(running, signal.SIGTERM)
            break
        time.sleep(POLL_S)
    return code


def _stop(workers: Iterable[Worker], number: int) -> None:
    """Asks workers to stop, and gives them a few seconds to do so."""
    running = list(workers)
    for worker in running:
        worker.send(number)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline and any(worker.exit_code() is None for worker in running):
        time.sleep(POLL_S)


def _describe(code: int) -> str:
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(code - 128).name}"
    return f"failed with exit code {code}"


def _pass_on(source: IO[bytes], target: IO[str], rank: int) -> None:
    """Copies a worker's output line by line, its rank in front."""
    for line in source:
        text = line.decode(errors="replace").rstrip("\r\n")
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more: keep the worker going
            target.write(f"[{rank}] {text}\n")  # in one write: several workers share the target
            target.flush()
