"""The recipe of several tasks: the losses of plain DDP, with fewer bytes; and the benchmark of conditional networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.benchmarks import conditional
from recipes.benchmarks.harness import Run
from recipes.common.images import load_images
from recipes.common.record import Record
from recipes.complete import multitask_coordinated as recipe
from tests.support.recipes.launched import run_recipe
from tests.support.workers import WorkerPools

FEW = ["--steps=6", "--batch-size=8", "--log-every=1", "--width=16"]


@pytest.mark.slow
def test_losses_of_plain_ddp(tmp_path: Path) -> None:
    plain = run_recipe("multitask_coordinated", tmp_path, "none", *FEW)
    coordinated = run_recipe("multitask_coordinated", tmp_path, "coordinated", *FEW, by_torchrun=True)
    assert plain.num_workers == coordinated.num_workers == 2
    assert [step for step, _ in coordinated.losses] == list(range(1, 7))
    assert [loss for _, loss in coordinated.losses] == pytest.approx([loss for _, loss in plain.losses], abs=1e-4)
    assert coordinated.held_out == pytest.approx(plain.held_out, abs=0.01)
    assert coordinated.sent_mb_per_step is not None and plain.sent_mb_per_step is not None
    assert 0 < coordinated.sent_mb_per_step < 0.7 * plain.sent_mb_per_step


def train(rank: int, world_size: int, folder: str, *arguments: str) -> Record:
    args = recipe.parse_arguments([*FEW, f"--output={folder}", "--device=cpu", *arguments])
    return recipe.train(args, load_images(None, args.image_size), torch.device("cpu"), "")


@pytest.mark.quick("1")
@pytest.mark.parametrize("world_size", [1, 3])
def test_accumulation_and_groups(workers: WorkerPools, tmp_path: Path, world_size: int) -> None:
    found: list[Any] = [
        workers(world_size).run(train, str(tmp_path), "--accumulate=3", *more)[0]
        for more in (["--hook=none"], ["--num-groups=3"])
    ]
    plain, coordinated = found
    assert [loss for _, loss in coordinated.losses] == pytest.approx([loss for _, loss in plain.losses], abs=1e-4)


def test_tasks() -> None:
    table = recipe.tasks(10, 5)
    assert table.shape == (5, 10) and table[0].tolist() == list(range(10))
    assert table[1:].sum(1).tolist() == [5] * 4 and len({tuple(row) for row in table.tolist()}) == 5


@pytest.mark.slow
def test_the_benchmark_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    conditional.BENCHMARK.run(["--quick", "--loopback", "--output", str(tmp_path), "--markdown", str(page)])
    assert "Every rank uses two branches" in capsys.readouterr().out
    results = Run.load(tmp_path / "conditional.json").results
    assert [result["choice"] for result in results] == ["step", "rank"]
    for result in results:
        assert len({windows[-1]["digest"] for windows in result["windows"].values()}) == 1, "all of them train the same"
        sent_mb = result["windows"]["coordinated"][-1]["sent_mb"]
        assert 0 < sent_mb * 1e6 < result["parameter_bytes"], "what two ranks all-reduce, and less"
    text = page.read_text()
    assert text.count("| coordinated |") == 2 and "python -m recipes.benchmarks.conditional --quick" in text
