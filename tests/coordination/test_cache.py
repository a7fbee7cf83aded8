"""The response cache: numbers, what is dropped, and that looking up changes nothing.

Prevents: caches that differ between ranks, and then bits that mean different things.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hooks.coordination.negotiation.cache import ResponseCache
from ddp_hooks.coordination.request import Request


def request(name: str, priority: int = 0) -> Request:
    return Request(name, "all_reduce", (), priority=priority)


def names(cache: ResponseCache) -> dict[int, str]:
    return {entry.bit: entry.request.name for entry in cache.entries()}


def test_numbers_ascend_and_are_used_again() -> None:
    cache = ResponseCache(8)
    for name in "abc":
        cache.put(request(name))
    assert names(cache) == {0: "a", 1: "b", 2: "c"} and cache.num_bits == 3
    cache.drop(1)
    assert cache.find("b") is None and cache.num_bits == 3
    cache.put(request("d"))
    cache.put(request("e"))
    assert names(cache) == {0: "a", 1: "d", 2: "c", 3: "e"}


def test_what_was_used_longest_ago_is_dropped() -> None:
    cache = ResponseCache(3)
    for name in "abc":
        cache.put(request(name))
    cache.use(1 << 0)
    assert cache.find("b") is not None, "looking up is no use"
    cache.put(request("d"))
    assert names(cache) == {0: "a", 1: "d", 2: "c"}
    cache.put(request("e"))
    assert names(cache) == {0: "a", 1: "d", 2: "e"}


def test_several_are_used_in_ascending_order_and_only_the_last_time_counts() -> None:
    cache = ResponseCache(4)
    for name in "abcd":
        cache.put(request(name))
    for bits in (0b0110, 0b1001, 0b0110):  # a and d are the oldest then, in this order
        assert [each.name for each in cache.use(bits)] == [name for i, name in enumerate("abcd") if bits >> i & 1]
    for name, forgotten in zip("efgh", "adbc", strict=True):
        cache.put(request(name))
        assert cache.find(forgotten) is None and len(names(cache)) == 4
    assert [each.name for each in cache.use(0b1111)] == ["e", "g", "h", "f"], "numbers mean something else now"


def test_a_name_that_means_something_else_replaces_what_it_meant() -> None:
    cache = ResponseCache(3)
    cache.put(request("a"))
    cache.put(request("a", priority=5))
    found = cache.find("a")
    assert len(names(cache)) == 1 and found is not None and found.request.priority == 5 and found.bit == 0


def test_no_capacity_keeps_nothing() -> None:
    cache = ResponseCache(0)
    cache.put(request("a"))
    assert cache.num_bits == 0 and cache.entries() == []


@given(st.lists(st.tuples(st.sampled_from(["put", "use", "drop", "find"]), st.integers(0, 9))), st.integers(1, 5))
def test_it_is_what_a_list_would_be(calls: list[tuple[str, int]], capacity: int) -> None:
    cache, twin = ResponseCache(capacity), list[str]()  # the twin: names, the last use at the end
    for call, number in calls:
        name = str(number)
        entry = cache.find(name)
        assert (entry is not None) == (name in twin)
        if call == "put":
            others = [each for each in twin if each != name]
            twin = [*others[max(0, len(others) - capacity + 1) :], name]
            cache.put(request(name))
        elif call == "use" and entry is not None:
            twin = [*(each for each in twin if each != name), name]
            cache.use(1 << entry.bit)
        elif call == "drop" and entry is not None:
            twin.remove(name)
            cache.drop(entry.bit)
        assert sorted(names(cache).values()) == sorted(twin) and len(twin) <= capacity
        assert all(bit < cache.num_bits <= capacity for bit in names(cache))


@given(st.lists(st.integers(1, 2**6 - 1), max_size=40))
def test_uses_of_several_at_once_overlap(uses: list[int]) -> None:
    cache, twin = ResponseCache(6), list("abcdef")
    for name in twin:
        cache.put(request(name))
    for bits in uses:
        used = [name for index, name in enumerate("abcdef") if bits >> index & 1]
        twin = [*(name for name in twin if name not in used), *used]
        cache.use(bits)
    for number, oldest in enumerate(twin):
        assert cache.find(oldest) is not None
        cache.put(request(f"new {number}"))
        assert cache.find(oldest) is None, "it was dropped, and nothing that was used later"


@pytest.mark.parametrize("capacity", [1, 2])
def test_small_ones(capacity: int) -> None:
    cache = ResponseCache(capacity)
    for name in "abcab":
        cache.put(request(name))
        assert cache.find(name) is not None
    assert len(names(cache)) == capacity
