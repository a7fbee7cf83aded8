"""The simulator: the same clock as the fabric's, no schedule better than possible, and simple steps by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_hooks.comm import (
    AlphaBeta,
    direct_reduce_scatter,
    ring_all_gather,
    run_on_fabric,
)
from ddp_hooks.planning import (
    Costs,
    Ddp,
    Dear,
    Network,
    Prediction,
    Quantized,
    SparDL,
    StepProfile,
    Strategy,
    TensorUse,
    link_of,
    simulate,
)
from ddp_hooks.planning.events import Link, Processor, Slice, clock_of
from ddp_hooks.planning.network import all_to_all, ring
from ddp_hooks.sparse import SparseSum, Sparsity
from ddp_hooks.sparse.codec import EntryCodec
from recipes.benchmarks.workloads import profile_of_layers
from recipes.paper.strategies.rounds import sent_bytes
from tests.support.simulated import check_computing_is_left, check_step, layers, one_tensor

COST = AlphaBeta(0.5, 0.01)
GATHERS_16_BITS = Dear(gather_dtype=torch.bfloat16)
INT8 = (1 + 4 / 256) / 4  # bytes per byte, with a scale per block
DENSE: tuple[Strategy, ...] = (
    Ddp(0.001),
    Ddp(),
    Dear(fusion_mb=0.001, lanes=2, slice_mb=1.0),
    Dear("replicated", fusion_mb=0.001, lanes=2, slice_mb=1.0),
    Dear(fusion_mb=100.0, lanes=1),
)


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 13])
def test_the_clock_is_the_fabrics(world_size: int) -> None:
    numel = 8 * world_size
    chunks = [list(torch.ones(numel).split(8)) for _ in range(world_size)]
    scatter = [direct_reduce_scatter(chunks[rank], rank, torch.empty(numel)) for rank in range(world_size)]
    gather = [ring_all_gather(chunks[rank], rank) for rank in range(world_size)]
    for algorithms, make in ((scatter, all_to_all), (gather, ring)):
        traffic, pattern = run_on_fabric(algorithms, COST), make(world_size, 1, 4 * numel)
        assert sent_bytes(pattern) == traffic[0].sent_bytes
        expected_s = max(each.clock_s for each in traffic)
        assert clock_of([Slice(pattern)], Network(world_size, COST)) == pytest.approx(expected_s)


def test_lanes_share_the_link_and_hide_latency() -> None:
    network = Network(5, COST)
    pattern = ring(5, 1, 500)
    alone = clock_of([Slice(pattern)], network)
    assert alone == pytest.approx(4 * (0.5 + 1.0))
    both = clock_of([Slice(pattern)], network, lanes=2)
    assert 2 * 4 * 1.0 < both < 2 * alone, "one sends while the other waits"
    slow = Network(5, AlphaBeta(0.0, 0.01))
    assert clock_of([Slice(pattern)] * 3, slow, lanes=2) == pytest.approx(6 * 4 * 1.0), "no time is lost, none is won"


def test_as_many_workers_as_a_paper_has() -> None:
    pattern = ring(27_600, 1, 27_600e3)
    assert pattern == ((27_599, 1000, 0, 1),)
    clock = clock_of([Slice(pattern)], Network(27_600, AlphaBeta(1e-6, 1e-9)))
    assert clock == pytest.approx(27_599 * 2e-6)


@pytest.mark.parametrize("world_size", [2, 4, 6, 7])
def test_spardl_sends_what_is_predicted(world_size: int) -> None:
    numel, density = 60_000, 0.05
    generator = torch.Generator().manual_seed(0)
    sparsity = Sparsity("spardl", round(density * numel), EntryCodec("exact", torch.float32))
    sums = [SparseSum(sparsity, numel, r, world_size) for r in range(world_size)]
    vectors = [torch.randn(numel, generator=generator) for _ in sums]
    traffic = run_on_fabric([_only(each.run(vector, None)) for each, vector in zip(sums, vectors, strict=True)])
    pattern = SparDL(density, entry_bytes=8).rounds(world_size, numel)
    assert len(pattern) == traffic[0].rounds
    assert sent_bytes(pattern) == pytest.approx(max(t.sent_bytes for t in traffic), rel=0.02)


def _only(exchange):  # type: ignore[no-untyped-def]
    yield from exchange


# -- steps -------------------------------------------------------------------------------------------------------------


def test_one_tensor_by_hand() -> None:
    network = Network(4, AlphaBeta(0.25, 0.01))
    half_s, direct_s = 3 * (0.25 + 0.25), 0.25 + 3 * 0.25
    assert simulate(Ddp(), one_tensor(), network).step_s == pytest.approx(1 + 2 + 2 * half_s + 0.5)
    sharded = simulate(Dear(), one_tensor(), network)
    assert sharded.step_s == pytest.approx(1 + 2 + direct_s + half_s + 0.5 / 4)
    assert simulate(Dear("replicated"), one_tensor(), network).step_s == pytest.approx(1 + 2 + direct_s + half_s + 0.5)
    assert sharded.sent_bytes == pytest.approx(150)
    assert sharded.exposed_s == pytest.approx(sharded.step_s - 3)


def test_large_tensors_travel_in_atoms_as_in_the_hook() -> None:
    """40 MiB on a fast link: three atoms of at most 16 MiB."""
    step, network = one_tensor(40 << 20), Network(2, AlphaBeta(0.0, 1e-9))
    predicted = simulate(Dear(), step, network)
    sent = {span.name for span in predicted.spans if span.track.startswith("lane")}
    assert sent == {f"{phase} of group {i}" for phase in ("reduce-scatter", "all-gather") for i in range(3)}
    assert predicted.sent_bytes == pytest.approx(step.num_bytes)


def test_replicated_gathers_wait_for_their_reduce_scatters() -> None:
    """Two layers on two lanes: a part of each gather is on the lane where the other's reduce-scatter was."""
    step = profile_of_layers([(0.0, 1.0, [0]), (0.0, 1.0, [1])], ["first", "second"], [400, 400])
    predicted = simulate(Dear("replicated", bucket_mb=1e-6, lanes=2), step, Network(2, AlphaBeta(10.0, 0.0)))
    spans = {name: [span for span in predicted.spans if span.name == name] for name in _names(predicted)}
    (scattered, *_), gathers = spans["reduce-scatter of group 1"], spans["all-gather of group 0"]
    gathered = next(span for span in gathers if span.track != scattered.track)
    assert gathered.end_s >= scattered.end_s + 10.0 - 1e-9


def test_a_gather_uses_all_lanes() -> None:
    step = one_tensor(2 << 20)
    predicted = simulate(Dear(lanes=3, slice_mb=0.25), step, Network(2, AlphaBeta(0.0, 1e-7)))
    gathers = [span for span in predicted.spans if span.name == "all-gather of group 0"]
    assert {span.track for span in gathers} == {"lane 0", "lane 1", "lane 2"}
    assert len({span.track for span in predicted.spans if span.name == "reduce-scatter of group 0"}) == 1


def _names(predicted: Prediction) -> set[str]:
    return {span.name for span in predicted.spans}


def test_what_the_processor_does_counts() -> None:
    network = Network(2, AlphaBeta(0.0, 0.0))
    costs = Costs(message_s=0.5, copy_s_per_byte=0.001, select_s_per_byte=0.1)
    assert simulate(Ddp(), one_tensor(), network, costs).step_s == pytest.approx(1 + 2 + 0.1 + 2 * 0.5 + 0.5)
    assert simulate(Dear(), one_tensor(), network, costs).step_s == pytest.approx(1 + 2 + 0.1 + 2 * 0.5 + 0.25)
    assert simulate(SparDL(), one_tensor(), network, costs).step_s == pytest.approx(1 + 2 + 0.1 + 10 + 2 * 0.5 + 0.5)


def fitting(step: StepProfile, *tensors: int) -> StepProfile:
    """The same step, whose gradients come out of autocast's casts, but for other tensors' ones."""
    uses = enumerate(step.tensors)
    return replace(
        step, tensors=tuple(replace(use, exact_width=0.5, is_cast=True) if i in tensors else use for i, use in uses)
    )


@pytest.mark.parametrize(("strategy", "part", "on_accelerators"), [
    (Ddp(), 1, 1),
    (Dear(), 3 / 4, 1),
    (Dear("replicated"), 3 / 4, 1),
    (GATHERS_16_BITS, 1 / 2, 3 / 4),
    (Dear(wire="bf16"), 1 / 2, 1 / 2),
    (Dear(wire="int8"), INT8, INT8),
    (Dear("replicated", wire="int8"), (1 + INT8) / 2, (1 + INT8) / 2),
    (Quantized(), INT8, INT8),
])  # fmt: skip
def test_fewer_bytes_are_sent(strategy: Strategy, part: float, on_accelerators: float) -> None:
    step = fitting(one_tensor(4 << 20), 0)
    for native, expected in ((False, part), (True, on_accelerators)):
        network = Network(4, AlphaBeta(1e-4, 1e-9), native=native)
        assert simulate(strategy, step, network).sent_bytes == pytest.approx(1.5 * expected * step.num_bytes)


def test_only_what_fits_travels_in_16_bits() -> None:
    """Two tensors in one atom: a quarter of its bytes fits; and profiles of before know of none that does."""
    step = profile_of_layers([(1.0, 1.0, [0]), (1.0, 1.0, [1])], ["a", "b"], [1 << 20, 3 << 20])
    network, whole = Network(2, AlphaBeta(1e-4, 1e-9)), 4 << 20
    assert simulate(Dear(), fitting(step, 0), network).sent_bytes == pytest.approx(whole - (1 << 20) / 4)
    assert simulate(GATHERS_16_BITS, fitting(step, 0), network).sent_bytes == pytest.approx(whole - (1 << 20) / 2)
    for strategy in (Dear(), GATHERS_16_BITS):
        assert simulate(strategy, step, network).sent_bytes == pytest.approx(whole)


def test_codes_take_their_time() -> None:
    """Two workers, one tensor of 100 bytes: each half of an all-reduce encodes and decodes 50 bytes."""
    network, step = Network(2, AlphaBeta()), fitting(one_tensor(), 0)
    costs = Costs(exact_s_per_byte=0.01, code_s_per_byte=0.1)
    assert simulate(Dear(), step, network, costs).step_s == pytest.approx(1 + 2 + 0.5 + 0.25)
    assert simulate(Dear(), one_tensor(), network, costs).step_s == pytest.approx(1 + 2 + 0.25), "nothing fits"
    int8 = simulate(Dear(wire="int8"), step, network, costs)
    assert int8.step_s == pytest.approx(1 + 2 + 5 + 5 + 0.25) and int8.processor_s == pytest.approx(10)
    assert simulate(Quantized(), step, network, costs).step_s == pytest.approx(1 + 2 + 5 + 5 + 0.5)
    for strategy in (Dear(wire="int8"), Quantized()):
        assert simulate(strategy, step, Network(1, AlphaBeta()), costs).processor_s == 0, "one worker encodes nothing"


def test_whole_numbers_are_added_up() -> None:
    """Two workers, one tensor of 100 bytes: 25 are sent, for 0.01 s each, and 50 are added, for 0.02 s each."""
    costs = Costs(byte_s=0.01, scatter_byte_s=0.03)
    predicted = simulate(Dear(), fitting(one_tensor(), 0), Network(2, AlphaBeta()), costs)
    assert predicted.step_s == pytest.approx(1 + 2 + 0.25 + 1.0 + 0.5 + 0.25)


def test_quantized_gathers_what_it_has_scattered() -> None:
    network = Network(4, AlphaBeta(0.25, 0.01))
    direct_s, ring_s = 0.25 + 3 * 0.25 * INT8, 3 * (0.25 + 0.25 * INT8)
    assert simulate(Quantized(), one_tensor(), network).step_s == pytest.approx(1 + 2 + direct_s + ring_s + 0.5)


def test_lanes_and_the_training_thread_take_turns() -> None:
    """Selecting takes 20 s, from 1 s into a backward of 2 s whose thread needs the only core half of the time."""
    step = replace(profile_of_layers([(1.0, 1.0, [0]), (1.0, 1.0, [1])], ["a", "b"], [400, 400]), cpu_s=2.0)
    costs = Costs(select_s_per_byte=0.05)
    alone = simulate(SparDL(group_mb=1e-4), step, Network(2, AlphaBeta()), costs)
    assert alone.step_s == pytest.approx(2 + 1 + 40 + 0.5), "lanes lose the half second that the second layer computes"
    fast = simulate(SparDL(group_mb=1e-4), step, Network(2, AlphaBeta()), Costs(select_s_per_byte=0.5 / 400))
    assert fast.step_s == pytest.approx(2 + 1 + 1.25 + 0.5, rel=1e-2), "but for the length of a turn"
    many = simulate(SparDL(group_mb=1e-4), step, Network(2, AlphaBeta()), Costs(select_s_per_byte=0.5 / 400, cores=2))
    assert many.step_s == pytest.approx(2 + 1 + 1 + 0.5)


def test_work_goes_to_the_core_that_is_free_first() -> None:
    processor = Processor(cores=2)
    assert [processor.work(0.0, seconds) for seconds in (1.0, 3.0, 1.0, 2.0)] == [1.0, 3.0, 2.0, 4.0]


def test_adding_up_costs_the_processor_more() -> None:
    """Two workers, one tensor of 100 bytes: 50 are sent in each half, by a processor that is slower than the link."""
    network = Network(2, AlphaBeta(0.0, 0.0))
    plain, added = Costs(byte_s=0.01), Costs(byte_s=0.01, scatter_byte_s=0.03, all_reduce_byte_s=0.05)
    assert simulate(Dear(), one_tensor(), network, plain).step_s == pytest.approx(1 + 2 + 0.5 + 0.5 + 0.25)
    assert simulate(Dear(), one_tensor(), network, added).step_s == pytest.approx(1 + 2 + 1.5 + 0.5 + 0.25)
    assert simulate(Ddp(), one_tensor(), network, added).step_s == pytest.approx(1 + 2 + 2 * 2.5 + 0.5)


def test_workers_of_one_core_update_at_the_same_time() -> None:
    step = replace(one_tensor(), optimizer_cpu_s=0.4)  # of 0.5 s
    network = Network(2, AlphaBeta())
    assert simulate(Ddp(), step, network, Costs(oversubscription=1.0)).step_s == pytest.approx(3.5)
    assert simulate(Ddp(), step, network, Costs(oversubscription=4.0)).step_s == pytest.approx(3 + 1.6)


@given(st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.floats(0.0, 4.0), st.integers(1, 20))
def test_rounds_in_a_row_take_as_long_as_one_by_one(
    alpha_s: float, carrying_s: float, credit_s: float, times: int
) -> None:
    link = AlphaBeta(alpha_s, carrying_s)
    in_a_row, wire, now_s = Link(link, credit_s), Link(link, credit_s), 100.0
    at_once = in_a_row.send(100.0, 1.0, times)
    for _ in range(times):
        now_s = wire.send(now_s, 1.0)
    assert in_a_row.sent_bytes == wire.sent_bytes == times
    if credit_s <= alpha_s:
        assert at_once == pytest.approx(now_s)
    assert at_once >= now_s - 1e-9, "credit from before lets the first ones pass faster"


def test_a_link_makes_up_for_latencies() -> None:
    wire = Link(AlphaBeta(1.0, 2.0), burst_credit_s=1.0)
    arrivals = [wire.send(10.0, 1.0)]
    for _ in range(3):
        arrivals.append(wire.send(arrivals[-1], 1.0))
    assert arrivals == [12.0, 14.0, 16.0, 18.0], "two seconds each, the latency only before the first"
    with pytest.raises(ValueError, match="burst_credit_s must be >= 0"):
        Network(2, AlphaBeta(), burst_credit_s=-1.0)


def test_the_backends_all_reduce_may_be_slower() -> None:
    network, costs = Network(4, AlphaBeta(0.25, 0.01)), Costs(all_reduce=1.5)
    assert simulate(Ddp(), one_tensor(), network, costs).step_s == pytest.approx(3.5 + 6 * (0.25 + 0.375))
    assert simulate(Dear(), one_tensor(), network, costs) == simulate(Dear(), one_tensor(), network)


def test_hooks_take_their_time() -> None:
    step = one_tensor()
    for strategy in (Ddp(), Dear(), Dear("replicated"), SparDL()):
        plain = simulate(strategy, step, Network(2, AlphaBeta())).step_s
        crowded = simulate(strategy, step, Network(2, AlphaBeta()), Costs(python=1e5)).step_s
        assert 0.3 < crowded - plain < 4


@given(layers, st.integers(1, 9), st.sampled_from([0.0, 0.25]), st.sampled_from(DENSE))
@settings(max_examples=80, deadline=None)
def test_nothing_is_faster_than_possible(
    drawn: list[tuple[int, int, int]], workers: int, alpha_s: float, strategy: Strategy
) -> None:
    check_step(drawn, workers, alpha_s, strategy)


@pytest.mark.parametrize("strategy", [*DENSE, Dear(wire="int8"), Quantized(), SparDL()], ids=lambda each: each.name)
def test_without_a_network_computing_is_left(strategy: Strategy) -> None:
    check_computing_is_left(strategy)


# -- wrong arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Network, 0, COST), "workers must be >= 1, got 0"),
        (partial(Network, 6, COST, 4, COST), "node_size must divide 6 workers, got 4"),
        (partial(Network, 6, COST, 2), "inside is the link within a node"),
        (partial(link_of, 0.0), "must be > 0 Gbit/s, got 0"),
        (partial(StepProfile, (TensorUse("w", 4, 2.0, 0.0),), 1.0, 1.0), "w is read 2.0 s into a forward of 1.0 s"),
        (partial(StepProfile, (), -1.0, 1.0), "forward_s must be >= 0 seconds, got -1"),
        (partial(simulate, SparDL(), one_tensor(), Network(4, COST, 2, COST)), "on one level only"),
    ],
)
def test_wrong_arguments_are_refused(make: partial[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
