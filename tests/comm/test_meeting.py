"""Ranks meet by name: they get what all have brought, or the same error, which says who called what."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ddp_hooks.comm import (
    Patience,
    broadcast_object,
    calling,
    failure,
    gather_objects,
    meeting,
    report_error,
)
from ddp_hooks.comm.exit_handler import while_all_live
from ddp_hooks.comm.failure import describe_waits
from ddp_hooks.comm.torch_compat.distributed import default_store
from tests.support.messages import logged, message_of
from tests.support.workers import WorkerPools

BRIEF = Patience(timeout_s=1.5, stall_warning_s=0.3)


@pytest.mark.parametrize(
    ("calls", "silent", "expected"),
    [
        ({0: "save()"}, [2, 1], "rank 0 waits in save(); ranks 1, 2 have not called it: is it under `if rank == 0`?"),
        ({0: "a()", 2: "b()"}, [], "rank 0 waits in a(); rank 2 waits in b()"),
        ({0: "a()", 1: "a()", 3: "b()"}, [2], "ranks 0, 1 wait in a(); rank 3 waits in b(); rank 2 has not called any"),
        (dict.fromkeys(range(20), "a()"), [20], "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more wait in a(); rank 20 has"),
    ],
)
def test_a_sentence_names_ranks_and_calls(calls: dict[int, str], silent: list[int], expected: str) -> None:
    assert describe_waits(calls, silent).startswith(expected)


def test_lanes_do_not_speak_of_calls() -> None:
    sentence = describe_waits({0: "lane 0: all-gather of a"}, [1], are_messages=True)
    assert sentence == "rank 0 waits in lane 0: all-gather of a; rank 1 reports no wait so far, and may be the cause"


def test_a_rank_that_has_waited_for_long_may_live() -> None:
    store = dist.HashStore()
    store.set(failure._wait_key(0), "lane 0: all-gather of a")
    failures = failure.FailureStore(store, "test", 1, [0, 1])
    assert failures.report_peer(0) == "rank 0 gave up its wait in lane 0: all-gather of a, or died"
    failures.close()


def test_a_rank_that_timed_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that times out closes its connection, which others take for the end of this rank."""
    naps: list[float] = []
    clock = iter(range(10_000))
    monkeypatch.setattr(failure, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=naps.append))
    for first, gives_up, expected in (
        ("1:0", True, "LaneTimeout: lane 0 timed out"),
        ("1:0", False, "LaneError: lane 1: rank 0 died"),  # nothing of this rank has timed out
        ("1:2", True, "LaneError: lane 1: rank 2 died"),  # others report another rank
    ):
        store = dist.HashStore()
        failures = failure.FailureStore(store, "test", 0, [0, 1, 2])
        if gives_up:
            failures.failure_of(RuntimeError("Timed out waiting 2000ms"), 1, "lane 0")
        store.set("ddp_hooks/test/failure", first)
        for _ in range(2):
            naps.clear()
            found = failures.failure_during("lane 1")
            assert f"{type(found).__name__}: {found}".startswith(expected)
        assert not naps, "the second wait for a timeout of its own is none"
        failures.close()


def test_the_failure_that_others_told_of_came_first() -> None:
    boxes: dict[int, Tensor] = {}
    sent: dict[int, str] = {}

    class Group:
        def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
            boxes[peer] = tensors[0]

        def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
            sent[peer] = failure.unpacked(tensors[0][:-1])

    group: Any = Group()
    failures = failure.FailureStore(dist.HashStore(), "test", 1, [0, 1, 2, 3], group)
    boxes[2][:3], boxes[2][-1] = failure.packed("2:3", 3), 1
    assert "rank 3" in failures.report_peer(0), "the connection to rank 0 broke later"
    assert sent == dict.fromkeys((0, 2, 3), "2:3")
    failures.close()


def test_patience_is_that_of_any_settings() -> None:
    assert Patience.of(SimpleNamespace(timeout_s=7)) == (7, Patience().stall_warning_s)
    assert Patience.of(None) == Patience() and Patience.of(SimpleNamespace(timeout_s="7")) == Patience()


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def keys_left() -> int:
    store = default_store()
    return sum(store.check([f"ddp_hooks/meeting/{world().group_name}/{n}/{r}"]) for n in range(50) for r in range(3))


def meet(rank: int, world_size: int) -> None:
    large = bytes(range(256)) * 512 * (rank + 1)
    for item in (rank, None, {"rank": rank}, large if rank == 1 else b"short"):
        everyone = gather_objects(item, world(), "meet()", None)
        assert everyone[rank] == item and len(everyone) == world_size
    assert everyone == [b"short", bytes(range(256)) * 1024, b"short"]
    assert broadcast_object(rank, world(), "begin()", None) == 0
    subgroup = dist.new_group([0, 2])
    if rank != 1:
        assert isinstance(subgroup, dist.ProcessGroup)
        assert gather_objects(rank, subgroup, "meet()", None) == [0, 2]
    assert gather_objects(rank, world(), "meet()", None) == [0, 1, 2]
    dist.barrier()
    dist.barrier()
    assert keys_left() == 0


def test_ranks_get_what_all_have_brought_and_leave_nothing(workers: WorkerPools) -> None:
    workers(3).run(meet)


def part(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    with logged() as lines:
        # One rank alone: all that wait are told so, in the same words, and so is the one that comes too late.
        early = "no error" if rank == 1 else message_of(lambda: gather_objects(rank, world(), "consolidate()", BRIEF))
        dist.barrier()
        late = message_of(lambda: gather_objects(rank, world(), "consolidate()", BRIEF)) if rank == 1 else early
        # Two calls at once: nobody waits until the time is over.
        call = "consolidate()" if rank == 0 else "set_fusion()"
        differing = message_of(lambda: gather_objects(rank, world(), call, Patience(1e6, 1e6)))
        # In one call, and at different places of it.
        with calling("train()"):
            inside = message_of(lambda: gather_objects(rank, world(), call, Patience(1e6, 1e6)))
        # In two calls, at the same place of both.
        with calling("train()" if rank == 0 else "evaluate()"):
            between = message_of(lambda: gather_objects(rank, world(), "consolidate()", Patience(1e6, 1e6)))
        # One rank reports an error, to whatever others call.
        if rank == 1:
            report_error(ZeroDivisionError("on purpose"), world(), None)
        reported = message_of(lambda: gather_objects(rank, world(), "meet()", None)) if rank != 1 else ""
    assert gather_objects(rank, world(), "meet()", None) == [0, 1, 2]  # goes on
    return [late, differing, inside, between, reported], lines


def test_ranks_that_part_are_named(workers: WorkerPools) -> None:
    results = workers(3).run(part)
    sentence = "ranks 0, 2 wait in consolidate(); rank 1 has not called it: is it under `if rank == 0`?"
    for rank, ((alone, differing, inside, between, reported), lines) in enumerate(results):
        assert alone.startswith("LaneTimeout: waited ") and sentence in alone
        assert "rank 0 waits in consolidate(); ranks 1, 2 wait in set_fusion()" in differing
        assert "rank 0 waits in train(): consolidate(); ranks 1, 2 wait in train(): set_fusion()" in inside
        assert "rank 0 waits in train(); ranks 1, 2 wait in evaluate()" in between
        assert rank == 1 or "meet() cannot end: rank 1 ended first, with ZeroDivisionError: on purpose" in reported
        assert any(sentence in line for line in lines) == (rank != 1)
    assert len({alone for (alone, *_), _ in results}) == 1


def lose_one(rank: int, world_size: int, victim: int) -> str:
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    # In a call of torch that would wait much longer, and in a meeting.
    making = message_of(lambda: while_all_live(lambda: time.sleep(60), world(), "the making of a lane"))
    return f"{making}; {message_of(lambda: gather_objects(rank, world(), 'the set-up of DearState', Patience(60, 60)))}"


def test_a_rank_that_dies_before_it_comes_is_named_at_once(workers: WorkerPools) -> None:
    pool = workers(3)
    outcomes = pool.outcomes(lose_one, 1, timeout_s=30)
    pool.end()
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome[0] == "ok", outcome
        for what in ("the making of a lane", "the set-up of DearState"):
            assert f"LaneError: {what} cannot end: rank 1 died or closed its connection" in outcome[1]


def test_a_dead_store_is_said_to_be_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Broken pipe")

    group: Any = SimpleNamespace(group_name="0")
    monkeypatch.setattr("ddp_hooks.comm.meeting.default_store", Dead)
    for module, name in ((meeting, "_numbers"), (failure, "_noted")):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 3])
    monkeypatch.setattr(dist, "get_rank", lambda _=None: 1)
    for lost, expected in (([0], "rank 0 died"), ([], "rank 0, or torchrun's agent")):
        monkeypatch.setattr(meeting, "lost_ranks", lambda *_, lost=lost, **__: lost)
        message = message_of(lambda: gather_objects(1, group, "consolidate()", None))
        assert "the rendezvous store does not answer" in message and expected in message


# Collectives of torch have no name and a time-out of their own. What uses them says why.
_EXCUSED = {
    "ddp_hooks/comm/executors/stream_lane.py": "what NCCL does itself, with the time-out of lanes",
    "ddp_hooks/comm/torch_compat/distributed.py": "names of torch, which lanes use",
    "ddp_hooks/comm/meeting.py": "large items, when all ranks have come",
    "ddp_hooks/coordination/model.py": "the model of rank 0, when all ranks have agreed",
    "ddp_hooks/embedding/replicated.py": "what DDP does without a hook, which DDP waits for",
    "ddp_hooks/planning/measurement/measure.py": "is measured",
    "ddp_hooks/planning/measurement/processor.py": "is measured",
    "fsdp_ext/all_gather.py": "on accelerators, as FSDP2 does it, which waits for it",
    "fsdp_ext/reduce_scatter.py": "on accelerators, as FSDP2 does it, which waits for it",
    "fsdp_ext/residuals.py": "when all ranks have come",
}


def test_nothing_waits_in_a_collective_of_torch() -> None:
    root = Path(meeting.__file__).parents[2]
    collective = re.compile(r"dist\.(all_|broadcast|barrier|gather|scatter|reduce)")
    paths = [path for package in ("ddp_hooks", "fsdp_ext") for path in (root / package).rglob("*.py")]
    found = {str(path.relative_to(root)) for path in paths if collective.search(path.read_text())}
    assert found == set(_EXCUSED), "use ddp_hooks.comm.gather_objects, or Lanes.reduce_small"
