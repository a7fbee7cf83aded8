"""Lanes between real processes: results, order, accounting, and what happens when a rank dies or stalls.

Prevents: deadlocks between ranks whose lanes are at different places, wrong sums under slicing, silent hangs, and
errors that blame a bystander.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_hooks.comm import LaneError, Lanes, LaneSettings, LaneTimeout, Partition, Recorder, aligned_bounds
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.comm.executors.lanes import StreamLane
from ddp_hooks.comm.executors.slices import WINDOW
from ddp_hooks.comm.executors.work import ThreadWork
from ddp_hooks.comm.wire.codecs import IntBlocks
from ddp_hooks.comm.wire.rounded import DifferenceWire, RoundedWire
from tests.support.lanes import whole
from tests.support.messages import message_of
from tests.support.workers import WorkerFailed, WorkerPools

CPU = torch.device("cpu")


def lanes_of(num_lanes: int, timeout_s: float = 20, stall_warning_s: float = 10, slice_bytes: int = 256) -> Lanes:
    settings = LaneSettings(slice_bytes=slice_bytes, timeout_s=timeout_s, stall_warning_s=stall_warning_s)
    assert dist.group.WORLD is not None
    return Lanes(dist.group.WORLD, num_lanes, CPU, settings, Recorder(enabled=True))


def scatter_and_gather(rank: int, world_size: int, num_lanes: int, jitter: bool) -> dict[str, Any]:
    """Many collectives of odd sizes and types on several lanes, submitted at times that differ between ranks."""
    numels = [0, 1, 5, 64, 1000, 4097, 32 * world_size, 777]
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
    lanes = lanes_of(num_lanes)
    pauses = torch.Generator().manual_seed(rank)
    submissions = []
    for repeat in range(6):
        partitions, expected = [], []
        dtype = dtypes[repeat % 4]
        for index, numel in enumerate(numels):
            values = [whole(numel, 1000 * repeat + 10 * index + r, dtype) for r in range(world_size)]
            bounds = aligned_bounds(numel, world_size, values[0].element_size())
            partitions.append(Partition(values[rank].clone(), bounds))
            expected.append(torch.stack(values).sum(0))
        if jitter:
            time.sleep(0.02 * float(torch.rand((), generator=pauses)))
        scatter = lanes.reduce_scatter(partitions, f"numbers {repeat}")
        submissions.append((scatter, partitions, expected))
    for scatter, partitions, expected in submissions:
        scatter.wait()
        for (flat, bounds, _), total in zip(partitions, expected, strict=True):
            own = slice(bounds[rank], bounds[rank + 1])
            assert torch.equal(flat[own], total[own])
    gathers = [lanes.all_gather(partitions, "numbers") for _, partitions, _ in submissions]
    for gather, (_, partitions, expected) in zip(gathers, submissions, strict=True):
        gather.wait()
        assert gather.done
        assert all(torch.equal(p.flat, total) for p, total in zip(partitions, expected, strict=True))
    scratch = [[each.nbytes for each in b] for lane in lanes._lanes for b in lane._scratch.values()]  # type: ignore[union-attr]
    traffic = lanes.traffic
    lanes.close()
    payload = sum(p.nbytes for _, partitions, _ in submissions for p in partitions)
    return {"sent": traffic.sent_bytes, "payload": payload, "buffers": scratch, "rounds": traffic.rounds}


@pytest.mark.quick("3-3", "2-1", "1-1")
@pytest.mark.parametrize(
    ("world_size", "num_lanes"),
    [
        *((world_size, num_lanes) for world_size in (1, 2, 3, 4) for num_lanes in (1, 3)),
        *(pytest.param(world_size, 3, marks=pytest.mark.slow) for world_size in (5, 6, 7, 8)),
    ],
)
def test_results_and_accounting(workers: WorkerPools, world_size: int, num_lanes: int) -> None:
    pool = workers(world_size)
    results = pool.run(scatter_and_gather, num_lanes, True)
    sent = sum(result["sent"] for result in results)
    # Reduce-scatter and all-gather each move every byte P - 1 times, over all ranks together.
    assert sent == 2 * (world_size - 1) * results[0]["payload"]
    for buffers in (each for result in results for each in result["buffers"]):
        assert len(buffers) <= WINDOW and sum(buffers) <= 4 * 256, "memory does not grow with the number of ranks"
    if world_size > 4:
        pool.end()  # large pools are used once


def spread(rank: int, world_size: int, num_lanes: int) -> list[int]:
    """Collectives of which every lane moves some slices; the number of rounds of each lane."""
    lanes = lanes_of(num_lanes)
    for numel in (0, 5, 4097, 3000):
        values = [whole(numel, numel + r) for r in range(world_size)]
        flat = Partition(values[rank].clone(), aligned_bounds(numel, world_size, 4))
        scatter = lanes.spread_reduce_scatter(flat, "numbers", world_size)
        scatter.wait()  # lanes share the slices of both in different ways
        gather = lanes.all_gather([flat], "numbers")
        gather.wait()
        assert scatter.done and gather.done
        assert torch.equal(flat.flat, torch.stack(values).sum(0) / world_size)
    rounds = [lane.traffic.rounds for lane in lanes._lanes]
    lanes.close()
    return rounds


@pytest.mark.parametrize(("world_size", "num_lanes"), [(1, 2), (2, 1), (2, 3), (3, 2), (4, 3)])
def test_one_collective_on_all_lanes(workers: WorkerPools, world_size: int, num_lanes: int) -> None:
    for rounds in workers(world_size).run(spread, num_lanes):
        assert len(rounds) == num_lanes and (world_size == 1 or min(rounds) > 0)


def native_lane(rank: int, world_size: int) -> None:
    """The stream lane's native collectives, whose stream verbs do nothing on CPU."""
    lane = StreamLane(dist.group.WORLD, CPU)  # type: ignore[arg-type]
    for numel in (0, 3, 130, 32 * world_size, 1001):
        values = [whole(numel, 10 * numel + r) for r in range(world_size)]
        total = torch.stack(values).sum(0)
        partitions = [Partition(values[rank].clone(), aligned_bounds(numel, world_size, 4)) for _ in range(2)]
        lane.reduce_scatter(partitions, "numbers").wait()
        own = slice(partitions[0].bounds[rank], partitions[0].bounds[rank + 1])
        assert all(torch.equal(p.flat[own], total[own]) for p in partitions)
        lane.all_gather(partitions, "numbers").wait()
        assert all(torch.equal(p.flat, total) for p in partitions)
        lane.reduce_scatter(partitions, "the same on every rank", divisor=world_size).wait()
        assert all(torch.equal(p.flat[own], total[own]) for p in partitions)


def rounded_native_lane(rank: int, world_size: int) -> None:
    """The same numbers on a stream lane as on a lane's thread, in fewer bits."""
    found = []
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, 1, CPU, LaneSettings(timeout_s=20), Recorder())  # slices that are as long
    for lane in (StreamLane(dist.group.WORLD, CPU), lanes):
        generator = torch.Generator().manual_seed(rank)
        flat = torch.randn(1001, generator=generator)
        bounds, codec = aligned_bounds(1001, world_size, 4), IntBlocks(8, 32)
        residual = torch.randn(1001, generator=generator) / 100
        lane.reduce_scatter([Partition(flat, bounds, RoundedWire(codec, residual))], "gradients", world_size).wait()
        own = slice(bounds[rank], bounds[rank + 1])
        mean, precise, shown = flat[own].clone(), torch.randn(1001, generator=generator)[own], torch.zeros(1001)[own]
        parameters = torch.zeros(1001)
        lane.all_gather([Partition(parameters, bounds, DifferenceWire(codec, precise, shown))], "parameters").wait()
        assert torch.equal(shown, parameters[own]) and (shown - precise).abs().max() < 0.02
        found.append((mean, residual, parameters))
    lanes.close()
    assert all(map(torch.equal, *found))


def test_rounded_native_collectives(workers: WorkerPools) -> None:
    workers(3).run(rounded_native_lane)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_native_collectives(workers: WorkerPools, world_size: int) -> None:
    workers(world_size).run(native_lane)


def gather_after_another(rank: int, world_size: int, fails: bool) -> tuple[bool, str, bool]:
    """Whether a gather has begun before what it is to follow; and what it says and brings in the end."""
    lanes = lanes_of(3)
    bounds = aligned_bounds(500, world_size, 4)
    flat = torch.full((500,), -1.0)
    gate = threading.Event()

    def write_own_range() -> Algorithm:
        gate.wait(10)
        if fails:
            raise ValueError("on purpose")
        flat[bounds[rank] : bounds[rank + 1]] = rank
        yield from ()

    first = lanes.run(write_own_range(), "the first")
    other = lanes.run(iter(()), "another")  # type: ignore[arg-type]
    gather = lanes.all_gather([Partition(flat, bounds)], "the second", after=[other, first])
    other.wait()
    works: list[ThreadWork] = gather.works  # type: ignore[attr-defined]
    too_early = gather.done or any(work.error_within(0.2) is not None for work in works)
    gate.set()
    message = message_of(gather.wait)
    right = all(bool((flat[bounds[r] : bounds[r + 1]] == r).all()) for r in range(world_size))
    lanes.close()
    return too_early, message, right


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_a_gather_follows_other_work(workers: WorkerPools, world_size: int, fails: bool) -> None:
    for too_early, message, right in workers(world_size).run(gather_after_another, fails):
        assert not too_early
        assert ("on purpose" in message) if fails else (right and message == "nothing was raised")


def groups_of_few(rank: int, world_size: int) -> list[float]:
    """Lanes over [0, 2], then over [0, 1], of which rank 1 has made fewer groups; then torch's group over [1, 2]."""
    sums = []
    for members, num_lanes in (([0, 2], 2), ([0, 1], 1)):
        group = dist.new_group(members)
        if rank in members:
            assert isinstance(group, dist.ProcessGroup)
            lanes = Lanes(group, num_lanes, CPU, LaneSettings(timeout_s=20), Recorder(enabled=False))
            partition = Partition(torch.ones(2), (0, 1, 2))
            lanes.reduce_scatter([partition], "ones").wait()
            sums.append(float(partition.ranges[members.index(rank)]))
            lanes.close()
    group = dist.new_group([1, 2])
    if rank:
        assert isinstance(group, dist.ProcessGroup)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        sums.append(float(total))
    return sums


def test_lanes_of_few_ranks_are_no_matter_to_others(workers: WorkerPools) -> None:
    assert workers(3).run(groups_of_few, timeout_s=40) == [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]


def spans(rank: int, world_size: int) -> list[Any]:
    lanes = lanes_of(2)
    partition = Partition(whole(500, rank), aligned_bounds(500, world_size, 4))
    lanes.reduce_scatter([partition], "one").wait()
    lanes.all_gather([partition], "two").wait()
    lanes.close()
    return lanes._recorder.snapshot()


def test_timeline_names_lane_and_work(workers: WorkerPools) -> None:
    for recorded in workers(2).run(spans):
        named = {(span.track, span.name) for span in recorded}
        assert ("lane 0", "reduce-scatter of one") in named and ("lane 1", "all-gather of two") in named
        assert all(span.end_s >= span.start_s for span in recorded)


# -- failures -----------------------------------------------------------------------------------------------------


def collective_forever(rank: int, world_size: int, victim: int, how: str) -> str:
    """Collectives until ``victim`` dies or stops; returns what the others are told."""
    lanes = lanes_of(2, timeout_s=2 if how == "stall" else 20, stall_warning_s=1, slice_bytes=1 << 16)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_hooks").addHandler(handler)
    try:
        for step in range(10_000):
            if rank == victim and step == 20:
                if how == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(5)
                return "slept"
            partition = Partition(whole(50_000, step), aligned_bounds(50_000, world_size, 4))
            lanes.reduce_scatter([partition], f"layer{step}.weight").wait()
            lanes.all_gather([partition], f"layer{step}.weight").wait()
    except LaneError as error:
        kind = "timeout" if isinstance(error, LaneTimeout) else "error"
        return f"{kind}: {error} | {' '.join(records)}"
    finally:
        logging.getLogger("ddp_hooks").removeHandler(handler)
    return "nobody noticed"


@pytest.mark.quick("3-0", "4-2")
@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (3, 0), (4, 1), (4, 2)])
def test_a_death_is_blamed_on_the_one_that_died(workers: WorkerPools, world_size: int, victim: int) -> None:
    """Rank 0's far neighbour sees the connections of survivors break, and must still name the dead."""
    pool = workers(world_size)
    outcomes = pool.outcomes(collective_forever, victim, "die", timeout_s=40)
    pool.end()
    assert outcomes[victim][0] == "lost"
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0] == "ok" and outcome[1].startswith("error"), outcome
            assert f"rank {victim} died" in outcome[1] and f"rank {rank}, lane" in outcome[1], outcome
            assert "layer" in outcome[1] and "round" in outcome[1], outcome


def test_a_stall_is_reported_and_then_fails(workers: WorkerPools) -> None:
    pool = workers(3)
    outcomes = pool.outcomes(collective_forever, 1, "stall", timeout_s=40)
    pool.end()
    for rank in (0, 2):
        kind, message = outcomes[rank][:2]
        assert kind == "ok" and not message.startswith("nobody"), outcomes[rank]
        assert "s for reduce-scatter of layer20.weight" in message, "no warning came before the failure"
        # The other survivor may be slower to report its own wait, and stand beside the culprit until it has.
        assert re.search(r"ranks? (0, )?1(, 2)? reports? no wait so far, and may be the cause", message), message


def raises_on_one_rank(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("on purpose")
    dist.barrier()


def in_another_order(rank: int, world_size: int, another: bool) -> list[str]:
    """Two collectives of one size on one lane, whose messages are told from each other by their labels."""
    settings = LaneSettings(slice_bytes=256, timeout_s=2, stall_warning_s=1, tag_by_label=True)
    assert dist.group.WORLD is not None
    lanes = Lanes(dist.group.WORLD, 1, CPU, settings, Recorder(enabled=False))
    works = {}
    for label in ("first", "second")[:: -1 if another and rank else 1]:
        flat = torch.full((64 * world_size,), 1.0 if label == "first" else 10.0)
        works[label] = lanes.reduce_scatter([Partition(flat, aligned_bounds(flat.numel(), world_size, 4))], label), flat
    outcomes = []
    for label, (work, flat) in sorted(works.items()):
        try:
            work.wait()
            outcomes.append(f"{label}: {flat.view(world_size, -1)[rank].unique().tolist()}")
        except LaneError as error:
            outcomes.append(type(error).__name__)
    lanes.abandon(LaneError("the test is over"))
    return outcomes


def test_labels_tell_collectives_from_each_other(workers: WorkerPools) -> None:
    assert workers(2).run(in_another_order, False) == [["first: [2.0]", "second: [20.0]"]] * 2
    pool = workers(2)
    outcomes = [outcome for rank in pool.run(in_another_order, True) for outcome in rank]
    assert "LaneTimeout" in outcomes and set(outcomes) <= {"LaneTimeout", "LaneError"}, "the first closes connections"
    pool.end()


def of_another_kind(rank: int, world_size: int) -> str:
    """One rank has skipped a step: it reduces gradients of the next one, where the others gather parameters."""
    lanes = lanes_of(1, timeout_s=2.5, stall_warning_s=0.5)
    flat = torch.ones(64 * world_size)
    partition = Partition(flat, aligned_bounds(flat.numel(), world_size, 4))
    submit = lanes.reduce_scatter if rank == 1 else lanes.all_gather
    try:
        submit([partition], "layer 7").wait()
        return "moved"
    except LaneError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        lanes.abandon(LaneError("the test is over"))


def test_gradients_never_meet_parameters(workers: WorkerPools) -> None:
    pool = workers(2)
    outcomes = pool.run(of_another_kind)
    assert all(outcome.startswith("Lane") for outcome in outcomes), outcomes
    both = "all-gather of layer 7", "reduce-scatter of layer 7"  # whoever gives up first closes connections
    named = [each for each in outcomes if each.startswith("LaneTimeout") and all(label in each for label in both)]
    assert named, outcomes
    pool.end()


def test_the_harness_reports_a_failing_rank(workers: WorkerPools) -> None:
    pool = workers(2)
    with pytest.raises(WorkerFailed, match="on purpose"):
        pool.run(raises_on_one_rank, timeout_s=3)
    assert not pool.usable
