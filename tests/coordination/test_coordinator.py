"""The coordinator between real processes: any order, from any thread, exact, and nothing when nobody asks.

Prevents: hangs, tensors that meet others, results that differ, threads that spin, files that stay open.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_hooks import LaneError
from ddp_hooks.comm import agree
from ddp_hooks.coordination import Coordinator, CoordinatorConfig
from tests.support.workers import WorkerPools

FAST = CoordinatorConfig(lanes=2, slice_mb=0.01, timeout_s=20, stall_warning_s=10, cycle_ms=0.2)


def value(rank: int, step: int, index: int, numel: int) -> torch.Tensor:
    """Whole numbers: their sums are exact."""
    return torch.arange(numel, dtype=torch.float32).remainder_(7) + rank * 3 + step + index


def any_order(rank: int, world_size: int, num_steps: int, num_tensors: int, config: CoordinatorConfig) -> list[str]:
    """Another subset in every step, in another order on every rank, from several threads, with pauses."""
    coordinator, wrong = Coordinator(config=config), list[str]()
    for step in range(num_steps):
        shared = random.Random(step)
        chosen = [index for index in range(num_tensors) if shared.random() < 0.5]
        tensors = {index: value(rank, step, index, 1 + 37 * index) for index in chosen}
        own = random.Random(step * 100 + rank)
        order = chosen.copy()
        own.shuffle(order)
        handles: dict[int, Any] = {}

        def ask(part: list[int], tensors: dict[int, torch.Tensor] = tensors, handles: Any = handles) -> None:
            for index in part:
                handles[index] = coordinator.all_reduce(tensors[index], f"tensor {index}")

        threads = [threading.Thread(target=ask, args=(order[part::3],)) for part in range(3)]
        for thread in threads:
            thread.start()
            if own.random() < 0.05:
                time.sleep(0.003)
        for thread in threads:
            thread.join()
        own.shuffle(order)
        for index in order:
            expected = torch.stack([value(peer, step, index, 1 + 37 * index) for peer in range(world_size)]).sum(0)
            if not torch.equal(handles[index].wait(), expected):
                wrong.append(f"step {step}, tensor {index}")
    coordinator.close()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_order(workers: WorkerPools, world_size: int) -> None:
    assert workers(world_size).run(any_order, 40, 50, FAST) == [[]] * world_size


def test_any_order_along_a_tree(workers: WorkerPools) -> None:
    config = replace(FAST, capacity=0, fan_out=2)
    assert workers(3).run(any_order, 10, 50, config) == [[]] * 3


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("world_size", "capacity", "num_steps"), [(2, 1024, 2000), (3, 20, 2000), (4, 1024, 2000)])
def test_any_order_for_long(workers: WorkerPools, world_size: int, capacity: int, num_steps: int) -> None:
    config = CoordinatorConfig(
        lanes=2, slice_mb=0.01, timeout_s=60, stall_warning_s=30, cycle_ms=0.2, capacity=capacity
    )
    assert workers(world_size).run(any_order, num_steps, 50, config, timeout_s=500) == [[]] * world_size


def threads_of_their_own(rank: int, world_size: int, num_steps: int) -> list[str]:
    """Two threads ask, and wait, each in its own order, for what each rank divides among them in its own way."""
    coordinator, wrong, own = Coordinator(config=FAST), list[str](), random.Random(rank)
    handles: dict[int, Any] = {}
    together = threading.Barrier(2)

    def expect(step: int, index: int) -> None:
        expected = torch.stack([value(peer, step, index, 1 + 50 * index) for peer in range(world_size)]).sum(0)
        if not torch.equal(handles[index].wait(), expected):
            wrong.append(f"step {step}, tensor {index}")

    def work(parts: list[list[int]], order: random.Random) -> None:
        try:
            for step, part in enumerate(parts):
                for index in part:
                    handles[index] = coordinator.all_reduce(value(rank, step, index, 1 + 50 * index), f"t{index}")
                for index in order.sample(part, len(part)):
                    expect(step, index)
                together.wait()
                for index in order.sample(range(6), 6):  # also what the other thread has asked for
                    expect(step, index)
                together.wait()
        except Exception as error:
            wrong.append(repr(error))
            together.abort()

    orders = [own.sample(range(6), 6) for _ in range(num_steps)]
    cuts = [own.randrange(7) for _ in range(num_steps)]
    parts = [order[:cut] for order, cut in zip(orders, cuts, strict=True)]
    others = [order[cut:] for order, cut in zip(orders, cuts, strict=True)]
    threads = [threading.Thread(target=work, args=(each, random.Random(rank))) for each in (parts, others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if coordinator.stats().requests != 6 * num_steps:
        wrong.append(f"{coordinator.stats().requests} requests")
    coordinator.close()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [150, 500])
def test_threads_that_wait_in_their_own_order(workers: WorkerPools, num_steps: int) -> None:
    assert workers(3).run(threads_of_their_own, num_steps) == [[]] * 3


def every_operation(rank: int, world_size: int) -> list[str]:
    """What each operation makes of what ranks give, twice, so that it is known the second time."""
    coordinator, wrong = Coordinator(config=FAST), list[str]()

    def check(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.equal(found, expected):
            wrong.append(f"{what}: {found.tolist()} instead of {expected.tolist()}")

    ranks = range(world_size)
    for again in range(2):
        rows = [torch.full((peer + again, 3), float(peer)) for peer in ranks]
        blocks = [torch.arange(world_size * 4.0).view(2 * world_size, 2) + 10 * peer for peer in ranks]
        sends = [[(peer + to + again) % 3 for to in ranks] for peer in ranks]
        sent = [torch.cat([torch.full((sends[p][to], 2), 10.0 * p + to) for to in ranks]) for p in ranks]
        mine = torch.arange(11.0) + rank
        strided = torch.arange(24.0).view(4, 6).t() * (rank + 1)
        handles = {
            "gather": coordinator.all_gather(rows[rank], "gather"),
            "scatter": coordinator.reduce_scatter(blocks[rank], "scatter"),
            "exchange": coordinator.all_to_all(sent[rank], "exchange", sends[rank]),
            "broadcast": coordinator.broadcast(mine, "broadcast", root=world_size - 1),
            "mean": coordinator.all_reduce(torch.full((5,), float(world_size * rank)), "mean", mean=True),
            "strided": coordinator.all_reduce(strided, "strided"),
            "number": coordinator.all_reduce(torch.tensor(float(rank)), "number"),
            "nothing": coordinator.all_reduce(torch.empty(0), "nothing"),
            "any": coordinator.any(torch.tensor([rank == 0, False, rank == world_size - 1]), "any"),
        }
        found = {name: handle.wait() for name, handle in handles.items()}
        total = sum(ranks)
        check("gather", found["gather"], torch.cat(rows))
        check("scatter", found["scatter"], sum(blocks)[2 * rank : 2 * rank + 2])  # type: ignore[index]
        received = [torch.full((sends[p][rank], 2), 10.0 * p + rank) for p in ranks]
        check("exchange", found["exchange"], torch.cat(received))
        check("broadcast", found["broadcast"], torch.arange(11.0) + world_size - 1)
        check("mean", found["mean"], torch.full((5,), float(total)))
        check("strided", found["strided"], torch.arange(24.0).view(4, 6).t() * sum(p + 1 for p in ranks))
        check("number", found["number"], torch.tensor(float(total)))
        check("nothing", found["nothing"], torch.empty(0))
        check("any", found["any"], torch.tensor([True, False, True]))
        assert all(handle.done for handle in handles.values())
    coordinator.close()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_operation(workers: WorkerPools, world_size: int) -> None:
    assert workers(world_size).run(every_operation) == [[]] * world_size


def grouped(rank: int, world_size: int) -> dict[str, Any]:
    """A group goes when all of it is there, on all ranks."""
    groups = {"g": ["a", "b", "c"]}
    coordinator = Coordinator(config=CoordinatorConfig(lanes=1, slice_mb=1.0, mix_groups=False), groups=groups)
    tensors = {name: torch.full((3,), float(index + rank)) for index, name in enumerate("abc")}
    first = [coordinator.all_reduce(tensors[name], name) for name in "ca"]
    alone = coordinator.all_reduce(torch.ones(2), "alone")
    alone.wait()
    untouched = [tensors[name].tolist() for name in "ca"]
    early = first[0].done
    last = coordinator.all_reduce(tensors["b"], "b")
    found = [handle.wait().tolist() for handle in (*first, last)]
    whole = coordinator.grouped_all_reduce([torch.ones(2), torch.full((1,), 2.0)], ["x", "y"], "own").wait().tolist()
    stats = coordinator.stats()
    refusals = []
    coordinator.all_reduce(torch.ones(3), "a")
    for ask in (
        lambda: coordinator.all_reduce(torch.ones(3), "a"),
        lambda: coordinator.grouped_all_reduce([torch.ones(1), torch.ones(1).double()], ["x", "y"], "two types"),
        lambda: coordinator.reduce_scatter(torch.ones(world_size + 1), "uneven"),
        lambda: coordinator.all_to_all(torch.ones(3), "splits", [1] * world_size),
        lambda: coordinator.broadcast(torch.ones(2, 3).t(), "strided"),
        lambda: coordinator.broadcast(torch.ones(2), "root", root=world_size),
        lambda: coordinator.all_gather(torch.tensor(1.0), "number"),
        lambda: coordinator.all_reduce(torch.ones(3), "b", mean=True),
        lambda: coordinator.all_reduce(torch.ones(3, dtype=torch.int64), "whole", mean=True),
        lambda: coordinator.any(torch.ones(2, 2), "square"),
        lambda: coordinator.all_reduce(torch.ones(2, device="meta"), "elsewhere"),
        lambda: coordinator.exchange(iter(()), "not a handle", after=[torch.ones(1)]),  # type: ignore[arg-type, list-item]
    ):
        with pytest.raises(ValueError) as error:
            ask()
        refusals.append(str(error.value))
    coordinator.close()
    with pytest.raises(RuntimeError, match="was closed"):
        coordinator.all_reduce(torch.ones(1), "late")
    return {
        "early": early,
        "untouched": untouched,
        "found": found,
        "whole": whole,
        "messages": stats.collectives,
        "sizes": stats.message_sizes,
        "requests": stats.requests,
        "refusals": refusals,
    }


def test_groups(workers: WorkerPools) -> None:
    for rank, found in enumerate(workers(2).run(grouped)):
        assert not found["early"] and found["untouched"] == [[2.0 + rank] * 3, [0.0 + rank] * 3]
        assert found["found"] == [[5.0] * 3, [1.0] * 3, [3.0] * 3]
        assert found["whole"] == [2.0, 2.0]
        assert found["messages"] == 3 and found["requests"] == 3, "a request is a group or what stands alone"
        assert found["sizes"] == {(36).bit_length(): 1, (12).bit_length(): 2}, "three of 12 bytes together; 8, and 12"
        for message, part in zip(
            found["refusals"],
            (
                "asked for already",
                "one type",
                "divide by 2 ranks",
                "add up to 3",
                "contiguous",
                "below 2",
                "got a number",
                "a group has one of each",
                "means are of floating-point numbers",
                "flags in one row",
                "on CPUs only so far, got one on meta",
                "after takes handles and work of lanes",
            ),
            strict=True,
        ):
            assert part in message


def out_of_data(rank: int, world_size: int) -> list[list[float]]:
    """Ranks make one step more than the one before."""
    coordinator = Coordinator(config=FAST)
    found = []
    for epoch in range(2):
        for _ in range(3 + rank):
            handles = [coordinator.all_reduce(torch.ones(2), f"{name}{epoch}") for name in "ab"]
            found.append(handles[0].wait().tolist())
            handles[1].wait()
        coordinator.join()
    coordinator.close()
    return found


def test_ranks_that_run_out_of_data(workers: WorkerPools) -> None:
    for rank, found in enumerate(workers(3).run(out_of_data)):
        epoch = [[3.0, 3.0]] * 3 + [[2.0, 2.0], [1.0, 1.0]][:rank]
        assert found == epoch * 2


def disagreeing(rank: int, world_size: int) -> list[str]:
    coordinator, messages = Coordinator(config=FAST), list[str]()
    for _ in range(2):
        try:
            coordinator.all_reduce(torch.ones(3 + (rank == 1)), "x").wait()
        except ValueError as error:
            messages.append(str(error))
        assert coordinator.all_reduce(torch.ones(2), "x").wait().tolist() == [3.0, 3.0]
    coordinator.close()
    return messages


def test_ranks_that_disagree_about_a_name(workers: WorkerPools) -> None:
    for messages in workers(3).run(disagreeing):
        assert len(messages) == 2
        for message in messages:
            assert "'x': x is [3] of torch.float32 on ranks [0, 2], [4] of torch.float32 on ranks [1]" in message


def settings_that_differ(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError) as error:
        Coordinator(config=CoordinatorConfig(cycle_ms=1.0 + rank))
    return str(error.value)


def test_settings_are_compared(workers: WorkerPools) -> None:
    for message in workers(2).run(settings_that_differ):
        assert "the set-up of Coordinator differs between ranks: config." in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cycle_ms": -1}, "cycle_ms must be >= 0 and finite, got -1"),
        ({"capacity": -1}, "capacity must be a whole number >= 0"),
        ({"fusion_mb": "x"}, "fusion_mb must be >= 0 and finite, got 'x'"),
        ({"timeout_s": 0}, "timeout_s must be > 0"),
        ({"lanes": 0}, "lanes must be None, or a whole number >= 1, got 0"),
        ({"fan_out": 1}, "fan_out must be None, or a whole number >= 2, got 1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoordinatorConfig(**settings)


def idle(rank: int, world_size: int) -> dict[str, int]:
    """What is done in a second in which nobody asks, and what many cycles leave behind."""
    coordinator = Coordinator(config=FAST)
    for _ in range(20):
        coordinator.all_reduce(torch.ones(1), "x").wait()
    before = coordinator.stats()
    turns = []
    delay_s = coordinator._queue.delay_s
    coordinator._queue.delay_s = lambda peer_has_begun: turns.append(1) or delay_s(peer_has_begun)  # type: ignore[method-assign, func-returns-value]
    time.sleep(1.0)
    num_turns = len(turns)
    after = coordinator.stats()
    dist.barrier()  # nobody asks again before all have looked
    files = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for _ in range(100):
        coordinator.all_reduce(torch.ones(1), "x").wait()
    found = {
        "turns": num_turns,
        "cycles": after.cycles - before.cycles,
        "files": len(os.listdir("/proc/self/fd")) - files,
        "threads": threading.active_count() - threads,
        "pending": len(coordinator._queue.pending),
        "sent": after.control_messages - before.control_messages,
    }
    coordinator.close()
    return found


def test_nobody_asks(workers: WorkerPools) -> None:
    for found in workers(3).run(idle):
        assert found.pop("turns") <= 1, "the look after the last cycle"
        assert found == {"cycles": 0, "files": 0, "threads": 0, "pending": 0, "sent": 0}


def one_rank_asks(rank: int, world_size: int, seen: str) -> Any:
    """The last rank never asks; the others are told, and everything ends everywhere."""
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_hooks").addHandler(handler)
    coordinator = Coordinator(
        config=CoordinatorConfig(lanes=1, slice_mb=1.0, timeout_s=3, stall_warning_s=1, cycle_ms=0.2)
    )
    if seen == "known":
        coordinator.all_reduce(torch.ones(1), "x").wait()
    message = ""
    try:
        if rank < world_size - 1:
            coordinator.all_reduce(torch.ones(1), "x").wait()
        else:
            while coordinator._queue.error is None:
                time.sleep(0.05)
            coordinator.all_reduce(torch.ones(1), "y")
    except LaneError as error:
        message = str(error)
    coordinator.close()
    logging.getLogger("ddp_hooks").removeHandler(handler)
    dist.barrier()
    return message, records


@pytest.mark.quick("new")
@pytest.mark.parametrize("seen", ["new", "known"])
def test_a_rank_that_never_asks_is_named(workers: WorkerPools, seen: str) -> None:
    for rank, (message, records) in enumerate(workers(3).run(one_rank_asks, seen)):
        assert "x was waited for too long: ranks [0, 1] have asked for it, ranks [2] have not" in message
        warning = "other ranks wait for x" if rank == 2 else "for x: ranks [2] have not asked for it"
        assert any(warning in record for record in records), records


def closes_early(rank: int, world_size: int) -> str:
    coordinator = Coordinator(config=FAST)
    coordinator.all_reduce(torch.ones(1), "x").wait()
    message = ""
    if rank == 1:
        coordinator.close(timeout_s=3)
    else:
        with pytest.raises(LaneError) as error:
            coordinator.all_reduce(torch.ones(1), "y").wait()
        message = str(error.value)
        coordinator.close(timeout_s=3)
    agree({}, None, dist.group.WORLD, "the end", None)  # type: ignore[arg-type]
    return message


def closes_with_a_request(rank: int, world_size: int) -> str:
    coordinator = Coordinator(config=replace(FAST, timeout_s=600, stall_warning_s=600))
    coordinator.all_reduce(torch.ones(1), "x").wait()
    message = ""
    if rank == 0:
        handle = coordinator.all_reduce(torch.ones(1), "y")
        coordinator.close(timeout_s=0.5)
        with pytest.raises(LaneError) as error:
            handle.wait()
        message = str(error.value)
    dist.barrier()  # a meeting would hear that rank 0 has given up, and end
    coordinator.close(timeout_s=3)
    return message


def test_a_request_that_nobody_else_makes_ends_with_close(workers: WorkerPools) -> None:
    pool = workers(2)
    messages = pool.run(closes_with_a_request)
    pool.end()
    assert "closed after 0.5 s; other ranks have not asked for y" in messages[0]


def test_a_rank_that_closes_early_is_named(workers: WorkerPools) -> None:
    messages = workers(2).run(closes_early)
    assert "y waits for ranks [1], which have closed their coordinator" in messages[0]
