"""Granularity and prefetching, found by trials; never slower than stock, the same on every rank.

Prevents: searches whose ranks part; settings of another model or link that are used.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ddp_hooks.tuning import Job
from ddp_hooks.tuning.profile import Profile
from fsdp_ext import ExtConfig, TuneConfig, Tuned, compat, extend, restore, shard_by_size, tune, tuning
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.tuning import grouped, tuned_for_real
from tests.support.fsdp_ext.twins import CONFIG, WholeNumbers
from tests.support.workers import WorkerPools

# -- wrapping ---------------------------------------------------------------------------------------------------------


def train_grouped(rank: int, world_size: int) -> tuple[list[str], list[list[str]]]:
    """Bit for bit as stock FSDP2, with blocks that share a group."""
    sizes, differing = [], []
    for block_mb in (0.0001, 0.03, 10.0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(twins, "shard", lambda model, mesh, mb=block_mb, **options: grouped(model, mb, **options))
            outcome = twins.compare(rank, world_size, twins.plain)
        differing.append(outcome.differing)
        sizes.append(f"{outcome.stats.reduce_scatters / twins.NUM_STEPS:g} groups")
        assert outcome.moved and outcome.stats.deferred > 0
    return sizes, differing


@pytest.mark.quick("2")
@pytest.mark.parametrize("world_size", [2, 3])
def test_blocks_that_share_a_group(workers: WorkerPools, world_size: int) -> None:
    for sizes, differing in workers(world_size).run(train_grouped):
        assert sizes == ["6 groups", "4 groups", "2 groups"]
        assert differing == [[], [], []]


def sizes_of_groups(rank: int, world_size: int) -> list[list[int]]:
    """Blocks that are wrapped together, in order, of eight that have 1 MiB each."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for block_mb, first_mb in ((2.5, 1.0), (2.5, 2.5), (0.5, 10.0)):
        blocks: list[Any] = [nn.Linear(2**18, 1, bias=False) for _ in range(8)]
        shard_by_size(nn.Sequential(*blocks), blocks, block_mb, first_mb, mesh=mesh)
        groups = [compat.state_of(block) for block in blocks]
        found.append([groups.count(group) for group in dict.fromkeys(groups)])
    return found


def test_the_first_group_is_small(workers: WorkerPools) -> None:
    (sizes,) = workers(1).run(sizes_of_groups)
    assert sizes == [[1, 3, 3, 1], [3, 3, 2], [1] * 8]


# -- the search -------------------------------------------------------------------------------------------------------


def job(model: str = "model", link_mb_s: float | None = 100.0) -> Job:
    return Job("fsdp_ext", model, 2, "cpu", "settings", link_mb_s)


class Simulated:
    """In the place of real trials: what steps take, by setting."""

    def __init__(self, seconds: Any, link_mb_s: float) -> None:
        self.seconds, self.job = seconds, job(link_mb_s=link_mb_s)
        self.asked: list[Any] = []

    def __call__(self, search: Any, setting: Any) -> float:
        self.asked.append(setting)
        search.num_trials += 1
        search.job = self.job
        return float(self.seconds(setting))


def searched(rank: int, world_size: int, case: str, profile: str | None) -> tuple[Tuned, list[Any]]:
    tuner = TuneConfig(profile=profile, max_trials=12)
    made = Simulated(CASES[case], 100.0 if case != "another link" else 500.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning._Search, "measure", lambda self, setting: made(self, setting))
        return tune(_never, _never, ExtConfig(), tuner), made.asked


def _never(*_: Any) -> Any:
    raise AssertionError("nothing is built in simulated trials")


def valley(setting: Any) -> float:
    """Fastest with blocks of 5 MB and four modules ahead."""
    if setting.config is None:
        return 3.0
    size = abs(torch.tensor(setting.block_mb / 5).log().item())
    depth = abs((2 if setting.config.prefetch is None else setting.config.prefetch) - 4) / 4
    return 1.0 + 0.4 * size + 0.2 * depth


CASES: dict[str, Any] = {
    "valley": valley,
    "another link": valley,
    "stock is faster": lambda setting: 0.5 if setting.config is None else valley(setting),
}


def test_finds_the_valley(workers: WorkerPools) -> None:
    (found, asked), (other, others) = workers(2).run(searched, "valley", None)
    assert found == other and asked == others, "ranks have parted"
    assert found.config is not None
    assert valley(asked[0]) > 1.7 and found.step_s <= 1.2, "of 24 settings one of the best, which takes 1.0"
    assert found.step_s == valley(found) and found.stock_s == 3.0
    assert found.num_trials == len(asked) <= 12 + 4 and asked[0].block_mb == 25.0


def test_is_never_slower_than_stock(workers: WorkerPools) -> None:
    for found, _ in workers(2).run(searched, "stock is faster", None):
        assert found.config is None and found.block_mb == 25.0 and found.step_s == 0.5


def test_what_was_found_is_used_again(workers: WorkerPools, tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "profile.json")
    first, _ = workers(2).run(searched, "valley", path)[0]
    for again, asked in workers(2).run(searched, "valley", path):
        assert again == replace(first, num_trials=0) and len(asked) == 1
    _, asked = workers(2).run(searched, "another link", path)[0]
    assert len(asked) > 5, "another link is another search"
    assert len(json.loads(Path(path).read_text())["entries"]) == 2


def test_files_that_are_of_no_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "profile.json"
    found = Tuned(5.0, CONFIG, 1.0, 2.0, 7)
    for text in ("", "[]", '{"version": 0, "entries": []}', '{"version": 1, "entries": [7]}'):
        path.write_text(text)
        assert Profile(path, tuning._TunedEntry).find(job()) is None
        assert "is of no use" in caplog.text
        caplog.clear()
    profile, other_model = Profile(path, tuning._TunedEntry), replace(found, block_mb=1.0)
    profile.store(tuning._TunedEntry(job("another model"), (), None, other_model))
    profile.store(tuning._TunedEntry(job(), (), None, found))
    known = profile.find(job(link_mb_s=150.0))
    assert isinstance(known, tuning._TunedEntry) and known.tuned == replace(found, num_trials=0)
    for other in (job("other"), job(link_mb_s=300.0), job(link_mb_s=None)):
        assert profile.find(other) is None


# -- with real models -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_model(workers: WorkerPools, tmp_path: Path) -> None:
    outcomes = workers(2).run(tuned_for_real, str(tmp_path / "profile.json"))
    for outcome in outcomes:
        found = outcome["found"]
        assert found == outcomes[0]["found"] and found.num_trials >= 3 and found.step_s > 0
        assert outcome["extended"] == (found.config is not None) and outcome["changed"]
    for outcome in workers(2).run(tuned_for_real, str(tmp_path / "profile.json")):
        assert outcome["found"] == replace(outcomes[0]["found"], num_trials=0)
    for outcome in workers(2).run(tuned_for_real, str(tmp_path / "profile.json"), 0.0001):
        assert outcome["found"].num_trials >= 3, "blocks are grouped otherwise"


def tuned_with_replicas(rank: int, world_size: int) -> tuple[Tuned, bool, list[float]]:
    mesh: Any = twins.mesh_of(world_size, 2)

    def build(block_mb: float) -> nn.Module:
        torch.manual_seed(3)
        return grouped(WholeNumbers(world_size), block_mb, mesh=mesh)

    def step(model: nn.Module) -> None:
        model.zero_grad()
        model(7 + rank).backward()

    tuner = TuneConfig(
        block_mb=(0.001, 0.05), prefetch=(1,), max_trials=2, dropped_steps=2, steps_per_trial=1, profile=None
    )
    found = tune(build, step, CONFIG, tuner)
    model = build(found.block_mb)
    extension = found.apply(model)
    step(model)
    gradients = [value.grad.full_tensor() for value in model.parameters()]  # type: ignore[union-attr]
    restore(model)
    return found, extension is not None, [float(each.double().sum()) for each in gradients]


@pytest.mark.slow
def test_replicas_are_averaged_over(workers: WorkerPools) -> None:
    outcomes = workers(4).run(tuned_with_replicas)
    for found, extended, gradients in outcomes:
        assert found == outcomes[0][0] and extended == (found.config is not None)
        assert gradients == outcomes[0][2]


def failing(rank: int, world_size: int, where: str) -> str:
    """The error of a search that fails on rank 1: as it builds, or in a step between two parts of the model."""
    calls = []

    def fail() -> None:
        calls.append(where)
        if rank == 1 and len(calls) == (2 if where == "build" else 1):
            raise ZeroDivisionError("on purpose")

    def build(block_mb: float) -> Any:
        if where == "build":
            fail()
        model = twins.shard(WholeNumbers(world_size))
        if where == "step":
            model.get_submodule("blocks.2").register_forward_pre_hook(lambda *_: fail())
        return model

    try:
        with mock.patch.object(tuning, "_REPORT_S", 2.0):
            tune(build, lambda model: model(1).backward(), replace(CONFIG, timeout_s=60), TuneConfig(max_trials=3))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.quick("build")
@pytest.mark.parametrize("where", ["build", "step"])
def test_an_error_on_one_rank_ends_the_search_on_all(workers: WorkerPools, where: str) -> None:
    pool = workers(3)
    messages = pool.run(failing, where)
    pool.end()
    assert messages[1] == "ZeroDivisionError: on purpose"
    for message in (messages[0], messages[2]):
        assert message.startswith("LaneError: ") or message.startswith("ReportedError: "), message
        assert "rank 1 ended first, with ZeroDivisionError: on purpose" in message


def kept_at_run_time(rank: int, world_size: int) -> tuple[int, int]:
    """Gathers of a step, without and with modules that are kept."""
    numbers = []
    for kept in ((), ("blocks.0", "blocks.3")):
        model = twins.shard(WholeNumbers(world_size))
        for name in kept:
            model.get_submodule(name).set_reshard_after_forward(False, recurse=False)  # type: ignore[operator]
        extension = extend(model, CONFIG)
        for seed in (1, 2):
            model(seed).backward()
            numbers.append(extension.context.counts.gathers)
        restore(model)
    return numbers[1] - numbers[0], numbers[3] - numbers[2]


def test_modules_that_are_kept_are_gathered_once(workers: WorkerPools) -> None:
    for without, kept in workers(2).run(kept_at_run_time):
        assert kept == without - 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_mb": ()}, "block_mb must be a tuple of at least one value"),
        ({"block_mb": (0.0,)}, "block_mb and default_block_mb must be > 0"),
        ({"prefetch": (-1,)}, "prefetch must have whole numbers >= 0, or None"),
        ({"prefetch": (2.0,)}, "prefetch must have whole numbers >= 0, or None"),
        ({"max_trials": 0}, "max_trials must be a whole number >= 1, got 0"),
        ({"dropped_steps": 1}, "dropped_steps must be a whole number >= 2, got 1"),
        ({"xi": -1.0}, "xi must be >= 0, got -1.0"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        TuneConfig(**changes)
    assert expected in str(caught.value)
