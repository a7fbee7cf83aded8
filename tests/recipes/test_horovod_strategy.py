"""Horovod in the simulator: what agreements cost and let through; all-reduces in few rounds on two levels."""

from __future__ import annotations

import pytest

from ddp_hooks.comm import AlphaBeta, num_rounds
from ddp_hooks.planning import Network, StepProfile, TensorUse, simulate
from ddp_hooks.planning.events import Slice, clock_of
from recipes.paper.strategies.horovod import AGREEMENT_TRACK, Agreement, Horovod, buffer_bytes, num_levels
from recipes.paper.strategies.rounds import all_reduce

NO_COST = AlphaBeta()
TREES: tuple[Agreement, ...] = ("tree", "coordinator")


def step_of(*ready_s: float, num_bytes: int = 400) -> StepProfile:
    """Tensors whose gradients are complete at these times of a backward that ends with the last one."""
    tensors = (TensorUse(f"tensor {i}", num_bytes, 0.0, at_s) for i, at_s in enumerate(ready_s))
    return StepProfile(tuple(tensors), 1.0, max(ready_s))


# -- agreements --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 6, 7, 96, 27_600])
def test_a_bitvector_takes_as_many_rounds_as_the_collective(workers: int) -> None:
    rounds = sum(each.times for each in all_reduce("two-level-log", workers, 1, 1.0))
    assert Horovod().agreement_on(workers, 1.0) == rounds == 2 * num_rounds(workers)


def test_a_coordinator_hears_of_every_request_of_every_worker() -> None:
    horovod = Horovod(agreement="coordinator", message_s=1.0, request_s=0.5)
    assert horovod.agreement_on(1, 10.0, 4) == 0.0, "one worker has nobody to hear from"
    assert horovod.agreement_on(101, 10.0, 4) == pytest.approx(20.0 + 100 * (2 + 2))


def test_a_tree_takes_a_level_more_for_eight_times_as_many() -> None:
    tree, coordinator = (Horovod(agreement=name, message_s=1.0, request_s=1.0) for name in TREES)
    one_level_s = 2 * 0.5 + 8 * 3.0
    assert [tree.agreement_on(workers, 0.5) / one_level_s for workers in (9, 73, 585)] == [1, 2, 3]
    assert tree.agreement_on(3, 0.5) == coordinator.agreement_on(3, 0.5), "a root with two children"


@pytest.mark.parametrize("fan_out", [2, 3, 8])
def test_levels_are_the_fewest_that_hold_everybody(fan_out: int) -> None:
    for workers in range(1, 200):
        levels = num_levels(workers, fan_out)
        room = [sum(fan_out**depth for depth in range(each + 1)) for each in (levels, levels - 1)]
        assert room[0] >= workers and (levels == 0 or room[1] < workers)


def test_a_tree_of_ones_is_refused() -> None:
    with pytest.raises(ValueError, match="fan_out must be >= 2, got 1"):
        Horovod(fan_out=1)


# -- cycles ------------------------------------------------------------------------------------------------------------


def test_what_is_ready_while_workers_agree_is_for_the_next_cycle() -> None:
    network = Network(2, NO_COST)
    horovod = Horovod(agreement="coordinator", message_s=1.0, cycle_ms=1e-6)  # an agreement takes 2 s
    predicted = simulate(horovod, step_of(1.0, 2.0, 2.5), network)
    agreements = [span for span in predicted.spans if span.track == AGREEMENT_TRACK]
    assert [span.name for span in agreements[:2]] == ["agreement on 1", "agreement on 2"]
    assert predicted.step_s == pytest.approx(1.0 + 1.0 + 2 * 2.0, abs=1e-6)


def test_a_cycle_collects_for_as_long_as_it_lasts() -> None:
    predicted = simulate(Horovod(cycle_ms=1000.0), step_of(1.0, 1.5, 1.9), Network(2, NO_COST))
    assert predicted.step_s == pytest.approx(1.0 + 2.0)
    assert buffer_bytes(predicted.spans) == []  # a link without cost carries them in no time


@pytest.mark.parametrize("agreement", ["coordinator", "tree", "bitvector"])
@pytest.mark.parametrize("num_groups", [None, 1, 3])
@pytest.mark.parametrize("waits", [True, False])
def test_every_gradient_is_reduced_once_a_step(agreement: Agreement, num_groups: int | None, waits: bool) -> None:
    step = step_of(0.1, 0.2, 0.3, 0.5, 0.9, num_bytes=4_000)
    horovod = Horovod(agreement=agreement, num_groups=num_groups, waits=waits)
    predicted = simulate(horovod, step, Network(6, AlphaBeta(0.01, 1e-6)))
    assert sum(buffer_bytes(predicted.spans)) == len(predicted.step_ends_s) * step.num_bytes


def test_a_queue_lets_the_next_cycle_begin() -> None:
    """All-reduces of 2 s, gradients 1 s apart: who waits for them has fewer, and larger, buffers."""
    step = step_of(1.0, 2.0, 3.0, 4.0, num_bytes=100)
    network = Network(2, AlphaBeta(0.0, 0.02))
    waiting, queueing = (simulate(Horovod(waits=waits, cycle_ms=1e-6), step, network) for waits in (True, False))
    per_step = [len(buffer_bytes(each.spans)) / len(each.step_ends_s) for each in (waiting, queueing)]
    assert per_step[0] < per_step[1] == 4


def test_groups_are_single_requests() -> None:
    costly = Horovod(agreement="coordinator", message_s=0.0, request_s=1.0, num_groups=1)
    predicted = simulate(costly, step_of(0.1, 0.1, 0.1, 0.1), Network(2, NO_COST))
    assert predicted.step_s == pytest.approx(1.0 + 0.1 + 1.0)


# -- few rounds on two levels ------------------------------------------------------------------------------------------


def test_few_rounds_by_hand() -> None:
    """Four nodes of two: within them half of 800 bytes, between them three quarters of the rest, in two rounds."""
    network = Network(8, AlphaBeta(1.0, 0.1), 2, AlphaBeta(0.25, 0.01))
    seconds = clock_of([Slice(all_reduce("two-level-log", 8, 2, 800))], network)
    assert seconds == pytest.approx(2 * ((0.25 + 4.0) + (2 * 1.0 + 60.0)))
    assert seconds < clock_of([Slice(all_reduce("two-level", 8, 2, 800))], network)
