"""The ResNet recipe: equal losses with plain DDP and DeAR, and runs that go on where they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from recipes.common.record import Record
from recipes.complete import resnet_imagenet as recipe
from tests.support.recipes.launched import run_recipe
from tests.support.workers import WorkerPools

FEW = ["--epochs=2", "--limit-batches=3", "--batch-size=8", "--log-every=1"]


def assert_same_losses(found: Record, expected: Record) -> None:
    """To rounding, step for step."""
    assert [step for step, _ in found.losses] == [step for step, _ in expected.losses]
    assert [loss for _, loss in found.losses] == pytest.approx([loss for _, loss in expected.losses], abs=1e-4)


@pytest.mark.slow
def test_dear_has_the_losses_of_plain_ddp_and_resumes(tmp_path: Path) -> None:
    plain = run_recipe("resnet_imagenet", tmp_path / "none", "none", *FEW)
    assert plain.num_workers == 2 and plain.steps == 6 == len(plain.losses)

    half = run_recipe("resnet_imagenet", tmp_path / "dear", "dear", *FEW, "--stop-after=1", by_torchrun=True)
    assert half.num_workers == 2 and half.steps == 3
    assert half.sent_mb_per_step is not None and half.sent_mb_per_step > 0
    assert [path.name for path in (tmp_path / "dear").glob("epoch-*")] == ["epoch-1"]

    resumed = run_recipe("resnet_imagenet", tmp_path / "dear", "dear", *FEW, "--resume")
    assert resumed.num_workers == 2
    assert_same_losses(resumed, plain)
    assert resumed.held_out["top-1 accuracy"] == pytest.approx(plain.held_out["top-1 accuracy"], abs=0.01)
    assert [path.name for path in (tmp_path / "dear").glob("epoch-*")] == ["epoch-2"]


@pytest.mark.slow
def test_sparse_gradients(tmp_path: Path) -> None:
    record = run_recipe("resnet_imagenet", tmp_path, "spardl", *FEW, "--density=0.01", "--epochs=3")
    assert record.num_workers == 2 and record.steps == 9
    assert record.sent_mb_per_step is not None and 0 < record.sent_mb_per_step < 10  # plain DDP sends 45


# In processes that are there already -------------------------------------------------------------------


def train(rank: int, world_size: int, folder: str, *arguments: str) -> tuple[Record, dict[str, Any]]:
    """The record, and the weights."""
    args = recipe.parse_arguments([*FEW, f"--output={folder}", "--device=cpu", *arguments])
    record = recipe.train(args, recipe.load_data(None, 32), torch.device("cpu"), "")
    newest = recipe.newest_checkpoint(Path(folder))
    assert newest is not None
    return record, torch.load(newest / "training.pt", weights_only=True)["model"]


@pytest.mark.slow
def test_what_was_left_out_comes_back_with_a_resumed_run(workers: WorkerPools, tmp_path: Path) -> None:
    whole = workers(2).run(train, str(tmp_path / "whole"), "--hook=spardl")
    workers(2).run(train, str(tmp_path / "parts"), "--hook=spardl", "--stop-after=1")
    resumed = workers(2).run(train, str(tmp_path / "parts"), "--hook=spardl", "--resume")
    for (found, weights), (expected, expected_weights) in zip(resumed, whole, strict=True):
        assert found.num_workers == 2 and found.losses == expected.losses and found.held_out == expected.held_out
        assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["none", "dear", "spardl"])
def test_mixed_precision_clipping_and_channels_last(workers: WorkerPools, tmp_path: Path, hook: str) -> None:
    how = [f"--hook={hook}", "--epochs=1", "--clip=1", "--channels-last", "--amp=bf16"]
    for record, weights in workers(2).run(train, str(tmp_path), *how):
        assert all(loss < 4 for _, loss in record.losses)  # log(10) = 2.3 is what guessing costs
        assert weights["layer1.0.conv1.weight"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_sparse_gradients_go_on_with_another_number_of_ranks(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(train, str(tmp_path), "--hook=spardl", "--stop-after=1")
    ((record, _),) = workers(1).run(train, str(tmp_path), "--hook=spardl", "--resume")
    assert record.num_workers == 1 and record.steps == 6


# Images and arguments ----------------------------------------------------------------------------------


def test_imagenets_folders(tmp_path: Path) -> None:
    for part, per_class in (("train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for index in range(per_class):
                Image.new("RGB", (40, 50), (90, 10, 200)).save(tmp_path / part / name / f"{index}.png")
    images = recipe.load_data(tmp_path, 32)
    assert (len(images.train), len(images.held_out), images.num_classes) == (6, 4, 2)
    assert {images.train[index][0].shape for index in range(6)} == {(3, 32, 32)}
    (tmp_path / "val" / "owl").mkdir()
    Image.new("RGB", (40, 50)).save(tmp_path / "val" / "owl" / "0.png")
    with pytest.raises(SystemExit, match="the class 'owl' is in one of them only"):
        recipe.load_data(tmp_path, 32)


def test_folder_of_classes(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for index in range(5):
            Image.new("RGB", (40, 50)).save(tmp_path / name / f"{index}.png")
    images = recipe.load_data(tmp_path, 32)
    assert (len(images.train), len(images.held_out)) == (8, 2)


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(tmp_path: Path) -> None:
    assert recipe.newest_checkpoint(tmp_path) is None
    for name in ("epoch-9", "epoch-10", "epoch-11.partial"):
        (tmp_path / name).mkdir()
    assert recipe.newest_checkpoint(tmp_path) == tmp_path / "epoch-10"


def test_arguments_that_cannot_work(tmp_path: Path) -> None:
    for wrong in ("--model=vgg11", "--amp=fp8", "--epochs=0", f"--data={tmp_path / 'missing'}"):
        with pytest.raises(SystemExit):
            recipe.parse_arguments([wrong])


@pytest.mark.slow
def test_one_process_needs_no_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.main([*FEW, "--epochs=1", f"--output={tmp_path}", "--device=cpu"])
    assert "epoch   1   accuracy" in capsys.readouterr().out
    assert Record.load(tmp_path / "resnet_imagenet_dear.json").num_workers == 1
