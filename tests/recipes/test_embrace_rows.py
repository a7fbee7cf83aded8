"""The picture of prior and delayed rows: a row in the wrong colour would explain another exchange than ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib import colors, image

from recipes.paper import embrace_rows
from recipes.paper.embrace_rows import COLUMNS, DELAYED, DIM, NEXT, NOW, PRIOR


def test_every_row_is_sent_once_and_what_somebody_looks_up_next_first() -> None:
    splits = embrace_rows.splits_of()
    used_next = set().union(*NEXT)
    for split, ids in zip(splits, NOW, strict=True):
        assert sorted(split.prior + split.delayed) == sorted(set(ids))
        assert used_next.issuperset(split.prior)
        assert used_next.isdisjoint(split.delayed)
        assert split.prior and split.delayed, "a picture without one of them explains nothing"
    # Worker 0 does not look row 1 up again, worker 2 does.
    assert 1 in splits[0].prior and 1 not in NEXT[0]


def test_bytes_are_those_of_the_rows() -> None:
    """Columns of two other workers; parts of a message begin at multiples of 16 bytes, and each row has a flag."""
    for split, ids in zip(embrace_rows.splits_of(), NOW, strict=True):
        others = [set(rows) for rows in NOW if rows is not ids]
        columns_nbytes = DIM // 3 * 4
        assert split.sent_bytes["lookup"] == sum(-(-len(rows) * columns_nbytes // 16) * 16 for rows in others)
        for kind, rows in (("prior", split.prior), ("delayed", split.delayed)):
            assert split.sent_bytes[kind] == 2 * (-(-len(rows) * columns_nbytes // 16) * 16 + 16)


@pytest.mark.parametrize(
    ("now", "following", "prior", "delayed"),
    [
        ([[0, 1], [1, 2]], [[3], []], [(), ()], [(0, 1), (1, 2)]),
        ([[0, 1], [1, 2]], [[2, 0], [1]], [(0, 1), (1, 2)], [(), ()]),
        ([[5, 5, 5]], [[5, 6]], [(5,)], [()]),
        ([[], [7], [], [7, 8]], [[8], [], [], []], [(), (), (), (8,)], [(), (7,), (), (7,)]),
    ],
    ids=["nothing prior", "nothing delayed", "one worker", "four workers, two without rows"],
)
def test_other_batches(
    now: list[list[int]], following: list[list[int]], prior: list[tuple[int, ...]], delayed: list[tuple[int, ...]]
) -> None:
    splits = embrace_rows.splits_of(now, following)
    assert [split.prior for split in splits] == prior
    assert [split.delayed for split in splits] == delayed


def test_picture_shows_as_many_cells_as_there_are_rows(tmp_path: Path) -> None:
    splits = embrace_rows.splits_of()
    embrace_rows.draw(tmp_path / "row_split.png", splits)
    pixels = image.imread(tmp_path / "row_split.png")[..., :3]
    rows_of_pixels = len(pixels) * 55 // 100  # the table and its rows; the timeline below has the same colours
    areas = {
        colour: int((np.abs(pixels[:rows_of_pixels] - colors.to_rgb(colour)).max(axis=2) < 0.5 / 255).sum())
        for colour in (PRIOR, DELAYED, *COLUMNS)
    }
    num_prior, num_delayed = sum(len(s.prior) for s in splits), sum(len(s.delayed) for s in splits)
    assert areas[PRIOR] / num_prior == pytest.approx(areas[DELAYED] / num_delayed, rel=0.02)
    for worker, colour in enumerate(COLUMNS):
        looked_up = len(set(NOW[worker])) + len(set(NEXT[worker]))
        assert areas[colour] > areas[PRIOR] / num_prior * looked_up, f"worker {worker}"
