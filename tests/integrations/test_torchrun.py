"""Loops that torchrun has started: as many processes as were asked for, and checkpoints that survive being killed.

Prevents: launchers that silently start one process; a checkpoint that was never finished and is resumed, or of which
one rank's part is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.integrations.launched import assert_same_bits
from tests.support.launcher import launch


def torchrun(folder: Path, num_processes: int, *arguments: str, fails: bool = False) -> str:
    """Run a job; its output. With DeAR on two ranks by torchrun itself, otherwise as torchrun would start it."""
    folder.mkdir(exist_ok=True)
    if num_processes != 2 or arguments[:2] != ("--hook", "dear"):
        return launch("-m tests.integrations.trainer_job", [str(folder), *arguments], num_processes, fails)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}", "--standalone"]
    done = subprocess.run(
        [*command, "-m", "tests.integrations.trainer_job", str(folder), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert (done.returncode != 0) == fails, done.stdout[-5000:]
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """The folder of a run that nothing has disturbed; each is made once."""

    @cache
    def made(hook: str, num_processes: int) -> Path:
        folder = tmp_path_factory.mktemp("whole") / hook
        torchrun(folder, num_processes, "--hook", hook)
        return folder

    return made


def outcome(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "outcome.json").read_text()), torch.load(folder / "weights.pt")


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_as_many_processes_as_were_asked_for(whole: Callable[[str, int], Path], num_processes: int) -> None:
    (plain, expected), (ours, found) = (outcome(whole(hook, num_processes)) for hook in ("none", "dear"))
    assert ours["world_size"] == plain["world_size"] == num_processes
    assert ours["stats"]["ddp_hooks/sent_mb"] > 0
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.quick("topk-ddp_hooks_rank1.bin-2")
@pytest.mark.parametrize(
    ("hook", "file", "num_processes"),
    [
        ("dear", "optimizer.pt", 2),
        ("topk", "ddp_hooks_rank1.bin", 2),
        pytest.param("dear", "trainer_state.json", 2, marks=pytest.mark.slow),
        pytest.param("topk", "ddp_hooks_rank2.bin", 3, marks=pytest.mark.slow),
        pytest.param("tables", "ddp_hooks_tables.bin", 2, marks=pytest.mark.slow),
        pytest.param("tables", "optimizer.pt", 3, marks=pytest.mark.slow),
    ],
)
def test_killed_while_saving(
    tmp_path: Path, whole: Callable[[str, int], Path], hook: str, file: str, num_processes: int
) -> None:
    expected = outcome(whole(hook, num_processes))[1]
    torchrun(tmp_path / "killed", num_processes, "--hook", hook, "--die", file, fails=True)
    assert not (tmp_path / "killed" / "outcome.json").exists()
    assert (tmp_path / "killed" / "run" / "checkpoint-6").exists()
    text = torchrun(tmp_path / "killed", num_processes, "--hook", hook, "--resume")
    assert "checkpoint-6 was not written to its end" in text
    assert_same_bits(outcome(tmp_path / "killed")[1], expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "hook"),
    # With Lightning and DeAR the first rank writes everything, and renames it when it is complete.
    [("accelerate", "dear"), ("accelerate", "topk"), ("lightning", "topk")],
)
def test_other_loops_killed_while_saving(tmp_path: Path, loop: str, hook: str) -> None:
    given = ["--loop", loop, "--hook", hook]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    job = "-m tests.integrations.loops_job"
    launch(job, [str(tmp_path / "whole"), *given])
    launch(job, [str(tmp_path / "killed"), *given, "--die"], fails=True)
    assert not (tmp_path / "killed" / "weights.pt").exists()
    text = launch(job, [str(tmp_path / "killed"), *given, "--resume"])
    if loop == "accelerate":
        assert "checkpoint_1 was not written to its end" in text
    assert_same_bits(torch.load(tmp_path / "killed" / "weights.pt"), torch.load(tmp_path / "whole" / "weights.pt"))
