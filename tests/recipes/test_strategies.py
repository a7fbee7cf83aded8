"""Other libraries' strategies in the simulator: rounds and steps by hand, and no schedule better than possible."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planning import Ddp, Network, Strategy, simulate
from ddp_hooks.planning.events import Slice, clock_of
from ddp_hooks.planning.network import Phase, ring
from recipes.benchmarks.workloads import profile_of_layers
from recipes.paper.strategies import ByteScheduler, DdpOn, DearOfPaper, Horovod, MgWfbp
from recipes.paper.strategies.rounds import all_reduce, halving, sent_bytes
from tests.support.simulated import check_computing_is_left, check_step, layers, one_tensor

PHASES: tuple[Phase, ...] = ("reduce-scatter", "all-gather")
DENSE: tuple[Strategy, ...] = (
    DdpOn(0.001),
    MgWfbp(),
    ByteScheduler(0.001),
    ByteScheduler(part_mb=64 / (1 << 20), credit=3),
    Horovod(cycle_ms=1e-6),
    Horovod(cycle_ms=1e-6, num_groups=2),
    DearOfPaper(),
)


def test_backends_rounds_by_hand() -> None:
    """Three nodes of two: within them half of 600 bytes each way, between them from each worker a sixth, twice."""
    first, second, *back = all_reduce("two-level", 6, 2, 600)
    assert (first, second) == ((1, 0, 300, 1), (2, 200, 0, 1)) and back == [second, first]
    network = Network(6, AlphaBeta(1.0, 0.1), 2, AlphaBeta(0.25, 0.01))
    assert clock_of([Slice((first, second))], network) == pytest.approx(0.25 + 3.0 + 2 * (1.0 + 20.0))
    assert [each.between_bytes for each in halving(5, 500)] == [100, 200, 100]
    assert ring(4, 1, 400) == ((3, 100, 0, 1),) and ring(4, 4, 400) == ((3, 0, 100, 1),) and ring(1, 1, 400) == ()


def test_a_node_sends_a_little_less_than_in_one_ring() -> None:
    assert sent_bytes(all_reduce("ring", 12, 4, 1200)) == pytest.approx(2 * 1100)
    assert sent_bytes(all_reduce("two-level", 12, 4, 1200)) == pytest.approx(2 * 800)


def test_as_many_workers_as_a_paper_has() -> None:
    assert len(halving(27_600, 27_600e3)) == 15


def test_one_tensor_by_hand() -> None:
    network = Network(4, AlphaBeta(0.25, 0.01))
    half_s, direct_s = 3 * (0.25 + 0.25), 0.25 + 3 * 0.25
    for strategy in (MgWfbp(), DdpOn()):
        assert simulate(strategy, one_tensor(), network).step_s == pytest.approx(1 + 2 + 2 * half_s + 0.5)
    scatters, gathers = (DearOfPaper("sharded", halves=(phase,)) for phase in PHASES)
    assert simulate(scatters, one_tensor(), network).step_s == pytest.approx(1 + 2 + direct_s + 0.5 / 4)
    assert simulate(gathers, one_tensor(), network).step_s == pytest.approx(1 + 2 + half_s + 0.5 / 4)


def test_the_papers_buffers_hold_whole_tensors() -> None:
    step, network = one_tensor(40 << 20), Network(2, AlphaBeta(0.0, 1e-9))
    predicted = simulate(DearOfPaper("sharded"), step, network)
    sent = {span.name for span in predicted.spans if span.track.startswith("lane")}
    assert sent == {"reduce-scatter of group 0", "all-gather of group 0"}
    assert predicted.sent_bytes == pytest.approx(step.num_bytes)


def test_horovod_waits_for_cycles_and_agreements() -> None:
    network = Network(1024, AlphaBeta(1e-4, 0.0))
    by_coordinator = Horovod(agreement="coordinator", message_s=1e-5)
    by_bits = Horovod(agreement="bitvector")
    reduced_s = 2 * 1023 * 1e-4
    for strategy, agreement_s in ((by_coordinator, 2 * (1e-4 + 1023e-5)), (by_bits, 20e-4)):
        predicted = simulate(strategy, one_tensor(), network)
        assert predicted.step_s == pytest.approx(3.5 + reduced_s + max(1e-3, agreement_s))


def test_what_the_forward_needs_last_comes_last() -> None:
    """Two layers; with ByteScheduler the first layer's gradient passes the second's, which is ready before."""
    step = profile_of_layers([(4.0, 1.0, [0]), (4.0, 1.0, [1])], ["first", "second"], [400, 400])
    network = Network(2, AlphaBeta(0.0, 0.01))  # an all-reduce of one takes 4 s
    by_order = simulate(ByteScheduler(part_mb=4e-4 / 4, credit=1), step, network)
    assert by_order.step_s == pytest.approx(max(8 + 2, 10 + 4), rel=0.2)
    assert by_order.step_s < simulate(Ddp(1e-6), step, network).step_s


@given(layers, st.integers(1, 9), st.sampled_from([0.0, 0.25]), st.sampled_from(DENSE))
@settings(max_examples=80, deadline=None)
def test_nothing_is_faster_than_possible(
    drawn: list[tuple[int, int, int]], workers: int, alpha_s: float, strategy: Strategy
) -> None:
    check_step(drawn, workers, alpha_s, strategy)


@pytest.mark.parametrize("strategy", DENSE, ids=lambda strategy: strategy.name)
def test_without_a_network_computing_is_left(strategy: Strategy) -> None:
    check_computing_is_left(strategy)
