"""The VGG recipe trains, with the hook and without it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from recipes import vgg_spardl
from recipes.paper import spardl_bags as bags
from tests.support.workers import WorkerPools


def test_arguments_that_cannot_work() -> None:
    for wrong in ("--image-size=16", "--steps=0", "--depth=12"):
        with pytest.raises(SystemExit):
            vgg_spardl.parse_arguments([wrong])


def test_both_depths() -> None:
    for depth in (11, 16):
        assert vgg_spardl.make_vgg(depth, 7)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def train(rank: int, world_size: int, arguments: list[str]) -> Any:
    return vgg_spardl.train(vgg_spardl.parse_arguments(arguments))


@pytest.mark.slow
def test_it_learns_with_a_hundredth_of_the_gradient(workers: WorkerPools) -> None:
    run = partial(workers(2).run, train, timeout_s=300)
    for result in run(["--steps=60", "--density=0.05", "--warmup-steps=20"]):
        assert result.accuracy > 0.8 and result.stats.sent_bytes < 0.2 * 4 * result.num_parameters


@pytest.mark.parametrize("workers_in_it", [2, 3, 6, 8])
def test_the_picture_shows_what_is_sent(workers_in_it: int, tmp_path: Any) -> None:
    for moves in bags.moves_of(workers_in_it):
        sent = [block for move in moves for block in move.blocks]
        assert len(sent) == len(set(sent)) == workers_in_it - 1, "each block but the own one is sent once"
    bags.draw(workers_in_it, tmp_path / "bags.png")
    assert (tmp_path / "bags.png").stat().st_size > 1000
