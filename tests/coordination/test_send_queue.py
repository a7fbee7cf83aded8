"""Priorities: what is urgent overtakes what has not left, in one order on all ranks.

Prevents: ranks whose queues part, urgent rows behind megabytes that nobody waits for, and bits sent for nothing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_hooks.comm import Algorithm, LaneError, Recv, Send, without_messages
from ddp_hooks.coordination import Coordinator, CoordinatorConfig
from ddp_hooks.coordination.control import request_queue
from ddp_hooks.coordination.control.executor import Executor
from ddp_hooks.coordination.control.send_queue import MAX_UNDER_WAY, Message, SendQueue
from ddp_hooks.coordination.control.submission import Submission
from ddp_hooks.coordination.request import Request, TensorSpec
from tests.support.workers import WorkerFailed, WorkerPools

MIB = 1 << 20


def request(name: str, priority: int, nbytes: int = MIB) -> Request:
    return Request(name, "all_reduce", (TensorSpec(name, (nbytes // 4,), "torch.float32"),), priority=priority)


def put(queue: SendQueue, *requests: Request) -> None:
    queue.add(requests)


def names(messages: Sequence[Message]) -> list[str]:
    return [each.name for message in messages for each in message.requests]


def test_one_priority_holds_nothing_back() -> None:
    queue = SendQueue(2 * MIB, fusion_bytes=0)
    put(queue, *(request(f"r{i}", 0) for i in range(100)))
    assert names(queue.take()) == [f"r{i}" for i in range(100)] and not queue.under_way


def test_what_is_urgent_overtakes_what_has_not_left() -> None:
    queue = SendQueue(2 * MIB, fusion_bytes=0)
    put(queue, request("low 0", -1), request("low 1", -1), request("low 2", -1), request("early", 0))
    assert names(queue.take()) == ["early", "low 0"]
    put(queue, request("urgent", 5), request("small", 5, 4))
    assert names(queue.take()) == [], "there is no credit"
    queue.end(list(queue.under_way)[:1])
    assert names(queue.take()) == ["urgent"]
    queue.end(queue.under_way)
    assert names(queue.take()) == ["small", "low 1"]
    queue.end(queue.under_way)
    assert names(queue.take()) == ["low 2"] and not queue.waiting


def test_large_ones_leave_alone_and_not_too_many_at_once() -> None:
    queue = SendQueue(MIB, fusion_bytes=0)
    put(queue, request("large", 1, 9 * MIB), *(request(f"r{i}", 0, 4) for i in range(100)))
    assert names(queue.take()) == ["large"]
    queue.end(queue.under_way)
    assert len(queue.take()) == MAX_UNDER_WAY
    unknown = Request("rows", "all_gather", (TensorSpec("rows", (-1, 9), "torch.float32"),))
    assert Message(0, (unknown,)).cost(MIB) == MIB // 4


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 3 * MIB)), min_size=1, max_size=30), st.randoms())
def test_everything_leaves_once(asked: list[tuple[int, int]], chance: random.Random) -> None:
    queue, left = SendQueue(2 * MIB, fusion_bytes=0), list[str]()
    for index, (priority, nbytes) in enumerate(asked):
        put(queue, request(f"r{index}", priority, nbytes))
        if chance.random() < 0.5:
            left += names(queue.take())
            queue.end([number for number in queue.under_way if chance.random() < 0.5])
    while queue.waiting:
        left += names(queue.take())
        assert queue.under_way or not queue.waiting, "or nothing would ever end"
        queue.end(queue.under_way)
    assert sorted(left) == sorted(f"r{index}" for index in range(len(asked)))


class Slow(Executor):
    """Messages take a while, so that there is something to overtake."""

    def start(self, message: Message, mine: Sequence[Submission | None]) -> Any:
        if message.requests[0].priority < 0:
            self._lanes.run(without_messages(lambda: time.sleep(0.05)), "a pause")
        return super().start(message, mine)


def overtake(rank: int, world_size: int, hold_back: bool) -> tuple[list[str], list[float]]:
    """The order in which messages have ended, and what came of them."""
    config = CoordinatorConfig(lanes=1, slice_mb=1, credit_mb=1 if hold_back else 1000, fusion_mb=0, timeout_s=30)
    coordinator = Coordinator(config=config)
    order: list[str] = []
    note_end = coordinator._control._note_end

    def note(number: int, submissions: list[Submission]) -> None:
        order.extend(each.request.name for each in submissions)
        note_end(number, submissions)

    coordinator._control._executor = Slow(coordinator._lanes, note)
    coordinator.all_reduce(torch.ones(1), "first", priority=1).wait()  # there are several priorities, from now on
    with coordinator._queue.changed:  # one cycle takes all of them; a later one would order the rest anew
        low = [coordinator.all_reduce(torch.full((200_000,), float(rank)), f"low {i}", priority=-1) for i in range(8)]
    low[0].wait()
    if rank % 2:
        time.sleep(0.01)
    urgent = coordinator.all_reduce(torch.full((10,), float(rank)), "urgent", mean=True, priority=1)
    results = [float(urgent.wait()[0]), *(float(handle.wait()[-1]) for handle in low)]
    stats = coordinator.stats()
    coordinator.close()
    assert not coordinator._queue.queued and not coordinator._queue.blocked and stats.requests == 10
    return order, results


@pytest.mark.quick("2", "3")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_between_processes(workers: WorkerPools, world_size: int) -> None:
    found = workers(world_size).run(overtake, True)
    mean = (world_size - 1) / 2
    for order, results in found:
        assert order == found[0][0] and len(order) == 10
        assert order.index("urgent") < order.index("low 4"), "it does not wait for what had not left"
        assert results == [mean] + [mean * world_size] * 8
    for order, _ in workers(world_size).run(overtake, False):
        assert order[-1] == "urgent", "with credit for all of it nothing is overtaken"


def pass_on(rank: int, world_size: int, value: torch.Tensor) -> Algorithm:
    incoming = torch.empty_like(value)
    yield [Recv((rank - 1) % world_size, incoming), Send((rank + 1) % world_size, value.clone())]
    value.copy_(incoming)


@mock.patch.object(request_queue, "_CHECK_LANES_S", 1000.0)
def chains(rank: int, world_size: int) -> list[list[float]]:
    """Exchanges that follow others, and lie between collectives of other priorities, from two threads.

    The control thread does not look for the end of others by itself: it is woken.
    """
    config = CoordinatorConfig(lanes=2, slice_mb=1, credit_mb=0.5, timeout_s=30)
    coordinator = Coordinator(config=config)
    results: list[list[float]] = [[], []]

    def work(thread: int) -> None:
        chance = random.Random(10 * rank + thread)
        for step in range(30):
            value = torch.tensor([float(rank)])
            first = coordinator.exchange(pass_on(rank, world_size, value), f"a {thread}", priority=1)
            time.sleep(0.003 * chance.random())
            dense = coordinator.all_reduce(torch.ones(5000), f"dense {thread}", priority=thread - 1)
            then = coordinator.exchange(pass_on(rank, world_size, value), f"b {thread}", -1, after=[first, dense])
            then.wait()
            assert first.done and dense.done and int(dense.wait()[7]) == world_size, step
            results[thread].append(float(value))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    other = Coordinator(config=config)
    value = torch.tensor([float(rank)])
    coordinator.exchange(pass_on(rank, world_size, value), "c", after=[other.all_reduce(torch.ones(5), "dense")]).wait()
    results.append([float(value)])
    other.close()
    coordinator.close()
    return results


@pytest.mark.quick("2", "3")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_exchanges_follow_each_other(workers: WorkerPools, world_size: int) -> None:
    if world_size == 1:
        return  # nobody to exchange with; pass_on would send to itself
    for rank, results in enumerate(workers(world_size).run(chains)):
        *threads, beside = results
        assert threads == [[float((rank - 2) % world_size)] * 30] * 2
        assert beside == [float((rank - 1) % world_size)], "work of another coordinator wakes this one, too"


def break_a_lane(rank: int, world_size: int) -> list[str]:
    """What has left fails, so what waits for its turn must not wait for ever."""
    coordinator = Coordinator(config=CoordinatorConfig(lanes=1, slice_mb=1, credit_mb=1, timeout_s=2))
    coordinator.all_reduce(torch.ones(1), "first", priority=1).wait()

    def broken() -> Algorithm:
        if rank == 1:
            raise ArithmeticError("broken on purpose")
        yield [Recv(1, torch.empty(1))]

    handles = [coordinator.exchange(broken(), "broken")]
    handles += [coordinator.all_reduce(torch.ones(300_000), f"low {i}", priority=-1) for i in range(4)]
    errors = []
    for handle in handles:
        try:
            handle.wait()
        except LaneError as error:
            errors.append(str(error))
    coordinator.close()
    return errors


def test_what_waits_hears_of_lanes_that_fail(workers: WorkerPools) -> None:
    try:
        found = workers(2).run(break_a_lane)
    except WorkerFailed as failed:  # the process group may break with the lane
        raise AssertionError(str(failed)) from failed
    assert all(len(errors) >= 4 for errors in found)
    assert "broken on purpose" in found[1][0]


def follow_what_fails(rank: int, world_size: int) -> list[str]:
    """An exchange follows a request that is refused; then everything closes."""
    coordinator = Coordinator(config=CoordinatorConfig(lanes=1, slice_mb=1, timeout_s=20))
    refused = coordinator.all_reduce(torch.ones(3 + rank), "differs")
    then = coordinator.exchange(pass_on(rank, world_size, torch.ones(1)), "then", after=[refused])
    errors = []
    for handle in (refused, then):
        try:
            handle.wait()
        except ValueError as error:
            errors.append(str(error))
    coordinator.close()
    return errors


def test_what_follows_a_failure_fails(workers: WorkerPools) -> None:
    for errors in workers(2).run(follow_what_fails):
        assert len(errors) == 2 and errors[0] == errors[1] and "differs" in errors[0]


def lie_otherwise(rank: int, world_size: int) -> list[list[float]]:
    """One rank's tensor is strided, the others' are not; what follows on the lane must still meet."""
    coordinator = Coordinator(config=CoordinatorConfig(lanes=1, slice_mb=1, timeout_s=10))
    results = []
    for step in range(3):
        tensor = torch.full((3, 2), float(rank))
        tensor = torch.full((2, 3), float(rank)).t() if rank == 1 else tensor
        results.append(coordinator.all_reduce(tensor, f"strided {step}").wait().reshape(-1).tolist())
    coordinator.close()
    return results


def test_ranks_tensors_may_lie_otherwise(workers: WorkerPools) -> None:
    assert workers(3).run(lie_otherwise) == [[[3.0] * 6] * 3] * 3


def wait_in_vain(rank: int, world_size: int) -> int:
    """Cycles while one rank has ended a message, closes, and waits for another one."""
    coordinator = Coordinator(config=CoordinatorConfig(lanes=1, slice_mb=1, timeout_s=20, cycle_ms=0.1))
    coordinator.all_reduce(torch.ones(1), "first").wait()
    before = coordinator.stats().cycles
    if rank:
        time.sleep(1.0)
    coordinator.close()
    return coordinator.stats().cycles - before


def test_who_closes_says_so_once(workers: WorkerPools) -> None:
    assert max(workers(2).run(wait_in_vain)) < 20, "nobody asks again and again"
