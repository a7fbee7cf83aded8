"""Which tensors travel together, and what is fused of what is ready.

Prevents: a group that is split, an urgent message that waits for one that is not, a message of two types.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hooks.coordination.control.send_queue import fuse
from ddp_hooks.coordination.grouping import at_most_bytes, complete, equal_counts
from ddp_hooks.coordination.request import Operation, Request, TensorSpec, pack, unpack


@given(st.integers(1, 40), st.integers(1, 50))
def test_equal_counts(num_names: int, num_groups: int) -> None:
    names = [str(index) for index in range(num_names)]
    groups = equal_counts(names, num_groups)
    assert [name for group in groups for name in group] == names
    sizes = [len(group) for group in groups]
    assert len(groups) == min(num_groups, num_names) and max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 200))
def test_at_most_bytes(sizes: list[int], limit: int) -> None:
    nbytes = {str(index): size for index, size in enumerate(sizes)}
    kinds = {name: int(name) // 7 for name in nbytes}
    groups = at_most_bytes(nbytes, limit, kinds)
    assert [name for group in groups for name in group] == list(nbytes)
    for group in groups:
        assert len(group) == 1 or sum(nbytes[name] for name in group) <= limit
        assert len({kinds[name] for name in group}) == 1


def test_lists_of_the_users() -> None:
    assert complete([["b", "a"]], "abcd") == [["b", "a"], ["c"], ["d"]]
    for groups, message in (
        ([["a"], []], "group 1 is empty"),
        ([["a", "x"]], "group 0 has 'x', which is no trained parameter"),
        ([["a"], ["b", "a"]], "'a' is in groups 0 and 1"),
        ([["a", "a"]], "'a' is in groups 0 and 0"),
    ):
        with pytest.raises(ValueError, match=message):
            complete(groups, "ab")


def reduce(name: str, numel: int = 10, dtype: str = "torch.float32", **settings: object) -> Request:
    return Request(name, "all_reduce", (TensorSpec(name, (numel,), dtype),), **settings)  # type: ignore[arg-type]


def messages(*requests: Request, limit_bytes: int = 100, mix_groups: bool = True) -> list[str]:
    return ["".join(request.name for request in message) for message in fuse(requests, limit_bytes, mix_groups)]


def test_neighbours_are_fused_up_to_a_size() -> None:
    assert messages(*map(reduce, "abcde")) == ["ab", "cd", "e"]
    assert messages(*map(reduce, "abc"), limit_bytes=0) == ["a", "b", "c"]
    assert messages(reduce("a"), reduce("b", 1000), reduce("c")) == ["a", "b", "c"], "what is larger stands alone"
    assert reduce("a", 7, "torch.float64").nbytes == 56


def test_what_differs_is_not_fuse() -> None:
    half = "torch.float16"
    assert messages(reduce("a"), reduce("b", dtype=half), reduce("c", dtype=half), reduce("d")) == ["a", "bc", "d"]
    assert messages(reduce("a"), reduce("b", mean=True), reduce("c", mean=True)) == ["a", "bc"]
    for operation in ("broadcast", "all_gather", "all_to_all", "reduce_scatter"):
        assert messages(reduce("a"), other("b", operation), other("c", operation), reduce("d")) == ["a", "b", "c", "d"]


def other(name: str, operation: Operation) -> Request:
    return Request(name, operation, (TensorSpec(name, (-1, 2), "torch.float32"),))


def test_priorities_go_first_and_by_themselves() -> None:
    assert messages(reduce("a"), reduce("b", priority=1), reduce("c"), reduce("d", priority=1)) == ["bd", "ac"]
    assert messages(reduce("a", priority=-1), reduce("b"), reduce("c", priority=2)) == ["c", "b", "a"]


def test_groups_are_never_cut() -> None:
    group = Request("g", "all_reduce", tuple(TensorSpec(n, (30,), "torch.float32") for n in "xy"), grouped=True)
    small = Request("h", "all_reduce", (TensorSpec("z", (1,), "torch.float32"),), grouped=True)
    assert messages(group, reduce("a")) == ["g", "a"], "larger than the limit"
    assert messages(reduce("a"), small, reduce("b")) == ["ahb"]
    assert messages(reduce("a"), small, reduce("b"), mix_groups=False) == ["a", "h", "b"]


def test_requests_travel_as_they_are() -> None:
    requests = [
        reduce("a", mean=True, priority=-3),
        Request("b", "broadcast", (TensorSpec("b", (), "torch.bool"),), root=2),
        Request("c", "all_gather", (TensorSpec("c", (-1, 5), "torch.int64"),), grouped=True),
    ]
    assert unpack(json.loads(json.dumps(pack(requests)))) == requests
