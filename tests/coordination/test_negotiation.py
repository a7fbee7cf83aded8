"""Cycles of coordination, on the fabric: for many ranks, in any order, with names that mean something else at times.

Prevents: ranks that do different things or in another order; requests that are forgotten; bits that mean two things.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ddp_hooks.comm import num_rounds, run_on_fabric
from ddp_hooks.comm.executors.fabric import RankTraffic
from ddp_hooks.coordination.negotiation.messages import vector_nbytes
from ddp_hooks.coordination.negotiation.negotiator import STATUS_BITS, CycleInput, CycleResult, Negotiator
from ddp_hooks.coordination.request import Request, TensorSpec


def request(name: str, numel: int = 4, **settings: object) -> Request:
    return Request(name, "all_reduce", (TensorSpec(name, (numel,), "torch.float32"),), **settings)  # type: ignore[arg-type]


def negotiators(world_size: int, capacity: int = 1024, fan_out: int | None = None) -> list[Negotiator]:
    return [Negotiator(rank, range(world_size), capacity, fan_out) for rank in range(world_size)]


def cycle(ranks: Sequence[Negotiator], situations: Sequence[CycleInput]) -> tuple[CycleResult, list[RankTraffic]]:
    """One cycle of all ranks, which must find the same, and know the same afterwards."""
    outcomes = [CycleResult() for _ in ranks]
    traffic = run_on_fabric([n.cycle(s, o) for n, s, o in zip(ranks, situations, outcomes, strict=True)])
    assert all(outcome == outcomes[0] for outcome in outcomes)
    known = [n.cache.entries() for n in ranks]
    assert all(each == known[0] for each in known) and len({n.cache.num_bits for n in ranks}) == 1
    return outcomes[0], traffic


def pending(*requests: Request, **more: object) -> CycleInput:
    return CycleInput({each.name: each for each in requests}, **more)  # type: ignore[arg-type]


def names(requests: Sequence[Request]) -> list[str]:
    return [each.name for each in requests]


class Rank:
    """What a rank has asked for, and is still to ask for."""

    def __init__(self, todo: list[Request]) -> None:
        self.todo = todo
        self.pending: dict[str, Request] = {}

    def ask(self, number: int) -> None:
        for _ in range(min(number, len(self.todo))):
            each = self.todo.pop()
            self.pending[each.name] = each


@pytest.mark.quick("*-1", "*-2", "*-3", "*-5", "*-17")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 16, 17, 64])
@pytest.mark.parametrize(("capacity", "fan_out"), [(0, None), (3, None), (1024, None), (0, 2)])
def test_any_order_and_any_subset(world_size: int, capacity: int, fan_out: int | None) -> None:
    """50 tensors, a few steps: all become ready, once per step, in one order."""
    chance = random.Random(world_size)
    ranks = negotiators(world_size, capacity, fan_out)
    for step in range(4):
        subset = [
            request(f"t{index}", 4 + (step == 2 and index % 9 == 0)) for index in range(50) if chance.random() < 0.6
        ]
        states = []
        for _ in ranks:
            order = subset.copy()
            chance.shuffle(order)
            states.append(Rank(order))
        done: list[str] = []
        cycles = 0
        while any(state.todo or state.pending for state in states):
            for state in states:
                state.ask(chance.randrange(20))
            outcome, _ = cycle(ranks, [CycleInput(dict(state.pending)) for state in states])
            for each in outcome.ready:
                done.append(each.name)
                for state in states:
                    assert state.pending.pop(each.name) == each, "ready only if all ranks have asked for the same"
            assert not outcome.refused and outcome.failure is None
            cycles += 1
            assert cycles < 200, "something is never ready"
        assert sorted(done) == sorted(each.name for each in subset)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_steady_state_is_one_vector(world_size: int) -> None:
    ranks, requests = negotiators(world_size), [request(f"t{index}") for index in range(50)]
    everything = [pending(*requests)] * world_size
    first, traffic = cycle(ranks, everything)
    assert names(first.ready) == names(requests), "in the order in which the first rank hears of it"
    again, steady = cycle(ranks, [pending(*requests[::-1])] * world_size)
    assert names(again.ready) == names(requests), "by number, in whatever order they were asked for"
    nbytes = vector_nbytes(STATUS_BITS + 50)
    assert nbytes <= -(-50 // 8) + 8
    assert all(each.sent_bytes == num_rounds(world_size) * nbytes for each in steady)
    assert world_size == 1 or traffic[1].sent_bytes > steady[1].sent_bytes


def test_ready_when_the_last_rank_asks() -> None:
    ranks, a = negotiators(3), request("a")
    for known in (False, True):
        outcome, _ = cycle(ranks, [pending(a), pending(), pending(a)])
        assert outcome.ready == []
        outcome, _ = cycle(ranks, [pending(a), pending(a), pending(a)])
        assert outcome.ready == [a], f"known: {known}"


def test_what_was_told_is_not_told_again() -> None:
    ranks, a = negotiators(2), request("a")
    _, first = cycle(ranks, [pending(), pending(a)])
    _, second = cycle(ranks, [pending(), pending(a)])
    assert second[1].sent_bytes == vector_nbytes(STATUS_BITS) < first[1].sent_bytes


def test_a_name_that_means_something_else() -> None:
    ranks, a = negotiators(3), request("a")
    larger = request("a", 5)
    cycle(ranks, [pending(a)] * 3)
    outcome, _ = cycle(ranks, [pending(larger), pending(), pending()])
    assert outcome.ready == [] and all(n.cache.find("a") is None for n in ranks)
    assert ranks[0].has_news_of({"a": larger}) and not ranks[1].has_news_of({}), "another cycle is due"
    outcome, _ = cycle(ranks, [pending(larger)] * 3)
    assert outcome.ready == [larger]
    outcome, _ = cycle(ranks, [pending(larger)] * 3)
    assert outcome.ready == [larger]


def test_ranks_that_disagree_hear_the_same() -> None:
    ranks = [Negotiator(rank, [10, 11, 12], 8) for rank in range(3)]
    for other, found in (
        (request("a", 5), "a is [4] of torch.float32 on ranks [10, 12], [5] of torch.float32 on ranks [11]"),
        (request("a", mean=True), "mean is False on ranks [10, 12], True on ranks [11]"),
        (replace(request("a"), operation="broadcast"), "operation is all_reduce on ranks [10, 12], broadcast on"),
    ):
        outcome, _ = cycle(ranks, [pending(request("a")), pending(other), pending(request("a"))])
        assert outcome.ready == [] and found in outcome.refused["a"] and "#ranks-differ" in outcome.refused["a"]
        outcome, _ = cycle(ranks, [pending(request("a"))] * 3)
        assert names(outcome.ready) == ["a"], "the name may be used again"
        # Once known by all, a rank that disagrees makes all of them forget it.
        outcome, _ = cycle(ranks, [pending(request("a")), pending(other), pending(request("a"))])
        assert outcome.ready == []
        outcome, _ = cycle(ranks, [pending(request("a")), pending(other), pending(request("a"))])
        assert found in outcome.refused["a"]


def test_what_is_forgotten_while_it_is_pending() -> None:
    """The cache is full: what one rank waits for is dropped for something that all have asked for."""
    ranks, (a, b) = negotiators(2, capacity=1), map(request, "ab")
    cycle(ranks, [pending(a)] * 2)
    outcome, _ = cycle(ranks, [pending(a, b), pending(b)])
    assert outcome.ready == [b] and ranks[0].has_news_of({"a": a})
    outcome, _ = cycle(ranks, [pending(a), pending()])
    outcome, _ = cycle(ranks, [pending(a), pending(a)])
    assert outcome.ready == [a]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_used_by_anyone(world_size: int) -> None:
    ranks = negotiators(world_size)
    flags = Request("used", "any", (TensorSpec("used", (9,), "torch.bool"),))
    for _ in range(2):
        everyone = [pending(flags, flags={"used": 1 << rank}) for rank in range(world_size)]
        outcome, _ = cycle(ranks, everyone)
        assert outcome.answers == {"used": (1 << world_size) - 1} and outcome.ready == []
        outcome, _ = cycle(ranks, [pending(flags)] * world_size)
        assert outcome.answers == {"used": 0}


def test_without_data() -> None:
    ranks, a, b = negotiators(3), request("a"), request("b")
    cycle(ranks, [pending(a)] * 3)
    outcome, _ = cycle(ranks, [pending(a, b), pending(a, b), pending(joined=True)])
    assert outcome.ready == [a, b] and not outcome.all_joined, "known or not, zeros stand in"
    gather = Request("g", "all_gather", (TensorSpec("g", (-1,), "torch.float32"),))
    outcome, _ = cycle(ranks, [pending(gather, overdue=["g"]), pending(gather), pending(joined=True)])
    assert outcome.ready == [] and outcome.missing == {"g": [2]}, "rows cannot be made up"
    outcome, _ = cycle(ranks, [pending(joined=True)] * 3)
    assert outcome.all_joined and outcome.ready == [], "nobody has asked for what all stand in for"
    outcome, _ = cycle(ranks, [pending(joined=True), pending(a, joined=True), pending(joined=True)])
    assert outcome.all_joined and outcome.ready == [a], "but for what somebody has"


def test_joining_is_news_for_what_waits() -> None:
    ranks, a = negotiators(2), request("a")
    outcome, _ = cycle(ranks, [pending(a), pending()])
    assert outcome.ready == []
    outcome, _ = cycle(ranks, [pending(a), pending(joined=True)])
    assert outcome.ready == [a]
    _, traffic = cycle(ranks, [pending(), pending(joined=True)])
    assert traffic[1].sent_bytes == vector_nbytes(STATUS_BITS + ranks[1].cache.num_bits), "it is told once"
    outcome, _ = cycle(ranks, [pending(joined=True)] * 2)
    assert outcome.all_joined
    b = request("b")  # in the next epoch
    outcome, _ = cycle(ranks, [pending(b), pending()])
    assert outcome.ready == []
    outcome, _ = cycle(ranks, [pending(b), pending(joined=True)])
    assert outcome.ready == [b], "it is told once in every epoch"


def test_who_is_missing() -> None:
    ranks = [Negotiator(rank, [4, 5, 6], 8) for rank in range(3)]
    a, b = map(request, "ab")
    cycle(ranks, [pending(b)] * 3)
    outcome, _ = cycle(ranks, [pending(a, b, overdue=["a", "b"]), pending(b), pending()])
    assert outcome.missing == {"a": [5, 6], "b": [6]} and outcome.failure is None, "known or not"
    outcome, _ = cycle(ranks, [pending(a, b, expired=["a"]), pending(b), pending()])
    assert outcome.failure is not None
    assert "a was waited for too long: ranks [4] have asked for it, ranks [5, 6] have not" in outcome.failure


def test_ranks_that_close() -> None:
    ranks, a = negotiators(3), request("a")
    outcome, _ = cycle(ranks, [pending(), pending(closing=True), pending()])
    assert not outcome.closed and outcome.failure is None
    outcome, _ = cycle(ranks, [pending(a), pending(closing=True), pending()])
    assert (
        outcome.failure is not None and "a waits for ranks [1], which have closed their coordinator" in outcome.failure
    )
    outcome, _ = cycle(ranks, [pending(closing=True)] * 3)
    assert outcome.closed
