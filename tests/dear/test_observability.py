"""What users see of a run: statistics as scalars, ranges in a profile, and a check that replicas have not parted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from ddp_hooks import DearStats
from ddp_hooks.comm import Lanes, Recorder, accounting
from ddp_hooks.comm.accounting import KEPT_SPANS, KEPT_STEPS
from tests.support.dear.misuse import trained
from tests.support.dear.twins import CONFIG, whole_batches
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


def diverge(rank: int, world_size: int) -> str:
    """A parameter that only one rank changes, after its gathers: from then on replicas differ."""
    ddp, optimizer, state = trained(rank, world_size, config=replace(CONFIG, check_replicas=True))
    gather = state._driver.pipe.finish

    def finish_and_spoil(on_host: bool = False) -> None:
        gather(on_host)
        if rank == 1:
            with torch.no_grad():
                state._driver.parameters.tensors[3].view(-1)[0] += 1

    state._driver.pipe.finish = finish_and_spoil  # type: ignore[method-assign]
    optimizer.zero_grad()
    ddp(*whole_batches(rank, world_size, 9)).backward()
    message = message_of(optimizer.step)
    state._driver.pipe.finish = gather  # type: ignore[method-assign]
    return message


def test_parted_replicas_are_named(workers: WorkerPools) -> None:
    messages = workers(3).run(diverge)
    assert len(set(messages)) == 1
    name = "layers.3.weight"
    assert messages[0].startswith("RuntimeError") and f"the hash of {name}" in messages[0]
    assert "on ranks [0, 2]" in messages[0] and "on ranks [1]" in messages[0] and "after step 4" in messages[0]


def write_scalars(rank: int, world_size: int, folder: str) -> bool:
    from torch.utils.tensorboard import SummaryWriter

    ddp, optimizer, state = trained(rank, world_size, config=replace(CONFIG, max_grad_norm=1.0))
    with SummaryWriter(folder) as writer:
        state.log_to(writer, every=2)
        for step in range(4):
            optimizer.zero_grad()
            ddp(*whole_batches(rank, world_size, step)).backward()
            optimizer.step()
    state.close()
    return True


def test_statistics_reach_tensorboard(workers: WorkerPools, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    workers(1).run(write_scalars, str(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {f"ddp_hooks/{name}" for name in ("stall_s", "sent_bytes", "overlap", "grad_norm", "wall_s")} <= tags
    assert [event.step for event in events.Scalars("ddp_hooks/wall_s")] == [4, 6]


def bad_interval(rank: int, world_size: int) -> str:
    _ddp, _optimizer, state = trained(rank, world_size)
    return message_of(lambda: state.log_to(None, every=0))  # type: ignore[arg-type]


def test_log_interval_is_checked(workers: WorkerPools) -> None:
    assert workers(1).run(bad_interval)[0].startswith("ValueError: every must be a whole number >= 1, got 0")


def test_overlap_where_it_is_measured() -> None:
    assert DearStats(num_lanes=2, comm_s=4.0, step_stall_s=0.25, forward_stall_s=0.25).overlap == 0.75
    assert DearStats(num_lanes=1, comm_s=1.0, step_stall_s=2.0).overlap == 0.0
    assert DearStats(num_lanes=1, comm_s=0.0).overlap is None, "there was no communication"
    assert DearStats(num_lanes=1, comm_s=None, step_stall_s=0.1).overlap is None, "streams are not measured"


def native_stats(rank: int, world_size: int) -> tuple[float | None, float | None, int]:
    """With lanes that are streams, which do nothing on processors."""
    with mock.patch.object(Lanes, "native", property(lambda lanes: True, lambda lanes, value: None), create=True):
        _ddp, _optimizer, state = trained(rank, world_size)
        stats = state.stats()
        state.close()
    return stats.comm_s, stats.overlap, stats.sent_bytes


def test_streams_tell_no_overlap(workers: WorkerPools) -> None:
    for comm_s, overlap, sent_bytes in workers(2).run(native_stats):
        assert comm_s is None and overlap is None and sent_bytes > 0


def test_spans_of_the_last_steps_are_kept() -> None:
    recorder = Recorder(enabled=True)
    for step in range(3 * KEPT_STEPS):
        for number in range(1 + step % 3):
            recorder.add("lane 0", f"work {number} of step {step}", step, step + 1)
        recorder.end_step()
        spans = recorder.snapshot()
        assert spans[-1].start_s == step and spans[0].start_s == max(0, step - KEPT_STEPS + 1)
    assert len(spans) == sum(1 + step % 3 for step in range(2 * KEPT_STEPS, 3 * KEPT_STEPS))


def traced(rank: int, world_size: int) -> list[int]:
    """How many spans are kept after each step, where two steps are kept."""
    with mock.patch.object(accounting, "KEPT_STEPS", 2):
        ddp, optimizer, state = trained(rank, world_size, 0, replace(CONFIG, trace=True))
    numbers = []
    for step in range(8):
        optimizer.zero_grad()
        ddp(*whole_batches(rank, world_size, step)).backward()
        optimizer.step()
        numbers.append(len(state.timeline()))
    state.close()
    return numbers


def test_a_trace_does_not_grow(workers: WorkerPools) -> None:
    for numbers in workers(2).run(traced):
        assert 0 < max(numbers[5:]) < 2 * numbers[2], "a span more or less is a lane's that has not ended"


def test_the_last_spans_are_kept() -> None:
    recorder = Recorder(enabled=True)
    for number in range(KEPT_SPANS + 5):
        recorder.add("lane 0", f"work {number}", number, number + 1)
    spans = recorder.snapshot()
    assert [spans[0].name, spans[-1].name] == ["work 5", f"work {KEPT_SPANS + 4}"] and len(spans) == KEPT_SPANS


def profile(rank: int, world_size: int) -> list[tuple[str, float, float]]:
    ddp, optimizer, state = trained(rank, world_size)
    parameters, ready, before = list(ddp.module.parameters()), 0, 0

    def wait_for_a_round(_: torch.Tensor) -> None:
        """With the last gradient of a backward: however busy the machine, lanes have begun with its first bucket."""
        nonlocal ready, before
        ready += 1
        if ready % len(parameters) == 1:
            before = state._driver.lanes.traffic.rounds
        if ready % len(parameters) == 0:
            give_up_s = time.monotonic() + 5
            while state._driver.lanes.traffic.rounds == before and time.monotonic() < give_up_s:
                time.sleep(0.001)

    for parameter in parameters:
        parameter.register_hook(wait_for_a_round)
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=options
    ) as profiler:
        for step in range(3):
            optimizer.zero_grad()
            with torch.profiler.record_function("user: forward"):
                loss = ddp(*whole_batches(rank, world_size, step))
            with torch.profiler.record_function("user: backward"):
                loss.backward()
            optimizer.step()
        state.synchronize()
    state.close()
    events = profiler.events()
    return [(event.name, event.time_range.start, event.time_range.end) for event in events or []]


def test_a_profile_shows_what_lanes_do_and_when(workers: WorkerPools) -> None:
    for events in workers(2).run(profile):
        names = {name for name, _, _ in events}
        assert any(name.startswith("ddp_hooks lane 0: reduce-scatter of") for name in names), names
        assert any(name.startswith("ddp_hooks lane 1: all-gather of") for name in names)
        backwards = [(start, end) for name, start, end in events if name == "user: backward"]
        reductions = [(start, end) for name, start, end in events if "reduce-scatter" in name and "lane" in name]
        assert any(a < end and start < b for start, end in backwards for a, b in reductions), "nothing overlaps"
