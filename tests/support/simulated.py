"""Steps for the simulator, and what holds for every strategy on them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planning import Network, StepProfile, Strategy, simulate
from recipes.benchmarks.workloads import profile_of_layers

layers = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=6)
"""Of a few layers: seconds of forward and backward, and size."""


def one_tensor(num_bytes: int = 100) -> StepProfile:
    return profile_of_layers([(1.0, 2.0, [0])], ["weight"], [num_bytes], optimizer_s=0.5)


def check_step(drawn: list[tuple[int, int, int]], workers: int, alpha_s: float, strategy: Strategy) -> None:
    """No step is faster than possible, everything is sent once, and the training thread does one thing at a time."""
    step = profile_of_layers(
        [(float(f), float(b), [i]) for i, (f, b, _) in enumerate(drawn)],
        [f"tensor {i}" for i in range(len(drawn))],
        [workers * size for *_, size in drawn],
    )
    predicted = simulate(strategy, step, Network(workers, AlphaBeta(alpha_s, 0.05)))
    assert predicted.step_s >= predicted.bound_s - 1e-6
    assert predicted.sent_bytes == pytest.approx(2 * (workers - 1) / workers * step.num_bytes)
    busy = [span for span in predicted.spans if not span.track.startswith("lane")]
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(busy)), "one thread, one thing"


def check_computing_is_left(strategy: Strategy) -> None:
    """Without a network, a step takes as long as computing."""
    step = profile_of_layers([(1.0, 2.0, [0]), (2.0, 3.0, [1])], ["a", "b"], [400, 4000])
    for network in (Network(4, AlphaBeta()), Network(1, AlphaBeta(1.0, 1.0))):
        assert simulate(strategy, step, network).step_s == pytest.approx(8.0, rel=1e-3)
