"""Other collectives than one ring: the same bits as plain DDP where sums are exact, and after resuming where not.

Prevents: ranks that choose differently and wait for each other; sums that a resumed run adds in another order.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from ddp_hooks.comm import CollectiveRule, LaneError
from ddp_hooks.dear import collective
from ddp_hooks.dear.collective import ranks_per_node
from ddp_hooks.dear.order import SumOrder
from tests.support.dear import twins
from tests.support.dear.loops import adamw_two_groups, momentum_sgd
from tests.support.dear.twins import CONFIG, WholeNumbers, whole_batches
from tests.support.workers import WorkerPools

LOG = replace(CONFIG, collective="log")
NODES = replace(CONFIG, collective="two-level", node_size=2)
MIXED = CollectiveRule(log_numel=3000)  # some atoms of the models below are larger


def choosing(rule: CollectiveRule) -> Any:
    """As if a measurement had found this; ranks of one host are as many nodes as the rule says."""
    return mock.patch.multiple(
        collective, _log_numel=lambda *_: rule.log_numel, ranks_per_node=lambda hosts: rule.node_size
    )


def compare(rank: int, world_size: int, config: DearConfig, rule: CollectiveRule, loop: Any, steps: int) -> Any:
    optimizer = adamw_two_groups if world_size != 7 else momentum_sgd  # Adam makes much of DDP's errors with sevenths
    with choosing(rule):
        return twins.compare(rank, world_size, WholeNumbers, whole_batches, optimizer, loop, steps, config)


@pytest.mark.quick("sharded-4-config1", "replicated-3-config0", "sharded-4-config2")
@pytest.mark.parametrize(("world_size", "config"), [(3, LOG), (4, LOG), (4, NODES)])
@pytest.mark.parametrize("update", ["sharded", "replicated"])
def test_steps_are_those_of_plain_ddp(workers: WorkerPools, world_size: int, config: Any, update: Any) -> None:
    config = replace(config, update=update)
    for outcome in workers(world_size).run(compare, config, CollectiveRule(), twins.plain, 8):
        assert outcome.bitwise, outcome
        assert outcome.num_atoms > outcome.num_buckets > 1


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [5, 6, 7, 8])
@pytest.mark.parametrize("kind", ["log", "two-level", "mixed"])
def test_any_number_of_ranks(workers: WorkerPools, world_size: int, kind: str) -> None:
    if kind == "two-level" and world_size % 2:
        pytest.skip("nodes of two hold an even number of ranks")
    config = {"log": LOG, "two-level": NODES, "mixed": replace(CONFIG, collective="auto")}[kind]
    for outcome in workers(world_size).run(compare, config, MIXED, twins.plain, 6):
        assert outcome.bitwise if world_size != 7 else outcome.parameter_gap < 1e-4, outcome


@pytest.mark.quick("accumulate-*")
@pytest.mark.parametrize("rule", [MIXED, CollectiveRule(3000, 2)], ids=str)
@pytest.mark.parametrize("loop", [twins.accumulate, twins.change_fusion], ids=lambda loop: loop.__name__)
def test_the_choice_goes_by_size(workers: WorkerPools, rule: CollectiveRule, loop: Any) -> None:
    for outcome in workers(4).run(compare, replace(CONFIG, collective="auto"), rule, loop, 6):
        assert outcome.bitwise, outcome


def rounds_of(rank: int, world_size: int, config: DearConfig, rule: CollectiveRule) -> tuple[CollectiveRule, int, int]:
    """The rule in force, rounds of a step, and atoms."""
    with choosing(rule):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(WholeNumbers(world_size), bucket_cap_mb=0.05, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        state = DearState(ddp, optimizer, replace(config, slice_mb=1))
        ddp.register_comm_hook(state, dear_hook)
        for step in range(4):
            before = state._lanes.traffic.rounds
            optimizer.zero_grad()
            ddp(*whole_batches(rank, world_size, step)).backward()
            optimizer.step()
            state.synchronize()
        rounds = state._lanes.traffic.rounds - before
        layout = state._arrangement.layout
        assert layout is not None
        found = state._lanes.rule, rounds, len(layout.atoms)
        state.close()
        return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("config", [LOG, NODES, replace(CONFIG, collective="auto")], ids=["log", "two-level", "auto"])
def test_of_two_ranks_all_collectives_are_alike(workers: WorkerPools, world_size: int, config: Any) -> None:
    for rule, *_ in workers(world_size).run(rounds_of, config, MIXED):
        assert rule == CollectiveRule()


@pytest.mark.parametrize("config", [LOG, NODES], ids=["log", "two-level"])
def test_gathers_that_begin_early(workers: WorkerPools, config: Any) -> None:
    early = replace(config, update="replicated", early_gathers=0.6)
    for outcome in workers(4).run(compare, early, CollectiveRule(), twins.plain, 8):
        assert outcome.bitwise, outcome


def by_name_of_host(rank: int, world_size: int) -> tuple[bool, CollectiveRule]:
    """Two ranks seem to be on each host."""
    config = replace(CONFIG, collective="two-level")
    with mock.patch.object(collective.socket, "gethostname", lambda: f"host {rank // 2}"):
        rule = rounds_of_unpatched(rank, world_size, config)
        outcome = twins.compare(rank, world_size, WholeNumbers, whole_batches, adamw_two_groups, twins.plain, 3, config)
    return outcome.bitwise, rule


def test_nodes_are_found_by_the_names_of_hosts(workers: WorkerPools) -> None:
    assert workers(4).run(by_name_of_host) == [(True, CollectiveRule(node_size=2))] * 4


def rounds_of_unpatched(rank: int, world_size: int, config: DearConfig) -> CollectiveRule:
    """The rule that a state comes to by itself."""
    ddp = DistributedDataParallel(nn.Linear(3, 3), gradient_as_bucket_view=True)
    state = DearState(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), config)
    rule = state._lanes.rule
    state.close()
    return rule


def test_what_is_chosen_is_what_runs(workers: WorkerPools) -> None:
    rounds = {}
    for name, config in (("ring", CONFIG), ("log", LOG), ("two-level", NODES)):
        (rule, rounds[name], atoms), *others = workers(4).run(rounds_of, config, CollectiveRule())
        assert {(other[0], other[2]) for other in others} == {(rule, atoms)}
        assert atoms > 5
    assert rounds["ring"] == 2 * 3 * atoms and rounds["log"] == rounds["two-level"] == 2 * 2 * atoms
    mixed, *_ = workers(4).run(rounds_of, replace(CONFIG, collective="auto"), MIXED)
    assert mixed[0] == MIXED and rounds["log"] < mixed[1] < rounds["ring"]


# -- resuming ---------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Sums of its gradients are not exact."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 90), nn.Tanh(), nn.Linear(90, 70), nn.Tanh(), nn.Linear(70, 5))

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.layers(values)
        return output.square().mean()


def resume(
    rank: int, world_size: int, config: DearConfig, rules: Sequence[CollectiveRule], folder: str, whole: bool
) -> tuple[bool, bool, CollectiveRule]:
    """Whether six steps are three, a checkpoint and three; also with the order that plain rings would add in."""

    def train(first: int, last: int, rule: CollectiveRule, save: bool, load: bool) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Wide(), bucket_cap_mb=0.02, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
        with choosing(rule):
            state = DearState(ddp, optimizer, config)
        ddp.register_comm_hook(state, dear_hook)
        if load and whole:
            model, saved = torch.load(f"{folder}-{rank}", weights_only=True)
            ddp.module.load_state_dict(model)
            optimizer.load_state_dict(saved)
        elif load:
            content = {"model": ddp.module.state_dict()}
            dcp.load(content, checkpoint_id=folder)
            ddp.module.load_state_dict(content["model"])
            state.load_sharded_optimizer(folder)
        for step in range(first, last):
            optimizer.zero_grad()
            batch = torch.randn(7, 24, generator=torch.Generator().manual_seed(100 * step + rank))
            ddp(batch).backward()
            optimizer.step()
        if save and whole:
            torch.save((ddp.module.state_dict(), state.full_optimizer_state_dict()), f"{folder}-{rank}")
        elif save:
            content = {"model": ddp.module.state_dict(), "optimizer": state.sharded_optimizer_state_dict()}
            dcp.save(content, checkpoint_id=folder)
        state.synchronize()
        parameters = [copy.deepcopy(p.detach()) for p in ddp.parameters()]
        used = state._lanes.rule
        state.close()
        return parameters, used

    first, second = rules
    at_a_stretch, _ = train(0, 6, first, False, False)
    train(0, 3, first, True, False)
    resumed, used = train(3, 6, second, False, True)
    with mock.patch.object(SumOrder, "fits", lambda *_: False):  # as if nothing were known of the earlier run
        forgetful, _ = train(3, 6, first, False, True)
    return _equal(at_a_stretch, resumed), _equal(at_a_stretch, forgetful), used


def _equal(these: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(these, others, strict=True))


@pytest.mark.quick("state_dict-two-level", "pieces-replicated")
@pytest.mark.parametrize(
    ("world_size", "config", "rules"),
    [
        (3, LOG, (CollectiveRule(), CollectiveRule())),
        (6, NODES, (CollectiveRule(), CollectiveRule())),  # of four ranks every owner's sum is one of the same pairs
        (3, replace(CONFIG, collective="auto"), (CollectiveRule(2500), CollectiveRule())),
        (6, replace(CONFIG, collective="auto"), (CollectiveRule(2500, 2), CollectiveRule(100, 1))),
        (3, replace(LOG, update="replicated"), (CollectiveRule(), CollectiveRule())),
        (3, replace(LOG, reduce_dtype=torch.bfloat16), (CollectiveRule(), CollectiveRule())),
    ],
    ids=["log", "two-level", "measured otherwise", "other nodes", "replicated", "sums in bfloat16"],
)
@pytest.mark.parametrize("whole", [True, False], ids=["state_dict", "pieces"])
def test_resumed_sums_are_added_in_the_same_order(
    workers: WorkerPools, tmp_path: Any, world_size: int, config: Any, rules: Any, whole: bool
) -> None:
    for equal, forgetful, used in workers(world_size).run(resume, config, rules, str(tmp_path / "saved"), whole):
        assert equal
        assert not forgetful, "the first backward adds alike in any order: this test tests nothing"
        if config.collective == "auto":
            assert used == rules[0], "the run goes on with what is saved, whatever is measured now"


def change(rank: int, world_size: int, path: str) -> tuple[CollectiveRule, bool, str]:
    """A run with rings is gone on with by one that asks for few rounds; and one rank alone loads it."""

    def begin(config: DearConfig) -> tuple[DistributedDataParallel, Any, DearState]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Wide(), bucket_cap_mb=0.02, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.9)
        state = DearState(ddp, optimizer, config)
        ddp.register_comm_hook(state, dear_hook)
        return ddp, optimizer, state

    def step(ddp: DistributedDataParallel, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        batch = torch.randn(7, 24, generator=torch.Generator().manual_seed(100 * number + rank))
        ddp(batch).backward()
        optimizer.step()

    ddp, optimizer, state = begin(CONFIG)
    for number in range(3):
        step(ddp, optimizer, number)
    model, saved = copy.deepcopy((ddp.module.state_dict(), state.full_optimizer_state_dict()))
    resumed, resumed_optimizer, resumed_state = begin(LOG)
    resumed.module.load_state_dict(model)
    resumed_optimizer.load_state_dict(saved)
    for number in range(3, 6):
        step(ddp, optimizer, number)
        step(resumed, resumed_optimizer, number)
    state.synchronize()
    resumed_state.synchronize()
    equal = _equal(list(ddp.parameters()), list(resumed.parameters()))
    rule = resumed_state._lanes.rule

    torn, torn_optimizer, torn_state = begin(CONFIG)
    if rank == 0:
        torn_optimizer.load_state_dict(saved)
    with pytest.raises(ValueError) as refused:
        step(torn, torn_optimizer, 3)
    for each in (state, resumed_state, torn_state):
        each.close()
    return rule, equal, str(refused.value)


def test_a_run_goes_on_with_what_it_had(workers: WorkerPools, tmp_path: Any) -> None:
    for rule, equal, refusal in workers(3).run(change, str(tmp_path)):
        assert rule == CollectiveRule() and equal
        assert "the checkpoint to resume from differs between ranks" in refusal
        assert "nothing on ranks [1, 2]" in refusal and "a run of" in refusal


def test_orders_of_earlier_versions_are_those_of_rings() -> None:
    order = SumOrder(2, 100, False, ((0, 1),), CollectiveRule(5, 2))
    packed = order.packed()
    assert SumOrder.unpacked(packed) == order
    del packed["rule"]
    assert SumOrder.unpacked(packed).rule == CollectiveRule()
    assert not replace(order, world_size=3).fits(2, 3), "nodes of two do not hold three ranks"


# -- choosing ---------------------------------------------------------------------------------------------------------


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

    def measure(*_: Any) -> int:
        raise LaneError("as if a connection were lost")

    with mock.patch.object(collective, "_log_numel", measure), pytest.raises(LaneError) as failed:
        DearState(ddp, optimizer, replace(CONFIG, collective="auto"))
    return str(failed.value), _left_since(before)


def test_a_measurement_that_fails_leaves_no_threads(workers: WorkerPools) -> None:
    assert workers(3).run(fail) == [("as if a connection were lost", [])] * 3


def test_refusals_are_the_same_everywhere(workers: WorkerPools) -> None:
    for text, left in workers(3).run(refuse, NODES):
        assert text == "node_size must divide 3 ranks, got 2" and not left
    for text, left in workers(4).run(refuse, replace(NODES, node_size=4)):
        assert text.endswith("node_size must be above 1 and below 4, got 4") and not left
    for text, left in workers(3).run(refuse, replace(CONFIG, collective="two-level")):
        assert text.startswith('collective="two-level" needs several nodes'), "all ranks are of one host here"
        assert not left
    with pytest.raises(ValueError, match=r"collective must be one of .*'two-level', 'auto'\), got 'tree'"):
        DearConfig(collective="tree")  # type: ignore[arg-type]


def measured(rank: int, world_size: int, factor: float) -> CollectiveRule:
    """The rule that follows if few rounds take ``factor`` times as long."""
    ddp = DistributedDataParallel(nn.Linear(3, 3), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def seconds(lanes: Any, loads: Any, rule: CollectiveRule) -> float:
        assert len(loads) == len(lanes), "all lanes are full"
        unit = 1e-3  # so that all sizes are looked at
        return unit * (factor if rule.log_numel > 10**9 else float(loads[0][0].flat.nbytes < 1 << 20) + 0.1)

    with mock.patch.object(collective, "_seconds", seconds):
        state = DearState(ddp, optimizer, replace(CONFIG, collective="auto"))
    rule = state._lanes.rule
    state.close()
    return rule


@pytest.mark.parametrize(("factor", "log_numel"), [(2.0, 0), (0.5, 65536), (0.01, 1 << 20)])
def test_auto_takes_few_rounds_as_far_as_they_are_faster(workers: WorkerPools, factor: float, log_numel: int) -> None:
    rules = workers(3).run(measured, factor)
    assert rules == [CollectiveRule(log_numel)] * 3


def compare_as_measured(rank: int, world_size: int) -> tuple[bool, CollectiveRule]:
    config = replace(CONFIG, collective="auto")
    rule = rounds_of_unpatched(rank, world_size, config)
    outcome = twins.compare(rank, world_size, WholeNumbers, whole_batches, adamw_two_groups, twins.plain, 3, config)
    return outcome.bitwise, rule


@pytest.mark.slow
def test_auto_measures_for_itself(workers: WorkerPools) -> None:
    outcomes = workers(3).run(compare_as_measured)
    assert all(bitwise for bitwise, _ in outcomes)
    assert len({rule for _, rule in outcomes}) == 1, "every rank has come to the same rule"
