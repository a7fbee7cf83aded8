"""Images and batches: every rank sees its part of an epoch, and the same images are held out everywhere."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipes.common.batches import endless_batches
from recipes.common.images import load_images
from tests.support.recipes.images import make_folder


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world_size)


def test_digits() -> None:
    images = load_images(None, size=32)
    assert images.num_classes == 10
    held_out, train = set(images.held_out.indices), set(images.train.indices)
    assert len(held_out) == 1797 // 5
    assert held_out | train == set(range(1797))
    assert not held_out & train
    inputs, label = images.train[0]
    assert inputs.shape == (3, 32, 32)
    assert inputs.dtype == torch.float32
    assert inputs.min() >= -1
    assert 0.5 < inputs.max() <= 1
    assert label in range(10)


def test_every_rank_holds_out_the_same_images() -> None:
    torch.manual_seed(1)
    first = load_images(None, size=8)
    torch.manual_seed(2)
    second = load_images(None, size=8)
    assert first.held_out.indices == second.held_out.indices


def test_folder_of_images(tmp_path: Path) -> None:
    images = load_images(make_folder(tmp_path / "pets", per_class=5), size=16)
    assert images.num_classes == 3
    assert (len(images.train.indices), len(images.held_out.indices)) == (12, 3)
    for inputs, label in (images.train[index] for index in range(12)):
        assert inputs.shape == (3, 16, 16)
        torch.testing.assert_close(inputs[0, 0, 0], torch.tensor(80 / 255 * label * 2 - 1), atol=1e-6, rtol=0)


def test_ranks_share_an_epoch_without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = [(torch.tensor(number), torch.tensor(0)) for number in range(24)]
    seen = []
    for rank in range(2):
        as_rank(monkeypatch, rank, world_size=2)
        batches: Any = endless_batches(numbered, batch_size=4)  # type: ignore[arg-type]
        seen.append([batch[0].tolist() for batch in itertools.islice(batches, 6)])
    epochs = [sorted(itertools.chain(*seen[0][start : start + 3], *seen[1][start : start + 3])) for start in (0, 3)]
    assert epochs == [list(range(24)), list(range(24))]
    assert seen[0][:3] != seen[0][3:]  # another order in the next epoch
