"""How a process ends: with a status other than 0 if it owes others something, and not before they know of a failure."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_hooks.comm import LaneError, Lanes, LaneSettings, Recorder, at_exit, failure, gather_objects
from ddp_hooks.comm.executors.lanes import StreamLane
from ddp_hooks.comm.torch_compat.distributed import serves
from tests.support.workers import server_context


def as_at_exit(function: Any, output: str, *arguments: Any) -> None:
    """In a process of its own: run a function, and end as the interpreter does."""
    gc.freeze()  # see tests/support/workers.py
    said = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout = sys.stderr = os.fdopen(said, "w", buffering=1)
    logging.getLogger("ddp_hooks").addHandler(logging.StreamHandler(sys.stderr))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    atexit._clear()  # of the server
    atexit.register(failure.last_words)
    function(*arguments)
    atexit._run_exitfuncs()


def outcome_of(path: Path, function: Any, *arguments: tuple[Any, ...]) -> list[tuple[int | None, str]]:
    """Exit codes and outputs of one process for each list of arguments."""
    context = server_context()
    paths = [path / f"output {index}" for index in range(len(arguments))]
    given = [(function, str(each), *args) for each, args in zip(paths, arguments, strict=True)]
    processes = [context.Process(target=as_at_exit, args=args) for args in given]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    return [(p.exitcode, each.read_text()) for p, each in zip(processes, paths, strict=True)]


class Stuck:
    def close(self) -> None:
        print("closed")

    def abandon(self, error: BaseException) -> None:
        print("abandoned")

    def is_stuck(self) -> bool:
        return True


class Failing(Stuck):
    def close(self) -> None:
        raise LaneError("rank 1 died")

    def is_stuck(self) -> bool:
        return False


def end_with(kind: type[Stuck], keep: list[Stuck]) -> None:
    keep.append(kind())
    at_exit(keep[0].close, keep[0].abandon, keep[0].is_stuck)


def test_a_process_that_is_stuck_or_cannot_close_ends_with_another_status_than_0(tmp_path: Path) -> None:
    (code, said), (failing_code, failing_said) = outcome_of(tmp_path, end_with, (Stuck, []), (Failing, []))
    assert code == 1 and "closed" in said and "another rank is still waited for" in said, said
    assert failing_code == 1 and "because communication failed: rank 1 died" in failing_said, failing_said


def meet_late(rank: int, port: int, folder: str) -> None:
    """Rank 0 serves the store, rank 1 dies, rank 2 comes when rank 0 has been at its end for a while."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while rank == 2 and not (Path(folder) / "rank 0 knows").exists():
        time.sleep(0.02)
    time.sleep(rank / 4)
    assert dist.group.WORLD is not None
    try:
        gather_objects(rank, dist.group.WORLD, "meet()", None)
    except LaneError as error:
        print(error)
    (Path(folder) / "rank 0 knows").touch()


def test_the_process_that_serves_the_store_waits_for_readers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcomes = outcome_of(tmp_path, meet_late, *((rank, port, str(tmp_path)) for rank in range(3)))
    assert [code for code, _ in outcomes] == [0, -signal.SIGKILL, 0]
    for _, text in (outcomes[0], outcomes[2]):
        assert "meet() cannot end: rank 1 died or closed its connection" in text, outcomes


def ask_late(rank: int, port: int) -> None:
    """Rank 0 serves the store, rank 1 dies, rank 2 asks when rank 0 has gone, with the store."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    world = dist.group.WORLD
    assert world is not None
    lanes = Lanes(world, 1, torch.device("cpu"), LaneSettings(timeout_s=20), Recorder(False))
    failures = lanes.failures
    failure._LINGER_S = 0.0
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while (1 - rank // 2) not in failure.lost_ranks(world, range(3)):  # rank 0 waits for 1's end, rank 2 for 0's
        time.sleep(0.02)
    print(failures.report_peer(1) if rank == 0 else failures.first_failure())
    if rank == 2:
        print(failures.report_peer(0))
        os._exit(0)  # the store is gone


def test_who_asks_when_the_store_is_gone_reads_a_letter(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    outcomes = outcome_of(tmp_path, ask_late, *((rank, port) for rank in range(3)))
    assert "rank 1 died or closed its connection" in outcomes[0][1], outcomes
    assert outcomes[2][1].count("rank 1 died or closed its connection first (seen by rank 0)") == 2, outcomes
    assert "the rendezvous store does not answer" in outcomes[2][1]


class FakeStream:
    """A stream with work that a dead peer keeps from ending."""

    def __init__(self, num_busy: int) -> None:
        self.num_busy = num_busy

    def query(self) -> bool:
        self.num_busy -= 1
        return self.num_busy < 0


@pytest.mark.parametrize(
    ("num_busy", "all_come", "failure_found", "expected"),
    [
        (0, True, None, ("destroyed", False)),
        (5, True, None, ("destroyed", False)),
        (0, False, None, ("aborted", False)),  # the peer is gone: giving its connection back would wait for it
        (1 << 60, True, "rank 1 died", ("aborted", True)),
        (1 << 60, True, None, ("aborted", True)),  # after timeout_s
    ],
)
def test_close_on_nccl_waits_for_no_dead_peer(
    monkeypatch: pytest.MonkeyPatch,
    num_busy: int,
    all_come: bool,
    failure_found: str | None,
    expected: tuple[str, bool],
) -> None:
    done: list[str] = []
    ended = {False: "destroyed", True: "aborted"}
    monkeypatch.setattr("ddp_hooks.comm.executors.lanes.destroy_group", lambda _, abort: done.append(ended[abort]))
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    lane = StreamLane(SimpleNamespace(), torch.device("cpu"))  # type: ignore[arg-type]
    lane._stream = FakeStream(num_busy)  # type: ignore[assignment]
    lanes: Any = Lanes.__new__(Lanes)
    vars(lanes).update(
        native=True,
        _lanes=[lane],
        _small=[],
        _groups=[SimpleNamespace()],
        _ending=[],
        _stuck_streams=False,
        _settings=LaneSettings(timeout_s=0.3, stall_warning_s=0.1),
        failures=SimpleNamespace(
            first_failure=lambda: failure_found,
            report_wait=lambda call: f"rank 0 waits in {call}",
            end_wait=lambda: None,
            close=lambda: None,
            exit_barrier=lambda _: all_come,
        ),
    )
    lanes.close()
    assert (done, lanes.stuck) == ([expected[0]], expected[1])


def test_the_end_waits_only_where_the_store_goes_with_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert serves(dist.PrefixStore("default_pg", served)) and not serves(dist.HashStore())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not serves(served)
    failure.expect_readers(served, "key", 3)
    assert not failure._expected
