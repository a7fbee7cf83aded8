"""Recipes, started as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from recipes.record import Record

ROOT = Path(__file__).parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run_recipe(name: str, output: Path, hook: str, *arguments: str, alone: bool = False) -> Record:
    """What a recipe wrote on two ranks, or alone; its output if it fails."""
    run = subprocess.run(
        [
            *[sys.executable, *([] if alone else TORCHRUN), f"recipes/{name}.py"],
            *[f"--output={output}", f"--hook={hook}", *arguments],
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return Record.load(output / f"{name}_{hook}.json")
