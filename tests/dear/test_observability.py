"""What users see of a run: statistics as scalars, ranges in a profile, and a check that replicas have not parted."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.dear.test_refusals import message_of, trained
from tests.dear.twins import CONFIG, whole_batches
from tests.workers import WorkerPools


def diverge(rank: int, world_size: int) -> str:
    """A parameter that only one rank changes, after its gathers: from then on replicas differ."""
    ddp, optimizer, state = trained(rank, world_size, config=replace(CONFIG, check_replicas=True))
    gather = state._pipe.finish

    def finish_and_spoil() -> None:
        gather()
        if rank == 1:
            with torch.no_grad():
                state._parameters[3].view(-1)[0] += 1

    state._pipe.finish = finish_and_spoil  # type: ignore[method-assign]
    optimizer.zero_grad()
    ddp(*whole_batches(rank, world_size, 9)).backward()
    message = message_of(optimizer.step)
    state._pipe.finish = gather  # type: ignore[method-assign]
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
    assert workers(1).run(bad_interval)[0].startswith("ValueError: every must be >= 1")


def profile(rank: int, world_size: int) -> list[tuple[str, float, float]]:
    ddp, optimizer, state = trained(rank, world_size)
    parameters, ready, before = list(ddp.module.parameters()), 0, 0

    def wait_for_a_round(_: torch.Tensor) -> None:
        """With the last gradient of a backward: however busy the machine, lanes have begun with its first bucket."""
        nonlocal ready, before
        ready += 1
        if ready % len(parameters) == 1:
            before = state._lanes.traffic.rounds
        if ready % len(parameters) == 0:
            give_up_s = time.monotonic() + 5
            while state._lanes.traffic.rounds == before and time.monotonic() < give_up_s:
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
