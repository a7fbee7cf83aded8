"""Ranks compare settings once: equal everywhere, or the same error everywhere."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ddp_hooks.comm import agree
from ddp_hooks.comm.agreement import first_difference
from tests.support.workers import WorkerPools


def compare(rank: int, world_size: int, case: str) -> str:
    entries: dict[str, object] = {"lanes": 3, "shape of a": (2, 3)}
    problem = None
    if case == "differs" and rank == 1:
        entries["shape of a"] = (2, 4)
    if case == "absent" and rank == 2:
        del entries["lanes"]
    if case == "problem" and rank == 0:
        problem = "no optimizer"
    if case == "problem everywhere":
        problem = "no optimizer"
    assert dist.group.WORLD is not None
    try:
        agree(entries, problem, dist.group.WORLD, "the set-up", None)
    except ValueError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("same", "agreed"),
        ("differs", "the set-up differs between ranks: shape of a is (2, 3) on ranks [0, 2], (2, 4) on ranks [1]"),
        ("absent", "lanes is 3 on ranks [0, 1], (absent) on ranks [2]"),
        ("problem", "on ranks [0]: no optimizer"),
        ("problem everywhere", "no optimizer"),
    ],
)
def test_all_ranks_hear_the_same(workers: WorkerPools, case: str, expected: str) -> None:
    messages = workers(3).run(compare, case)
    assert len(set(messages)) == 1 and expected in messages[0]


def test_first_difference_names_both_sides() -> None:
    assert first_difference([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}], [4, 7]) == (
        "b is 2 on ranks [4], 3 on ranks [7]; make them equal"
    )
