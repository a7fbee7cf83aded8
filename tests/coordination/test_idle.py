"""What many cycles leave behind, and what coordination costs while nobody asks: nothing.

Prevents: tables that grow with every name that was ever used; threads and files that stay; threads that look again and
again whether there is something to do.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_hooks.comm import run_on_fabric
from ddp_hooks.coordination import Coordinator, CoordinatorConfig
from ddp_hooks.coordination.control.cycle_policy import PATIENCE_S
from ddp_hooks.coordination.negotiation.messages import vector_nbytes
from ddp_hooks.coordination.negotiation.negotiator import STATUS_BITS, CycleInput, CycleResult, Negotiator
from ddp_hooks.coordination.request import Request, TensorSpec
from tests.support.workers import WorkerPools

CAPACITY = 6
CONFIG = CoordinatorConfig(lanes=2, slice_mb=0.01, timeout_s=20, stall_warning_s=10, cycle_ms=0.2, capacity=CAPACITY)


class Asking:
    """Two ranks that ask for few names again and again, now and then for one that never comes again."""

    def __init__(self) -> None:
        self.ranks = [Negotiator(rank, range(2), CAPACITY) for rank in range(2)]
        self.num_cycles = self.num_done = self.num_refused = self.num_evicted = 0
        self._chance = random.Random(0)
        self._pending: list[dict[str, Request]] = [{}, {}]
        self._late: dict[str, Request] = {}  # what rank 0 has asked for, and rank 1 asks for in the next cycle

    def cycle(self) -> None:
        self._pending[1] |= self._late
        self._late = {}
        for _ in range(2):
            self._ask()
        situations = [CycleInput(dict(pending)) for pending in self._pending]
        outcomes = [CycleResult(), CycleResult()]
        before = set(self.ranks[0].cache._entries)
        run_on_fabric([n.cycle(s, o) for n, s, o in zip(self.ranks, situations, outcomes, strict=True)])
        done = [request.name for request in outcomes[0].ready] + [*outcomes[0].answers, *outcomes[0].refused]
        for pending in self._pending:
            for name in done:
                pending.pop(name)
        self.num_cycles += 1
        self.num_done += len(done)
        self.num_refused += len(outcomes[0].refused)
        self.num_evicted += len(before - set(self.ranks[0].cache._entries))

    def _ask(self) -> None:
        kind = self._chance.random()
        name = f"new {self.num_cycles}" if kind < 0.1 else f"known {self._chance.randrange(5)}"
        if name in self._pending[0]:
            return
        request = requested(name, 4 + (kind > 0.95))
        self._pending[0][name] = request
        other = requested(name, 9) if 0.5 < kind < 0.52 else request
        (self._late if kind > 0.8 else self._pending[1])[name] = other


def requested(name: str, numel: int) -> Request:
    if name.endswith("0"):
        return Request(name, "any", (TensorSpec(name, (numel,), "torch.bool"),))
    return Request(name, "all_reduce", (TensorSpec(name, (numel,), "torch.float32"),))


def sizes(thing: object) -> dict[str, int]:
    """Of all containers that it holds, and those that it holds hold."""
    found: dict[str, int] = {}
    for name, value in vars(thing).items():
        if type(value).__module__.startswith("ddp_hooks"):
            found |= {f"{name}.{inner}": size for inner, size in sizes(value).items()}
        elif isinstance(value, Sized) and not isinstance(value, str | bytes | range):
            found[name] = len(value)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_cycles", [5_000, pytest.param(100_000, marks=pytest.mark.long)])
@pytest.mark.timeout(300)
def test_many_cycles_leave_nothing(num_cycles: int) -> None:
    asking, largest = Asking(), dict[str, int]()

    def go_on(number: int) -> int:
        for _ in range(number):
            asking.cycle()
            # Looking takes longer than a cycle; what stays is seen a few cycles later, too.
            for negotiator in asking.ranks if asking.num_cycles % 7 == 0 else ():
                for name, size in sizes(negotiator).items():
                    largest[name] = max(size, largest.get(name, 0))
        gc.collect()
        return tracemalloc.get_traced_memory()[0] if tracemalloc.is_tracing() else 0

    go_on(num_cycles * 4 // 10)
    tracemalloc.start()  # a little before, so that it knows of most of what is there
    try:
        middle_bytes = go_on(num_cycles // 10)
        end_bytes = go_on(num_cycles // 2)
    finally:
        tracemalloc.stop()
    assert end_bytes - middle_bytes < 100_000
    assert {"cache._entries", "cache._names", "cache._free", "_announced", "_table._waiting"} <= largest.keys()
    assert all(size <= 2 * CAPACITY for size in largest.values()), largest
    num_bits = asking.ranks[0].cache.num_bits
    assert vector_nbytes(STATUS_BITS + num_bits) == 2, "numbers of what was dropped are used again"
    # All of it happened, and not rarely.
    assert asking.num_done > num_cycles and min(asking.num_refused, asking.num_evicted) > num_cycles / 100


def many_requests(rank: int, world_size: int, number: int) -> dict[str, Any]:
    coordinator = Coordinator(config=CONFIG, groups={"pair": ["a", "b"]})

    def ask(count: int) -> None:
        for index in range(count):
            handles = [
                coordinator.all_reduce(torch.ones(2), f"known {index % 5}"),
                coordinator.all_reduce(torch.ones(1), "a"),
                coordinator.all_reduce(torch.ones(1), "b"),
            ]
            if index % 10 == 0:
                handles.append(coordinator.any(torch.tensor([rank == 0]), f"new {index} of {count}"))
            assert [float(handle.wait().sum()) for handle in handles] == [4.0, 2.0, 2.0, 1.0][: len(handles)]

    def held() -> dict[str, int]:
        dist.barrier()
        gc.collect()
        return {
            "files": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "objects": tracemalloc.get_traced_memory()[0],
        }

    tracemalloc.start()
    try:
        ask(300)
        before = held()
        ask(number)
        after = held()
    finally:
        tracemalloc.stop()
    found: dict[str, Any] = {f"more {name}": after[name] - before[name] for name in before}
    queue = coordinator._queue
    found["kept"] = [len(each) for each in (queue.pending, queue.partial_groups, queue.moving)]
    found["cycles"] = coordinator.stats().cycles
    found["largest"] = max(sizes(coordinator._control._negotiator).values())
    coordinator.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [500, pytest.param(5_000, marks=pytest.mark.long)])
@pytest.mark.timeout(300)
def test_many_requests_leave_nothing(workers: WorkerPools, number: int) -> None:
    for found in workers(2).run(many_requests, number, timeout_s=250):
        assert found["more files"] == 0 and found["more threads"] == 0, found
        assert found["more memory"] < 8 << 20 and found["more objects"] < 100_000, found
        assert found["kept"] == [0, 0, 0] and found["largest"] <= CAPACITY, found
        assert found["cycles"] >= number


def cpu_ticks() -> dict[str, int]:
    """Time that each of our threads has run, by name, in ticks of usually 10 ms."""
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith("ddp_hooks"):
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            found[thread.name] = int(fields[11]) + int(fields[12])  # utime, stime
    return found


def idle(rank: int, world_size: int, during: Callable[[Coordinator], None]) -> dict[str, Any]:
    coordinator = Coordinator(config=CONFIG)
    for _ in range(50):
        coordinator.all_reduce(torch.ones(1), "x").wait()
    dist.barrier()
    going_on = torch.ones(1)
    while going_on:  # a cycle that nobody waits for may follow
        cycles = coordinator.stats().cycles
        time.sleep(2 * PATIENCE_S)
        going_on = torch.tensor([float(coordinator.stats().cycles > cycles)])
        dist.all_reduce(going_on)
    before = cpu_ticks()
    during(coordinator)
    more = {name: ticks - before[name] for name, ticks in cpu_ticks().items()}
    found = {"more": more, "cycles": coordinator.stats().cycles - cycles}
    coordinator.close()
    return found


def doing_nothing(coordinator: Coordinator) -> None:
    time.sleep(1.0)


def spinning(coordinator: Coordinator) -> None:
    """The control thread looks again and again, as it must not."""
    coordinator._queue.delay_s = lambda peer_has_begun: 1e-5  # type: ignore[method-assign]
    coordinator._channel.wake()
    time.sleep(1.0)
    del coordinator._queue.delay_s


def test_an_idle_coordinator_does_not_run(workers: WorkerPools) -> None:
    for found in workers(2).run(idle, doing_nothing):
        names = {"ddp_hooks coordinator", "ddp_hooks lane 0", "ddp_hooks lane 1"}
        assert found["more"].keys() == names
        assert max(found["more"].values()) <= 1 and found["cycles"] <= 1, found  # on a full machine one may be late


def test_a_thread_that_runs_is_seen(workers: WorkerPools) -> None:
    for found in workers(2).run(idle, spinning):
        assert found["more"]["ddp_hooks coordinator"] > 1 and found["cycles"] <= 1, found
