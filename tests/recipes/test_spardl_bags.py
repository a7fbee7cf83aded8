"""The picture of SparDL's bags shows the messages of the algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.paper import spardl_bags


@pytest.mark.parametrize("workers", [2, 3, 6, 8])
def test_the_picture_shows_what_is_sent(workers: int, tmp_path: Path) -> None:
    for moves in spardl_bags.moves_of(workers):
        sent = [block for move in moves for block in move.blocks]
        assert len(sent) == len(set(sent)) == workers - 1, "each block but the own one is sent once"
    spardl_bags.draw(workers, tmp_path / "bags.png")
    assert (tmp_path / "bags.png").stat().st_size > 1000
