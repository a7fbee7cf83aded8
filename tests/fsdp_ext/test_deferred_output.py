"""Memory of a result, and functions that use it before the result has arrived.

Prevents: results that are used before they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ext.compat import overrides_are_enabled
from fsdp_ext.deferred import DeferredOutput, Delivery, deferred_output, memory_of


class Seven:
    """A reduction that makes sevens, and notes what it is asked for."""

    def __init__(self, is_late: bool = True) -> None:
        self.output = deferred_output(torch.zeros(4), self)
        self.asked: list[str] = []
        self.is_late = is_late

    def all_reduce(self, output: Tensor, group: Any, op: Any) -> bool:
        assert type(output) is Tensor and output.data_ptr() == memory_of(self.output).data_ptr()
        self.asked.append(f"{op} over {group}")
        return self.is_late

    def add(self, target: Tensor, value: Any) -> bool:
        return False

    def divide(self, divisor: float) -> bool:
        self.asked.append(f"divide by {divisor}")
        return self.is_late

    def view(self) -> None:
        self.asked.append("view")

    def finish(self) -> None:
        self.asked.append("finish")
        memory_of(self.output).fill_(7)


def test_an_all_reduce_is_left_to_the_reduction() -> None:
    seven = Seven()
    group: Any = "replicas"
    assert dist.all_reduce(seven.output, op=dist.ReduceOp.AVG, group=group) is None
    assert seven.asked == ["RedOpType.AVG over replicas"]


def test_an_all_reduce_that_is_not_the_reductions() -> None:
    seven = Seven(is_late=False)
    with pytest.raises((ValueError, TypeError)):  # there is no such group
        dist.all_reduce(seven.output)
    assert seven.asked == ["RedOpType.SUM over None", "finish"]


def test_nobody_asks_inside_of_another_class() -> None:
    with torch._C.DisableTorchFunctionSubclass():
        assert not overrides_are_enabled()
        with torch.device("cpu"):  # which functions do ask
            assert not overrides_are_enabled()
    assert overrides_are_enabled()


@pytest.mark.parametrize(
    "use",
    [
        lambda output: output + 0,
        lambda output: torch.zeros(4).add_(output),
        lambda output: torch.add(torch.zeros(4), other=output),
        lambda output: output.clone(),
        lambda output: torch.cat([output]),
        lambda output: output.data,
        lambda output: output.detach(),
    ],
)
def test_who_else_uses_it_finds_it_filled(use: Callable[[DeferredOutput], Tensor]) -> None:
    seven = Seven()
    found = use(seven.output)
    assert type(found) is Tensor and found.tolist() == [7] * 4 and set(seven.asked) == {"finish"}


def test_a_division_is_left_to_the_reduction() -> None:
    seven = Seven()
    seven.output.div_(2)
    assert seven.asked == ["divide by 2"] and memory_of(seven.output).tolist() == [0] * 4


def test_a_division_of_what_is_there() -> None:
    seven = Seven(is_late=False)
    assert seven.output.div_(2) is seven.output
    assert seven.asked == ["divide by 2", "finish"] and memory_of(seven.output).tolist() == [3.5] * 4


@pytest.mark.parametrize(("adds", "expected"), [(False, 2.0), (True, 3.0)], ids=["first", "later"])
def test_a_partial_sum_of_a_failed_backward(adds: bool, expected: float) -> None:
    """FSDP2 keeps it, and it has no parameters: the result is in it if all ranks came so far, as without us."""
    work: Any = None
    delivery = Delivery(work, torch.full((2,), 2.0), torch.ones(2), 8, adds=adds)
    delivery.finalize(failed=True)
    assert delivery.output.tolist() == [1.0] * 2
    delivery.finalize(failed=False)
    assert delivery.output.tolist() == [expected] * 2


def test_sizes_and_views_do_not_need_it() -> None:
    seven = Seven()
    assert (seven.output.shape, seven.output.dtype, seven.output.layout) == ((4,), torch.float32, torch.strided)
    assert seven.asked == []
    view = torch.as_strided(seven.output, (2,), (1,), 1)
    assert type(view) is Tensor and view.tolist() == [0, 0] and seven.asked == ["view"]


def test_views_share_memory_and_its_version() -> None:
    """So that a change of a gradient is seen in the memory that it is a part of."""
    seven = Seven()
    memory = memory_of(seven.output)
    version = memory._version
    torch.as_strided(seven.output, (2,), (1,), 1).add_(1)
    assert memory._version > version and memory_of(memory) is memory
