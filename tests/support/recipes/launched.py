"""Recipes, started as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from recipes.common.record import Record
from tests.support.launcher import launch

ROOT = Path(__file__).parents[3]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run_recipe(
    name: str, output: Path, hook: str, *arguments: str, by_torchrun: bool = False, ranks: int = 2
) -> Record:
    """What a recipe wrote; its output if it fails.

    Torchrun itself starts it, or we do as torchrun would, in a fraction of the time; with 0 ranks nobody tells it any.
    """
    given = [f"--output={output}", f"--hook={hook}", *arguments]
    if by_torchrun:
        torchrun(f"recipes/complete/{name}.py", *given)
    else:
        launch(f"recipes/complete/{name}.py", given, ranks)
    return Record.load(output / f"{name}_{hook}.json")


def torchrun(script: str, *arguments: str) -> str:
    """What a script prints on two ranks that torchrun itself has started."""
    run = subprocess.run(
        [sys.executable, *TORCHRUN, script, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout
