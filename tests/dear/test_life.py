"""Processes that begin, train and end by themselves, as users' scripts do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TRAINING = """
import gc, os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ddp_hooks import DearConfig, DearState, dear_hook

def train(num_steps, close, last_words=lambda: None):
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), *(torch.nn.Linear(64, 64) for _ in range(8)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.04, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    state = DearState(ddp, optimizer, DearConfig(atom_mb=0.01))
    ddp.register_comm_hook(state, dear_hook)
    for _ in range(num_steps):
        optimizer.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    last_words()
    if close:
        state.close()
"""

GIVE_EVERYTHING_BACK = """
torch.set_num_threads(1)
count_threads = lambda: len(os.listdir("/proc/self/task"))
before = count_threads()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train(3, close=sys.argv[1] == "close")
gc.collect()
dist.destroy_process_group()
if sys.argv[1] != "close":
    gc.collect()
    for _ in range(100):  # threads of lanes end by themselves
        if count_threads() > before:
            time.sleep(0.05)
print(before, count_threads())
"""

CLOSE_AT_EXIT = """
import atexit
from ddp_hooks.comm import Lanes
closed, close = [], Lanes.close
Lanes.close = lambda lanes: (closed.append(lanes), close(lanes))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gc.disable()
train(3, close=False)  # its model, DDP, optimizer and state are gone, but for what holds itself
atexit._run_exitfuncs()
print(len(closed))
"""

ONE_RANK_RAISES = """
def fail():
    if rank == 1:
        raise ZeroDivisionError("a mistake in the loss")

rank = int(sys.argv[2])
dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=3)
train(3, close=False, last_words=fail)
train(100, close=False)
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING + script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_closed_state_leaves_nothing_that_could_abort_the_process_at_its_end() -> None:
    process = start(GIVE_EVERYTHING_BACK, "close")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    before, after = map(int, output.split())
    assert after == before, "threads of process groups are still there"


def test_a_forgotten_state_is_collected_and_ends_its_lanes() -> None:
    process = start(GIVE_EVERYTHING_BACK + CLOSE_AT_EXIT, "forget")
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    before, after, num_closed = map(int, output.split())
    assert after == before, "threads of lanes or process groups are still there"
    assert num_closed == 1, "a state that nobody closes is closed when the process ends"


@pytest.mark.slow
def test_the_rank_whose_script_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    processes = [start(ONE_RANK_RAISES, str(tmp_path / "store"), str(rank)) for rank in range(3)]
    errors = [process.communicate(timeout=90)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1], errors
    assert "ZeroDivisionError: a mistake in the loss" in errors[1]
    for rank in (0, 2):
        assert "rank 1 ended first, with ZeroDivisionError: a mistake in the loss" in errors[rank]


ONE_RANK_LINGERS = """
import time
rank = int(sys.argv[2])
dist.init_process_group("gloo", f"file://{sys.argv[1]}", rank=rank, world_size=3)
train(3, close=False)
if rank == 0:
    time.sleep(13)  # it evaluates, or saves, for longer than a farewell
print("done")
"""


@pytest.mark.slow
def test_a_rank_may_take_its_time_at_the_end(tmp_path: Path) -> None:
    processes = [start(ONE_RANK_LINGERS, str(tmp_path / "store"), str(rank)) for rank in range(3)]
    outputs = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert all(output == "done\n" for output, _ in outputs)
