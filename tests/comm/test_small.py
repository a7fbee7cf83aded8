"""Small sums: the bits of a sum in the order of ranks, on every rank, and two calls that meet are an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddp_hooks.comm import Algorithm, LaneError, run_on_fabric
from ddp_hooks.comm.executors.small import SmallExchange


def exchanged(values: list[Tensor], calls: list[str]) -> list[SmallExchange]:
    found = [SmallExchange(v, c, r, len(values)) for r, (v, c) in enumerate(zip(values, calls, strict=True))]

    def algorithm(rank: int) -> Algorithm:
        yield from found[rank].run()

    run_on_fabric([algorithm(rank) for rank in range(len(values))])
    return found


@pytest.mark.parametrize("shape", [(), (2,), (16,), (17,), (3, 50), (0,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_sums_and_largest(world_size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = [(torch.randn(shape) * 100).to(dtype) for _ in range(world_size)]
    expected, largest = values[0].clone(), torch.stack(values).amax(0)
    for value in values[1:]:
        expected += value
    ranks = range(world_size)
    for each in exchanged(values, ["f()"] * world_size):
        assert torch.equal(each.result(ranks), expected) and each.result(ranks).dtype == dtype
        assert torch.equal(each.result(ranks, largest=True), largest)


def test_what_comes_transposed_is_added_up_right() -> None:
    value = torch.arange(200.0).view(10, 20).t()
    assert torch.equal(exchanged([value, value.contiguous()], ["f()"] * 2)[1].result([0, 1]), 2 * value)


@pytest.mark.parametrize(
    ("others", "call", "expected"),
    [
        (torch.zeros(1), "g()", r"rank 3 waits in f\(\); rank 5 waits in g\(\)"),
        (torch.zeros(1, dtype=torch.int64), "f()", "1 of float32; rank 5 waits in f.* with 1 of int64"),
        (torch.zeros(999), "f()", "1 of float32; rank 5 waits in f.* with 999 of float32"),
    ],
)
def test_calls_that_differ_are_named_on_all_ranks(others: Tensor, call: str, expected: str) -> None:
    for each in exchanged([torch.zeros(1), others], ["f()", call]):
        with pytest.raises(LaneError, match=expected):
            each.result([3, 5])
