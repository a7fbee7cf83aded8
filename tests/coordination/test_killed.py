"""A rank is killed, wherever it is: the others end with an error that names it, and what they were given is right.

Prevents: ranks that wait for one that is gone, or for one that has given up because of it; errors that blame another.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_hooks import LaneError
from ddp_hooks.comm import Round
from ddp_hooks.coordination import Coordinator, CoordinatorConfig, coordinate
from ddp_hooks.coordination.model import CoordinatedModel
from ddp_hooks.coordination.negotiation import negotiator
from tests.support.workers import WorkerPools

# Nothing here may end because of a timeout: they are longer than a test may take.
CONFIG = CoordinatorConfig(lanes=2, slice_mb=0.01, timeout_s=300, stall_warning_s=200, cycle_ms=0.2)
NUM_STEPS = 1000
ROOT = Path(__file__).parents[2]


class Victim:
    """How one rank dies.

    Args:
        coordinator: of this rank.
        note: where it writes down what it was doing, for the test.
    """

    def __init__(self, coordinator: Coordinator, note: Path) -> None:
        self._coordinator = coordinator
        self._note = note
        self._cycles = coordinator.stats().cycles

    def die(self, doing: str) -> None:
        """As if the machine had failed."""
        begun = self._note.with_suffix(".part")
        begun.write_text(doing)
        begun.rename(self._note)  # others wait for it
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in_cycle(self, phase: str) -> None:
        """Die in a cycle: ``and 1`` when the second round of the AND is about to be posted, or when it is complete."""
        part, _, number = phase.partition(" ")
        function = {"and": "and_of_all", "forget": "or_of_all", "any": "or_of_all"}.get(part, part)
        original = getattr(negotiator, function)

        def until_death(*arguments: Any) -> Generator[Round, None, Any]:
            rounds, index = original(*arguments), 0
            while True:
                try:
                    next_round = next(rounds)
                except StopIteration as end:
                    if index == int(number):
                        self.die(f"{phase}: complete")
                    return end.value
                if index == int(number):
                    self.die(f"{phase}: posting")
                yield next_round
                index += 1

        setattr(negotiator, function, until_death)

    def die_on_lane(self, label: str) -> None:
        """Die when a lane has been given the messages of the first round of something that is called so."""
        for lane in self._coordinator._lanes._lanes:
            complete = functools.partial(self._complete, label, lane._complete)  # type: ignore[union-attr]
            lane._complete = complete  # type: ignore[method-assign,union-attr]

    def _complete(self, label: str, complete: Callable[..., None], messages: Any, place: str) -> None:
        if place.startswith(label):
            self.die(place)
        complete(messages, place)

    def die_when_others_ask(self, doing: str) -> None:
        """Die when this rank, which does nothing, has heard another one begin a cycle."""
        while self._coordinator.stats().cycles == self._cycles:
            time.sleep(0.01)
        self.die(f"{doing}: {len(self._coordinator._queue.pending)} pending")


def step_of(coordinator: Coordinator, rank: int, step: int, phase: str) -> list[str]:
    """What all ranks ask for in one step, in which every part of a cycle is needed; what is wrong with the results."""
    ranks = range(coordinator.world_size)
    numel = 300 + step % 2 if phase.startswith("forget") else 300  # another shape is another request
    asked = {
        "known": coordinator.all_reduce(torch.arange(float(numel)) + rank, "known"),
        "fresh": coordinator.all_reduce(torch.full((3,), float(rank * step)), f"fresh {step}"),
    }
    expected = {
        "known": torch.arange(float(numel)) * len(ranks) + sum(ranks),
        "fresh": torch.full((3,), float(sum(ranks) * step)),
    }
    if phase.startswith("any"):
        asked["any"] = coordinator.any(torch.tensor([rank == step % len(ranks), False]), "any")
        expected["any"] = torch.tensor([True, False])
    return [f"{name} of step {step}" for name, each in asked.items() if not torch.equal(each.wait(), expected[name])]


def until_somebody_dies(rank: int, world_size: int, victim: int, phase: str, note_path: str) -> dict[str, Any]:
    """What a survivor has seen: its error, what was delivered and wrong, and which threads are left after it closed."""
    coordinator, note, wrong = Coordinator(config=CONFIG), Path(note_path), list[str]()
    message = "nobody noticed"
    for step in range(4):
        wrong += step_of(coordinator, rank, step, phase)
    dying = Victim(coordinator, note)
    dist.barrier()
    try:
        if rank == victim:
            prepare_to_die(dying, coordinator, phase)
        elif phase in OTHERS_ACT:
            wrong += act(coordinator, note, phase)
        for step in range(4, NUM_STEPS):
            wrong += step_of(coordinator, rank, step, phase)
    except LaneError as error:
        message = f"{type(error).__name__}: {error}"
    return {"message": message, "wrong": wrong, "left": closed(coordinator.close)}


def prepare_to_die(victim: Victim, coordinator: Coordinator, phase: str) -> None:
    """What the rank does that dies; only what makes it die, if that happens in a step."""
    if phase == "idle":
        wait_for(lambda: coordinator._channel.describe().endswith("idle"))
        victim.die(f"{phase}: {len(coordinator._queue.pending)} pending")
    elif phase in OTHERS_ACT:
        if phase == "asked":
            coordinator.all_reduce(torch.ones(1), "alone")
        victim.die_when_others_ask(phase)
    elif " of " in phase:
        victim.die_on_lane(phase)
    else:
        victim.die_in_cycle(phase)


def act(coordinator: Coordinator, note: Path, phase: str) -> list[str]:
    """What the others do meanwhile, which cannot end well; what ended well all the same."""
    if phase in ("idle", "asked"):
        wait_for(note.exists)
    if phase == "close":
        coordinator.close()
        assert coordinator._queue.error is not None, "all ranks have closed"
        raise coordinator._queue.error
    handle = coordinator.all_reduce(torch.ones(1), "alone")
    if phase == "close, asked":
        coordinator.close()
    handle.wait()
    return ["alone"]


def closed(close: Callable[..., None]) -> list[str]:
    """Names of the threads that are left when this rank has closed."""
    close(timeout_s=2.0)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ddp_hooks")]


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


OTHERS_ACT = {"idle": 0, "asked": 1, "waited for": 0, "close": 0, "close, asked": 0}  # what the dead had asked for
ON_LANE = ["reduce-scatter of known", "all-gather of known"]


def num_rounds_of(part: str, world_size: int, rank: int) -> int:
    """Rounds of a part of a cycle, of 2 or 3 ranks."""
    if part == "gather":
        return 2
    if part == "broadcast":
        return 2 * (world_size - 1) if rank == 0 else 2
    return world_size - 1


def deaths() -> Iterator[Any]:
    """Number of ranks, the one that dies, where, and what it then writes down; a selection is quick."""
    for world_size, victim in [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]:
        quick = (world_size, victim) in ((2, 0), (3, 1))
        for phase, num_pending in OTHERS_ACT.items():
            yield death(world_size, victim, phase, f"{phase}: {num_pending} pending", quick)
        for part in ("and", "gather", "broadcast", "any", "forget"):
            num_rounds = num_rounds_of(part, world_size, victim)
            last_ones = (world_size, victim) in ((2, 1), (3, 2))  # of whom others lack only what they would have sent
            for number in range(num_rounds if last_ones else num_rounds + 1):
                end = "posting" if number < num_rounds else "complete"
                first_rank_answers = (world_size, victim, part) == (3, 0, "broadcast")
                gives_up_on_the_left = (world_size, victim, part, number) == (3, 2, "gather", 0)
                in_the_middle = (world_size, victim) == (3, 1) and end == "posting"
                often = first_rank_answers or gives_up_on_the_left or in_the_middle
                yield death(world_size, victim, f"{part} {number}", f"{part} {number}: {end}", often)
        for phase in ON_LANE:
            yield death(world_size, victim, phase, phase, quick and (world_size == 2 or phase != ON_LANE[0]))


def death(world_size: int, victim: int, phase: str, note: str, quick: bool) -> Any:
    marks = [] if quick else [pytest.mark.slow]
    return pytest.param(world_size, victim, phase, note, marks=marks, id=f"{phase}, rank {victim} of {world_size}")


@pytest.mark.quick(
    "asked, rank 0 of 2",
    "waited for, rank 1 of 3",
    "idle, rank 1 of 3",
    "broadcast 1, rank 0 of 3",
    "close, asked, rank 1 of 3",
)
@pytest.mark.parametrize(("world_size", "victim", "phase", "expected"), list(deaths()))
def test_survivors_name_the_dead(
    workers: WorkerPools, tmp_path: Path, world_size: int, victim: int, phase: str, expected: str
) -> None:
    pool, note = workers(world_size), tmp_path / "note"
    outcomes = pool.outcomes(until_somebody_dies, victim, phase, str(note), timeout_s=60)
    pool.end()
    assert outcomes[victim][0] == "lost" and note.read_text().startswith(expected), note.read_text()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert_named(outcome, victim)
            # A lane may wait for that of a survivor, which has given up, until that rank's process ends.
            assert [name for name in outcome[1]["left"] if not name.startswith("ddp_hooks lane")] == [], outcome


def assert_named(outcome: tuple[Any, ...], victim: int) -> None:
    kind, found, *_ = outcome
    if kind != "ok":
        pytest.fail(str(found))
    assert found["wrong"] == []
    assert found["message"].startswith("LaneError: "), found
    assert f"rank {victim} died or closed its connection" in found["message"], found


# -- a model -----------------------------------------------------------------------------------------------------------


class Sums(nn.Module):
    """Gradients are whole numbers, and so are their means for 2 and 3 ranks: the scales of ranks are 2, 4, 6, …"""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(400) for _ in range(3))

    def forward(self, scale: int) -> torch.Tensor:
        return torch.stack([part.sum() * scale for part in self.parts]).sum()


def train_until_somebody_dies(rank: int, world_size: int, victim: int, phase: str, note_path: str) -> dict[str, Any]:
    model, wrong, message = Sums(), list[str](), "nobody noticed"
    coordinated = coordinate(model, group_mb=1e-6, config=CONFIG)
    dying = Victim(coordinated.coordinator, Path(note_path)) if rank == victim else None
    try:
        for step in range(NUM_STEPS):
            if step == 4 and dying is not None:
                die_in_backward(dying, coordinated, model, phase)
            model.zero_grad()
            model(2 * (rank + 1) + step).backward()
            mean = torch.full((400,), float(world_size + 1 + step))
            wrong += [f"{name} of step {step}" for name, p in model.named_parameters() if not torch.equal(p.grad, mean)]  # type: ignore[arg-type]
    except LaneError as error:
        message = f"{type(error).__name__}: {error}"
    return {"message": message, "wrong": wrong, "left": closed(coordinated.coordinator.close)}


def die_in_backward(victim: Victim, coordinated: CoordinatedModel, model: Sums, phase: str) -> None:
    if phase == "before its second gradient":
        model.parts[1].register_hook(lambda _: victim.die(f"{phase}: {sum(map(asked, coordinated._groups))} asked"))
    elif phase == "telling what was used":
        victim.die_in_cycle("any 0")
    else:
        coordinated._groups[0].hand_out = lambda used: victim.die(  # type: ignore[method-assign]
            f"{phase}: {sum(map(asked, coordinated._groups))} asked"
        )


def asked(group: Any) -> bool:
    return group.handle is not None


@pytest.mark.quick("3-0-telling what was used-any 0: posting")
@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("before its second gradient", "before its second gradient: 1 asked"),
        ("telling what was used", "any 0: posting"),
        ("handing out", "handing out: 3 asked"),
    ],
)
@pytest.mark.parametrize(
    ("world_size", "victim"),
    [pytest.param(2, 1, marks=pytest.mark.slow), (3, 0), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_survivors_name_the_dead_in_backward(
    workers: WorkerPools, tmp_path: Path, world_size: int, victim: int, phase: str, expected: str
) -> None:
    pool, note = workers(world_size), tmp_path / "note"
    outcomes = pool.outcomes(train_until_somebody_dies, victim, phase, str(note), timeout_s=60)
    pool.end()
    assert outcomes[victim][0] == "lost" and note.read_text() == expected
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert_named(outcome, victim)


# -- the end of survivors ----------------------------------------------------------------------------------------------


def while_the_other_is_stopped(rank: int, world_size: int, note_path: str) -> list[str]:
    """Rank 1's process is stopped in the cycle in which rank 0 says that it closes; rank 0 ends it afterwards."""
    coordinator, note = Coordinator(config=CONFIG), Path(note_path)
    step_of(coordinator, rank, 0, "and")
    dist.barrier()
    if rank == 1:
        note.write_text(str(os.getpid()))
        victim = Victim(coordinator, note)
        victim.die = lambda doing: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[method-assign]
        victim.die_in_cycle("and 0")
        wait_for(lambda: False)
    left = closed(coordinator.close)
    os.kill(int(note.read_text()), signal.SIGKILL)
    return left


def test_closing_does_not_wait_for_a_rank_that_is_stopped(workers: WorkerPools, tmp_path: Path) -> None:
    pool = workers(2)
    outcomes = pool.outcomes(while_the_other_is_stopped, str(tmp_path / "note"), timeout_s=60)
    pool.end()
    assert outcomes[0] == ("ok", []) and "exit code -9" in outcomes[1][1], outcomes


SCRIPT = """
import json, sys
import torch.distributed as dist
from tests.coordination.test_killed import until_somebody_dies

rendezvous, rank, phase, note = sys.argv[1:]
dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=3)
print(json.dumps(until_somebody_dies(int(rank), 3, 1, phase, note)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["gather 1", "reduce-scatter of known"])
def test_processes_of_survivors_end(tmp_path: Path, phase: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "rendezvous"), str(rank), phase, str(tmp_path / "note")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0], outputs
    for rank in (0, 2):
        assert_named(("ok", json.loads(outputs[rank][0])), 1)
