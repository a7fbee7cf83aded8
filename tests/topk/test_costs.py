"""Rounds and words of every algorithm, as the fabric counts them, against SparDL's Table I.

Prevents: messages that grow with the number of workers, and rounds that nobody needs.
"""

from __future__ import annotations

import pytest

from recipes.benchmarks.sparse_costs import WORLD_SIZES, Counted, lines

LARGE = [
    pytest.param(size, marks=[pytest.mark.slow, pytest.mark.timeout(400)]) for size in WORLD_SIZES if size > 16
]
VARYING = ("Ok-Topk", "TopkDSA")  # messages follow the data: regions are as full as they are


@pytest.mark.parametrize("world_size", [*(size for size in WORLD_SIZES if size <= 16), *LARGE])
def test_table_1(world_size: int) -> None:
    counted = lines(world_size)
    assert {line.name.split(",")[0] for line in counted} == {"SparDL", "TopkA", "TopkDSA", "gTopk", "Ok-Topk"}
    for line in counted:
        check(line)


def check(line: Counted) -> None:
    least, most, counted = line.least, line.most, line.counted
    assert least.rounds <= counted.rounds <= most.rounds, line
    if line.name in VARYING:
        lengths = 3 * (line.world_size - 1)  # they travel too, which the table leaves out
        assert 0.5 * least.words <= counted.words <= 1.6 * most.words + lengths, line
    else:
        assert least.words - 1e-6 <= counted.words <= most.words + 1e-6, line
    if line.name == "gTopk" and line.world_size.bit_count() == 1:  # else the tree is not full
        assert counted == most, line
