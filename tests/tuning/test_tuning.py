"""The tuner in training loops, between real processes: what is computed stays the same, and ranks never part.

Prevents: ranks that decide by their own clocks (and hang when the search ends), sizes that change between a backward
and its step, a search that ends with something slower than what it began with.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import BucketTuner, DearConfig, DearState, LaneError, TopKConfig, TopKState, dear_hook, topk_hook
from ddp_hooks.comm import LinkProfile
from ddp_hooks.topk.reduction import grouping
from ddp_hooks.tuning import Tuning
from ddp_hooks.tuning import tuning as tuning_module
from ddp_hooks.tuning.search import Searcher
from tests.support.dear.twins import WholeNumbers, whole_batches
from tests.support.messages import message_of
from tests.support.topk.hooks import sum_and_divide
from tests.support.workers import WorkerPools

TUNER = BucketTuner(
    low_mb=0.002, high_mb=0.2, start_mb=0.05, max_trials=5, steps_per_trial=3, first_step=3, min_gain=0.0, profile=None
)
DEAR = DearConfig(atom_mb=0.002, fusion_mb=0.01, slice_mb=0.002, lanes=2, tuner=TUNER, timeout_s=20, stall_warning_s=10)
TOPK = TopKConfig(
    density=0.05, wire="exact", group_mb=0.03, tuner=TUNER, timeout_s=20, stall_warning_s=10, dense_below_numel=8
)
MOST_STEPS = 5000  # a search that has not ended by then never will


class Run:
    """A model under a hook with a tuner, and perhaps its twin under plain DDP."""

    def __init__(self, rank: int, world_size: int, config: DearConfig | TopKConfig) -> None:
        torch.manual_seed(7)
        self.rank, self.world_size, self.step = rank, world_size, 0
        self.ddp = DistributedDataParallel(WholeNumbers(world_size), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1.0)
        self.state: Any
        if isinstance(config, DearConfig):
            self.state = DearState(self.ddp, self.optimizer, config)
            self.ddp.register_comm_hook(self.state, dear_hook)
        else:
            self.state = TopKState(self.ddp, config, optimizer=self.optimizer)
            self.ddp.register_comm_hook(self.state, topk_hook)

    @property
    def tuning(self) -> Tuning:
        tuning = self.state.tuning
        assert isinstance(tuning, Tuning)
        return tuning

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp(*whole_batches(self.rank, self.world_size, self.step)).backward()
        self.optimizer.step()
        self.step += 1

    def train(self, until: Callable[[], bool] | None = None) -> None:
        """Train until the search has ended, or ``until`` says so."""
        done = until or (lambda: self.tuning.finished)
        while not done():
            assert self.step < MOST_STEPS, f"still {self.tuning.phase}"
            self.train_step()

    def pretend(self, seconds_of: Callable[[float], float]) -> None:
        """Let steps seem to take so long, on this rank."""
        clock, tuning = self.tuning._clock, self.tuning
        clock.seconds = lambda: [seconds_of(tuning.mb)] * len(clock)  # type: ignore[method-assign]

    def sizes(self) -> list[float]:
        return [trial.mb for trial in self.tuning.trials]

    def bits(self) -> bytes:
        self.state.synchronize()
        return b"".join(p.detach().numpy().tobytes() for p in self.ddp.module.parameters())


def near(best_mb: float) -> Callable[[float], float]:
    """Seconds of steps that are fastest with this size."""
    return lambda mb: 1.0 + abs(torch.tensor(mb / best_mb).log().item())


# -- what is computed stays the same ----------------------------------------------------------------------------------


def beside_ddp(rank: int, world_size: int, config: DearConfig | TopKConfig) -> tuple[bool, list[float], int]:
    """Compare parameters with plain DDP's after the search; return also the sizes tried and the number of groupings."""
    run = Run(rank, world_size, config)
    torch.manual_seed(7)
    plain = DistributedDataParallel(WholeNumbers(world_size))
    plain.register_comm_hook(None, sum_and_divide)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    groups: set[int] = set()

    def is_over() -> bool:
        groups.add(run.state.stats().num_groups)
        return run.tuning.finished

    run.train(is_over)
    run.train_step()
    for step in range(run.step):
        optimizer.zero_grad()
        plain(*whole_batches(rank, world_size, step)).backward()
        optimizer.step()
    run.state.synchronize()
    pairs = zip(run.ddp.module.parameters(), plain.module.parameters(), strict=True)
    outcome = all(torch.equal(ours, theirs) for ours, theirs in pairs), run.sizes(), len(groups - {0})
    run.state.close()
    return outcome


EXACT: dict[str, DearConfig | TopKConfig] = {
    "sharded": DEAR,
    "replicated": replace(DEAR, update="replicated"),
    "no overlap": replace(DEAR, overlap_forward=False),
    "topk, everything": replace(TOPK, density=1.0),
    "topk, everything, forward": replace(TOPK, density=1.0, pipeline="forward"),
}


@pytest.mark.quick("sharded", "topk, everything, forward")
@pytest.mark.parametrize("name", EXACT)
def test_sizes_change_and_results_do_not(workers: WorkerPools, name: str) -> None:
    outcomes = workers(2).run(beside_ddp, EXACT[name])
    for equal, sizes, num_groupings in outcomes:
        assert equal, "parameters differ from those of plain DDP"
        assert len(set(sizes)) >= 4 and num_groupings >= 3, (sizes, num_groupings)
    assert outcomes[0][1] == outcomes[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 8))])
def test_more_ranks(workers: WorkerPools, world_size: int) -> None:
    for name in ("sharded", "replicated"):
        outcomes = workers(world_size).run(beside_ddp, EXACT[name])
        assert all(equal for equal, *_ in outcomes)
        assert len({tuple(sizes) for _, sizes, _ in outcomes}) == 1


def conserving(rank: int, world_size: int, pipeline: Any) -> tuple[float, float, list[float], bool]:
    """Return missing gradients, the residual, the sizes tried, and True if variants came before the search ended."""
    run = Run(rank, world_size, replace(TOPK, pipeline=pipeline, algorithm="auto", momentum=None))
    run.train()
    tried_variants_meanwhile = run.state._chooser.chosen is not None
    run.state.synchronize()
    kept = sum(float(values.abs().sum()) for values in run.state.state_dict()["residual"].values())
    for _ in range(14):  # variants of the algorithm are tried when sizes no longer change
        run.train_step()
    state = run.state
    state.synchronize()
    saved = state.state_dict()["residual"]
    torch.manual_seed(7)
    expected = WholeNumbers(world_size)
    gap = 0.0
    totals = [torch.zeros_like(p).double() for p in expected.parameters()]
    for step in range(run.step):
        for other in range(world_size):
            expected.zero_grad()
            expected(*whole_batches(other, world_size, step)).backward()
            for total, parameter in zip(totals, expected.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
    named = zip(run.ddp.module.named_parameters(), expected.parameters(), totals, strict=True)
    for (name, parameter), original, total in named:
        residual = saved.get(name, torch.zeros_like(parameter)).double()
        torch.distributed.all_reduce(residual)
        missing = world_size * (original.double() - parameter.double()) - (total - residual)
        gap = max(gap, float(missing.detach().abs().max()))
    outcome = gap, kept, run.sizes(), tried_variants_meanwhile or state._chooser.chosen is None
    state.close()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["backward", "forward"])
def test_nothing_is_lost_when_groups_of_topk_change(workers: WorkerPools, pipeline: str) -> None:
    for gap, kept, sizes, too_early in workers(2).run(conserving, pipeline):
        assert gap == 0.0, "gradients were lost, or counted twice"
        assert kept > 0, "nothing was left out, so nothing was tested"
        assert len(set(sizes)) >= 4
        assert not too_early, 'algorithm="auto" is to choose after the search, and to have chosen'


# -- ranks decide together ---------------------------------------------------------------------------------------------


def with_other_clocks(rank: int, world_size: int, config: DearConfig | TopKConfig) -> tuple[Any, ...]:
    """Every rank is fastest with another size, and all the others are faster than the second rank."""
    run = Run(rank, world_size, config)
    curve = near(0.02 if rank == 1 else 0.1)
    run.pretend(lambda mb: curve(mb) * (10.0 if rank == 1 else 0.1))
    run.train()
    outcome = run.tuning.trials, run.tuning.mb, run.step
    run.state.close()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("config", [DEAR, TOPK], ids=["dear", "topk"])
def test_the_slowest_rank_counts(workers: WorkerPools, config: DearConfig | TopKConfig) -> None:
    outcomes = workers(3).run(with_other_clocks, replace(config, tuner=replace(TUNER, max_trials=8)))
    first = [replace(trial, trial_s=0.0) for trial in outcomes[0][0]]
    for trials, mb, step in outcomes:
        assert [replace(trial, trial_s=0.0) for trial in trials] == first
        assert (mb, step) == outcomes[0][1:]
        assert 0.01 < mb < 0.04, "the size with which the second rank is fastest"
    assert all(trial.step_s >= 10.0 for trial in first)


def slow_to_decide(rank: int, world_size: int) -> tuple[list[int], int, list[float]]:
    """Return the steps in which ranks asked the first one, whose decisions take long."""
    run = Run(rank, world_size, DEAR)
    polls: list[int] = []
    hear = run.tuning._hear
    eight_steps_have_passed = threading.Event()

    def count() -> None:
        polls.append(run.step)
        hear()
        if run.tuning.phase is tuning_module.Phase.DECIDING and run.tuning._next_poll == 16:
            eight_steps_have_passed.set()

    run.tuning._hear = count  # type: ignore[method-assign]
    decide = Searcher._decide

    def decide_later(self: Any, trials: Any) -> Any:
        assert eight_steps_have_passed.wait(60)
        eight_steps_have_passed.clear()
        return decide(self, trials)

    with mock.patch.object(Searcher, "_decide", decide_later):
        run.train()
    outcome = polls, run.step, run.sizes()
    run.state.close()
    return outcome


@pytest.mark.slow
def test_training_goes_on_while_the_first_rank_thinks(workers: WorkerPools) -> None:
    (polls, steps, sizes), (others, *_) = workers(2).run(slow_to_decide)
    assert polls == others, "all ranks ask in the same steps"
    measured = len(sizes) * (TUNER.steps_per_trial + TUNER.dropped_steps)
    assert steps > measured + 15 * len(sizes), "training has gone on for sixteen steps at least"
    assert len(polls) < steps / 3, "a thread that needs long is asked seldom"


def with_curve(rank: int, world_size: int, config: DearConfig, best_mb: float) -> tuple[float, list[Any]]:
    run = Run(rank, world_size, config)
    run.pretend(near(best_mb))
    run.train()
    outcome = run.tuning.mb, [(trial.mb, trial.role) for trial in run.tuning.trials]
    run.state.close()
    return outcome


def test_the_default_stays_if_nothing_is_faster(workers: WorkerPools) -> None:
    mb, trials = workers(2).run(with_curve, DEAR, 0.01)[0]
    assert mb == 0.01, "what would be in use without a tuner"
    assert [mb for mb, _ in trials[:2]] == [0.05, 0.01], "first the size to start with, then the one in force"
    assert {role for _, role in trials} == {"search"}, "there is nothing to compare it with"


def lucky_once(rank: int, world_size: int) -> tuple[float, list[Any]]:
    """A size that seemed to be fast in its first trial is slow when it is checked."""
    run = Run(rank, world_size, DEAR)
    run.pretend(lambda mb: 1.0 if mb == 0.01 else (2.0 if run.tuning._role == "check" or mb != 0.05 else 0.5))
    run.train()
    outcome = run.tuning.mb, [trial.role for trial in run.tuning.trials]
    run.state.close()
    return outcome


@pytest.mark.slow
def test_luck_does_not_count(workers: WorkerPools) -> None:
    mb, roles = workers(2).run(lucky_once)[0]
    assert mb == 0.01
    assert roles[-4:] == ["check"] * 4 and "check" not in roles[:-4]


def failing(rank: int, world_size: int) -> tuple[float, str]:
    """The surrogate cannot be fitted."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(handler.format(record))  # type: ignore[method-assign]
    logging.getLogger("ddp_hooks").addHandler(handler)
    run = Run(rank, world_size, DEAR)
    with mock.patch("ddp_hooks.tuning.surrogate.fit_posterior", side_effect=RuntimeError("out of luck")):
        run.train()
    run.train_step()
    logging.getLogger("ddp_hooks").removeHandler(handler)
    outcome = run.tuning.mb, "\n".join(messages)
    run.state.close()
    return outcome


def test_a_failing_search_ends_at_the_default(workers: WorkerPools) -> None:
    outcomes = workers(2).run(failing)
    assert all(mb == 0.01 for mb, _ in outcomes)
    assert "the tuner's search has failed" in outcomes[0][1] and "out of luck" in outcomes[0][1]


def dying(rank: int, world_size: int, victim: int) -> str:
    run = Run(rank, world_size, DEAR)
    try:
        run.train(lambda: len(run.tuning.trials) == 2 and run.tuning.phase is tuning_module.Phase.MEASURING)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(100):
            run.train_step()
    except LaneError as error:
        return str(error)
    return "nobody noticed"


@pytest.mark.quick("1")
@pytest.mark.parametrize("victim", [0, 1])
def test_survivors_of_a_trial_name_the_dead(workers: WorkerPools, victim: int) -> None:
    pool = workers(3)
    outcomes = pool.outcomes(dying, victim, timeout_s=60)
    pool.end()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0] == "ok" and f"rank {victim} died" in outcome[1], outcome


# -- from run to run ---------------------------------------------------------------------------------------------------


def with_profile(
    rank: int, world_size: int, config: DearConfig | TopKConfig, path: str, trials: int | None
) -> tuple[list[float], float, bool]:
    """Train until the search has ended, or was interrupted after some trials of this run."""
    link = LinkProfile(1e9, 1, 1 << 20)  # loopback is never measured twice the same
    with mock.patch.object(grouping, "profile_link", lambda lanes: link):
        run = Run(rank, world_size, replace(config, tuner=replace(config.tuner, profile=path)))  # type: ignore[type-var]
    run.pretend(near(0.02))
    run.train(lambda: run.tuning.finished or len(run.tuning.trials) == trials)
    outcome = run.sizes(), run.tuning.mb, run.tuning.finished
    searcher = run.tuning._searcher
    if searcher is not None and searcher._future is not None:
        searcher._future.result(30)  # the profile is written
    run.state.close()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("config", [DEAR, TOPK], ids=["dear", "topk"])
def test_what_was_found_is_used_again(workers: WorkerPools, tmp_path: Path, config: DearConfig | TopKConfig) -> None:
    path = str(tmp_path / "tuning.json")
    sizes, mb, _ = workers(2).run(with_profile, config, path, None)[0]
    assert len(sizes) > 3
    again = workers(2).run(with_profile, config, path, None)
    assert all(outcome == ([], mb, True) for outcome in again), "the second run searches nothing"
    longer, _, _ = workers(3).run(with_profile, config, path, None)[0]
    assert len(longer) > 3, "with other ranks it does"


def with_other_ranges(rank: int, world_size: int, path: str) -> list[int]:
    """Return the number of trials of two searches; the first one chooses a size outside of the second one's range."""
    found = []
    for low_mb in (0.002, 0.03):
        with mock.patch.object(tuning_module, "replace", lambda job, **changes: job if "settings" in changes else None):
            config = replace(DEAR, tuner=replace(TUNER, profile=path, low_mb=low_mb), fusion_mb=0.05)
            run = Run(rank, world_size, config)
        run.pretend(near(0.005 if low_mb == 0.002 else 0.1))
        run.train()
        found.append(len(run.tuning.trials))
        searcher = run.tuning._searcher
        if searcher is not None and searcher._future is not None:
            searcher._future.result(30)
        run.state.close()
    return found


@pytest.mark.slow
def test_an_ended_search_in_another_range_is_no_check(workers: WorkerPools, tmp_path: Path) -> None:
    """Prevents: a search that takes the checks of a former one for its own, and ends without a trial."""
    for first, second in workers(2).run(with_other_ranges, str(tmp_path / "tuning.json")):
        assert first > 4 and second > 4


@pytest.mark.slow
def test_an_interrupted_search_goes_on(workers: WorkerPools, tmp_path: Path) -> None:
    path, whole = tmp_path / "tuning.json", tmp_path / "whole.json"
    every, mb, _ = workers(2).run(with_profile, DEAR, str(whole), None)[0]
    first, _, finished = workers(2).run(with_profile, DEAR, str(path), 3)[0]
    assert len(first) == 3 and not finished
    known = json.loads(path.read_text())["entries"][0]
    assert [trial["mb"] for trial in known["trials"]] == first and known["chosen"] is None
    rest, same, finished = workers(2).run(with_profile, DEAR, str(path), None)[0]
    assert finished and same == mb
    assert first + rest == every, "as if it had not been interrupted"


@pytest.mark.slow
def test_a_corrupt_profile_is_replaced(workers: WorkerPools, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text('{"version": 1, "entries": [{"job":')
    sizes, _, finished = workers(2).run(with_profile, DEAR, str(path), None)[0]
    assert finished and len(sizes) > 3
    assert json.loads(path.read_text())["entries"][0]["chosen"] is not None


def resume_topk(rank: int, world_size: int, after_trials: int | None) -> tuple[bool, bool, float]:
    """Save in the middle or at the end of a search; whether a run that is resumed goes on with the same bits."""
    run = Run(rank, world_size, TOPK)
    run.pretend(near(0.02))
    run.train(lambda: run.tuning.finished or len(run.tuning.trials) == after_trials)
    run.tuning._next_poll = run.step + MOST_STEPS  # the size stays as it is, as it does at first in what is resumed
    saved = copy.deepcopy(run.state.state_dict())
    model, step = copy.deepcopy(run.ddp.module.state_dict()), run.step
    resumed = Run(rank, world_size, TOPK)
    resumed.ddp.module.load_state_dict(model)
    resumed.state.load_state_dict(saved)
    resumed.step = step
    finished = resumed.tuning.finished
    for each in (run, resumed):
        for _ in range(2):
            each.train_step()
    outcome = run.bits() == resumed.bits(), finished, resumed.state.stats().group_mb
    run.state.close()
    resumed.state.close()
    return outcome


def test_checkpoints_of_topk_know_the_size(workers: WorkerPools) -> None:
    for equal, finished, mb in workers(2).run(resume_topk, None):
        assert equal and finished and 0.01 < mb < 0.04
    for equal, finished, _ in workers(2).run(resume_topk, 3):
        assert equal and not finished


def go_back(rank: int, world_size: int) -> tuple[bool, bool, int]:
    """A run whose search has ended goes back to a checkpoint of its middle, and trains on."""
    run = Run(rank, world_size, TOPK)
    run.pretend(near(0.02))
    run.train(lambda: len(run.tuning.trials) == 3)
    saved = copy.deepcopy(run.state.state_dict())
    run.train()
    trials = len(run.tuning.trials)
    run.state.load_state_dict(saved)
    for _ in range(2 * TUNER.first_step + TUNER.steps_per_trial + TUNER.dropped_steps):
        run.train_step()
    equal_mb = run.state.stats().group_mb == run.tuning.mb
    outcome = run.tuning.finished, equal_mb, len(run.tuning.trials) - trials
    run.state.close()
    return outcome


def test_a_search_that_has_ended_is_not_begun_again(workers: WorkerPools) -> None:
    for outcome in workers(2).run(go_back):
        assert outcome == (True, True, 0)


# -- what users see ----------------------------------------------------------------------------------------------------


def seen(rank: int, world_size: int, folder: str) -> tuple[str, str, list[str]]:
    from torch.utils.tensorboard import SummaryWriter

    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ddp_hooks")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    run = Run(rank, world_size, DEAR)
    refused = message_of(lambda: run.state.set_fusion("none"))
    with SummaryWriter(f"{folder}/{rank}") as writer:
        run.state.log_to(writer, every=1)
        run.train()
    run.state.set_fusion("size", mb=0.03)
    run.train_step()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    late = "" if run.state.stats().fusion_mb == 0.03 else "set_fusion had no effect"
    run.state.close()
    return refused, late, messages


@pytest.mark.slow
def test_users_see_what_happens(workers: WorkerPools, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcomes = workers(2).run(seen, str(tmp_path))
    for refused, late, _ in outcomes:
        assert "set_fusion while a tuner searches" in refused
        assert not late
    text = "\n".join(outcomes[0][2])
    assert "the tuner looks for the fastest of" in text and "trial 1: 0.05 MB, " in text
    assert "steps/s" in text and "the tuner has ended" in text
    assert not any("trial" in message for message in outcomes[1][2]), "the first rank alone reports"
    events = EventAccumulator(str(tmp_path / "0"))
    events.Reload()
    assert len({event.value for event in events.Scalars("ddp_hooks/fusion_mb")}) >= 4


def alone(rank: int, world_size: int) -> bool:
    states = [Run(rank, world_size, config).state for config in (DEAR, TOPK)]
    nothing = all(state.tuning is None for state in states)
    for state in states:
        state.close()
    return nothing and not any("tuner" in thread.name for thread in threading.enumerate())


def test_one_rank_has_nothing_to_tune(workers: WorkerPools) -> None:
    assert workers(1).run(alone) == [True]


def closed_early(rank: int, world_size: int) -> bool:
    run = Run(rank, world_size, DEAR)
    run.train(lambda: len(run.tuning.trials) == 1)
    run.state.close()
    deadline = time.monotonic() + 20
    while any("tuner" in thread.name for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any("tuner" in thread.name for thread in threading.enumerate())


def test_its_thread_ends_with_the_state(workers: WorkerPools) -> None:
    assert workers(2).run(closed_early) == [True, True]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DearConfig(tuner=TUNER, fusion="layers"), 'needs fusion="size"'),
        (lambda: DearConfig(tuner=True), "tuner must be None or a BucketTuner"),  # type: ignore[arg-type]
        (lambda: TopKConfig(tuner="gp"), "tuner must be None or a BucketTuner"),  # type: ignore[arg-type]
    ],
)
def test_wrong_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    assert message in message_of(make)


def other_settings(rank: int, world_size: int) -> str:
    return message_of(lambda: Run(rank, world_size, replace(DEAR, tuner=replace(TUNER, seed=rank))))


def test_tuners_must_be_equal(workers: WorkerPools) -> None:
    for message in workers(2).run(other_settings):
        assert "the set-up of DearState differs between ranks" in message
