"""Where a search begins: not with sizes that cost latency, not with sizes that cost overlap, and within its range."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_hooks import BucketTuner
from ddp_hooks.comm import AlphaBeta, mebibytes
from ddp_hooks.planning import Dear, Network, StepProfile, predicted_start, simulate
from ddp_hooks.planning.atoms import tuned_atom_bytes
from recipes.benchmarks.workloads import profile_of_layers

NUM_LAYERS, LAYER_BYTES = 64, 1 << 20


def step_of(layer_s: float) -> StepProfile:
    layers = [(layer_s, 2 * layer_s, [i]) for i in range(NUM_LAYERS)]
    return profile_of_layers(layers, [f"layer {i}" for i in range(NUM_LAYERS)], [LAYER_BYTES] * NUM_LAYERS)


def step_s(step: StepProfile, network: Network, tuner: BucketTuner, mb: float) -> float:
    return simulate(Dear(tuner=tuner, fusion_mb=mb), step, network).step_s


@pytest.mark.parametrize("alpha_s", [0.0, 3e-3, 60e-3])
def test_the_start_is_as_fast_as_any_size_of_a_grid(alpha_s: float) -> None:
    step, network = step_of(2e-3), Network(4, AlphaBeta(alpha_s, 1 / 125e6))
    tuner = BucketTuner()
    start = predicted_start(tuner, step, network)
    found_s = step_s(step, network, tuner, start.start_mb)
    # Sizes a fifth apart are simulated, so one in between may be a little faster.
    assert found_s <= 1.02 * min(step_s(step, network, tuner, mb) for mb in (1, 2, 4, 8, 16, 32, 64, 100))
    assert replace(start, start_mb=tuner.start_mb) == tuner, "nothing else of the tuner changes"


def test_latency_asks_for_large_groups_and_overlap_for_small_ones() -> None:
    step, tuner = step_of(2e-3), BucketTuner()
    starts = [
        predicted_start(tuner, step, Network(4, AlphaBeta(alpha_s, 1 / 125e6))).start_mb for alpha_s in (0.0, 60e-3)
    ]
    assert starts[0] < 5 < starts[1]


def test_of_sizes_that_are_as_fast_the_middle_one_is_taken() -> None:
    alone = predicted_start(BucketTuner(), step_of(1e-3), Network(1, AlphaBeta(0.0, 1e-9)))
    assert alone.start_mb == pytest.approx(10.0, rel=0.25), "one worker sends nothing: every size is as good"


def test_the_start_stays_within_the_tuners_range() -> None:
    tuner = BucketTuner(low_mb=3.0, high_mb=7.0, start_mb=5.0)
    for alpha_s in (0.0, 0.1):
        start = predicted_start(tuner, step_of(1e-3), Network(4, AlphaBeta(alpha_s, 1 / 125e6)))
        assert 3.0 <= start.start_mb <= 7.0


def test_a_tuner_gets_atoms_that_leave_a_choice() -> None:
    large, model = mebibytes(16), mebibytes(640)
    assert tuned_atom_bytes(large, model, 4, mebibytes(1)) == mebibytes(10)
    assert tuned_atom_bytes(large, model, 24, mebibytes(1)) == mebibytes(12), "messages of 512 KiB, at least"
    assert tuned_atom_bytes(large, model, 64, mebibytes(1)) == large, "never larger than without a tuner"
    assert tuned_atom_bytes(large, model, 2, mebibytes(12)) == mebibytes(12), "nor smaller than what it may try"


def test_groups_are_of_whole_atoms() -> None:
    step, network = step_of(1e-3), Network(2, AlphaBeta(1e-4, 1 / 125e6))
    labels = {
        mb: {span.name for span in simulate(Dear(tuner=BucketTuner(), fusion_mb=mb), step, network).spans}
        for mb in (1.0, 4.0, 100.0)
    }
    scatters = {mb: sum("reduce-scatter of group" in name for name in names) for mb, names in labels.items()}
    assert scatters[1.0] > scatters[4.0] > scatters[100.0] >= 1
    assert scatters[1.0] <= NUM_LAYERS
