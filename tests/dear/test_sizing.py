"""Collectives on two levels: the same steps as plain DDP's, nodes as hosts have them, and refusals; sizes of atoms.

Prevents: ranks that choose differently and wait for each other, and pieces so small that the processor limits.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import BucketTuner, DearConfig, DearState, dear_hook
from ddp_hooks.comm import LaneError, LinkProfile, Recorder, ranks_per_node
from ddp_hooks.dear import sizing
from tests.support.dear import twins
from tests.support.dear.loops import adamw_two_groups
from tests.support.dear.twins import CONFIG, WholeNumbers, whole_batches
from tests.support.workers import WorkerPools

NODES = replace(CONFIG, collective="two-level", node_size=2)
PAGE = " (see docs/troubleshooting.md#set-up-is-refused)"


def compare(rank: int, world_size: int, config: DearConfig, loop: Any) -> twins.Outcome:
    return twins.compare(rank, world_size, WholeNumbers, whole_batches, adamw_two_groups, loop, 6, config)


@pytest.mark.quick("plain-replicated-4", "accumulate-sharded-4")
@pytest.mark.parametrize("world_size", [4, 6, 8])
@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("loop", [twins.plain, twins.accumulate, twins.change_fusion], ids=lambda loop: loop.__name__)
def test_steps_are_those_of_plain_ddp(workers: WorkerPools, world_size: int, update: Any, loop: Any) -> None:
    for outcome in workers(world_size).run(compare, replace(NODES, update=update), loop):
        assert outcome.bitwise, outcome
        assert outcome.num_atoms > outcome.num_buckets > 1


def node_and_rounds(rank: int, world_size: int, config: DearConfig, hosts: str) -> tuple[int, int, int]:
    """Ranks per node, rounds of a step, and atoms; by the names of hosts."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(WholeNumbers(world_size), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    with mock.patch.object(sizing.socket, "gethostname", lambda: hosts[rank]):
        state = DearState(ddp, optimizer, replace(config, slice_mb=1))
    assert state._driver.layout.rule.layers == 4  # the default of fusion_layers
    ddp.register_comm_hook(state, dear_hook)
    for step in range(4):
        before = state._driver.lanes.traffic.rounds
        optimizer.zero_grad()
        ddp(*whole_batches(rank, world_size, step)).backward()
        optimizer.step()
        state.synchronize()
    lanes, layout = state._driver.lanes, state._driver.layout.current
    assert layout is not None
    found = lanes._settings.node_size, lanes.traffic.rounds - before, len(layout.atoms)
    state.close()
    return found


def test_what_is_chosen_is_what_runs(workers: WorkerPools) -> None:
    by_hosts, auto = replace(CONFIG, collective="two-level"), replace(CONFIG, collective="auto")
    for config, hosts, node_size in (
        (CONFIG, "aabb", 1), (NODES, "aaaa", 2), (by_hosts, "aabb", 2), (auto, "aabb", 2), (auto, "aaab", 1),
    ):  # fmt: skip
        (found, rounds, atoms), *others = workers(4).run(node_and_rounds, config, hosts)
        assert found == node_size and atoms > 5
        assert rounds == 4 * atoms, "one and three rounds, or two and two"
        assert {(other[0], other[2]) for other in others} == {(found, atoms)}


def test_of_two_ranks_both_are_alike(workers: WorkerPools) -> None:
    for found, *_ in workers(2).run(node_and_rounds, replace(NODES, wire="exact"), "ab"):
        assert found == 1


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("aabb", 2), ("aaaa", 4), ("abcd", 1), ("abab", None), ("aab", None), ("abbb", None), ("aba", None)],
)
def test_nodes_are_equal_and_of_neighbours(hosts: str, size: int | None) -> None:
    assert ranks_per_node(hosts) == size


def refuse(rank: int, world_size: int, config: DearConfig) -> tuple[str, list[str]]:
    """The message, and threads that are left."""
    before = set(threading.enumerate())
    ddp = DistributedDataParallel(nn.Linear(3, 3), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(ValueError) as refused:
        DearState(ddp, optimizer, config)
    return str(refused.value), _left_since(before)


def _left_since(before: set[threading.Thread]) -> list[str]:
    """Names of lanes that have begun since then, and have not ended."""
    lanes = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("ddp_hooks lane")]
    for lane in lanes:
        lane.join(5)
    return [lane.name for lane in lanes if lane.is_alive()]


def fail(rank: int, world_size: int) -> tuple[str, list[str]]:
    """All ranks fail while the link is measured."""
    before = set(threading.enumerate())
    ddp = DistributedDataParallel(nn.Linear(3, 3), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def measure(*_: Any) -> None:
        raise LaneError("as if a connection were lost")

    with mock.patch.object(sizing, "profile_link", measure), pytest.raises(LaneError) as failed:
        DearState(ddp, optimizer, replace(CONFIG, lanes=None))
    return str(failed.value), _left_since(before)


def test_a_measurement_that_fails_leaves_no_threads(workers: WorkerPools) -> None:
    assert workers(3).run(fail) == [("as if a connection were lost", [])] * 3


def test_refusals_are_the_same_everywhere(workers: WorkerPools) -> None:
    """In the words of the other hooks' refusals; a remedy of theirs that is none here is another one."""
    three = "node_size must divide the number of ranks, 3: got 2, leave it out"
    four = "node_size must divide the number of ranks, 4: got 3, possible are [2]"
    for world_size, config, expected in (
        (3, NODES, f'{three} and take collective="direct"'),
        (3, replace(NODES, collective="auto"), three),
        (4, replace(NODES, node_size=3), four),
    ):
        for text, left in workers(world_size).run(refuse, config):
            assert text == expected + PAGE and not left
    for text, left in workers(4).run(refuse, replace(NODES, node_size=4)):
        assert text.endswith(f"node_size must be above 1 and below 4, got 4{PAGE}") and not left
    for text, left in workers(3).run(refuse, replace(CONFIG, collective="two-level")):
        assert text.startswith('collective="two-level" needs several nodes'), "all ranks are of one host here"
        assert not left
    for text, left in workers(4).run(refuse, replace(NODES, wire="exact")):
        assert text.startswith("wire='exact' has no effect with two levels, 2 ranks per node") and not left
    with pytest.raises(ValueError, match=r"collective must be one of .*'two-level', 'auto'\), got 'tree'"):
        DearConfig(collective="tree")  # type: ignore[arg-type]


@pytest.mark.parametrize("goodput_bytes_s", [100e6, 1e9])
@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_sizes_where_the_processor_limits(monkeypatch: pytest.MonkeyPatch, update: Any, goodput_bytes_s: float) -> None:
    """Messages cost it time, so a model that has whole updates to do as well is cut into fewer pieces."""
    monkeypatch.setattr(sizing, "profile_link", lambda lanes: LinkProfile(goodput_bytes_s, 1, 16 << 20))
    lanes = mock.MagicMock(native=False, world_size=4)
    monkeypatch.setattr(sizing, "Lanes", lambda *args: lanes)
    config, device = DearConfig(update=update), torch.device("cpu")
    _, atom_bytes, *_ = sizing.open_lanes(
        config, mock.MagicMock(), device, Recorder(False), 160 << 20, update != "sharded"
    )
    assert atom_bytes == (40 if update == "replicated" and goodput_bytes_s == 1e9 else 20) << 20


def test_sizes_where_the_link_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "profile_link", lambda lanes: LinkProfile(100e6, 3, 1 << 20))
    monkeypatch.setattr(sizing, "Lanes", lambda *args: mock.MagicMock(native=False, world_size=4))
    device = torch.device("cpu")
    _, *sizes, _ = sizing.open_lanes(DearConfig(), mock.MagicMock(), device, Recorder(False), 400 << 20, False)
    assert sizes == [8 << 20, 8 << 20]


def test_a_tuner_has_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups are made of atoms, so where sizes are to be tried these are small, but messages not tiny."""
    monkeypatch.setattr(sizing, "profile_link", lambda lanes: LinkProfile(100e6, 3, 1 << 20))
    monkeypatch.setattr(sizing, "Lanes", lambda *args: mock.MagicMock(native=False, world_size=4))
    device, config = torch.device("cpu"), DearConfig(tuner=BucketTuner())
    _, *sizes, _ = sizing.open_lanes(config, mock.MagicMock(), device, Recorder(False), 100 << 20, False)
    assert sizes == [2 << 20, 8 << 20]
    _, *sizes, _ = sizing.open_lanes(config, mock.MagicMock(), device, Recorder(False), 320 << 20, False)
    assert sizes == [5 << 20, 8 << 20]
