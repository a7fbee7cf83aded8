"""Bounds that no schedule can pass: by hand, and against every schedule there is."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hooks.planning import StepProfile, bounds, profile_of_layers
from recipes.benchmarks import workloads
from recipes.benchmarks.results import bounds_of

GBIT = 1e9 / 8  # bytes per second


def step_of(*layers: tuple[float, float, tuple[int, ...]], num_bytes: tuple[int, ...]) -> StepProfile:
    return profile_of_layers(layers, [f"tensor {i}" for i in range(len(num_bytes))], num_bytes)


def test_collective_moves_all_but_its_own_part() -> None:
    assert bounds.collective_s(400, workers=4, bytes_per_s=100) == 3.0
    assert bounds.collective_s(400, workers=1, bytes_per_s=100) == 0.0


@given(forward_s=st.floats(0.01, 10), gather_s=st.floats(0.01, 100))
def test_gain_over_all_reduce_is_equation_9(forward_s: float, gather_s: float) -> None:
    baseline = bounds.baseline_bound_s(forward_s, 2 * forward_s, 2 * gather_s)
    dear = bounds.dear_bound_s(forward_s, 2 * forward_s, gather_s, gather_s)
    if gather_s <= forward_s:
        gain = 0.0
    elif gather_s <= 2 * forward_s:
        gain = gather_s - forward_s
    else:
        gain = forward_s
    assert baseline - dear == pytest.approx(gain, abs=1e-9)


@pytest.mark.quick("resnet50-*", "bert-*")
@pytest.mark.parametrize(
    ("model", "speedup", "million_parameters"),
    [("resnet50", 61.6, 25.6), ("densenet201", 64, 20.0), ("bert", 25.5, 110.1)],
)
def test_compute_times_follow_from_table_2(model: str, speedup: float, million_parameters: float) -> None:
    half_s = million_parameters * 4e6 / (10 * GBIT)
    compute_s = bounds.compute_from_max_speedup(speedup, 64, half_s)
    assert workloads.load(model).compute_s == pytest.approx(compute_s, abs=0.0005)


@given(compute_s=st.floats(0.01, 10), half_s=st.floats(0.01, 10), workers=st.integers(2, 64))
def test_equation_6_inverts(compute_s: float, half_s: float, workers: int) -> None:
    speedup = bounds.max_speedup(compute_s, workers, half_s)
    found_s = bounds.compute_from_max_speedup(min(speedup, workers), workers, half_s)
    if speedup < workers * (1 - 1e-9):
        assert found_s == pytest.approx(compute_s, rel=1e-6)
    else:  # everything hidden: only a lower bound is known
        assert found_s <= compute_s * (1 + 1e-6)


def test_impossible_speedup_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(0, 4\], got 5"):
        bounds.compute_from_max_speedup(5, 4, 1.0)


# Two workers at 1 byte/s: a tensor of 2 n bytes takes n seconds per reduce-scatter or gather.
@pytest.mark.parametrize(
    ("step", "expected_s", "expected_one_step_s"),
    [
        # One layer: backward 2, reduce-scatter 3, gather 3, forward 1, all in a row.
        (step_of((1, 2, (0,)), num_bytes=(6,)), 9, 9),
        # Second layer: gradient at 2, scattered by 5, gathered by 8, when the first layer's backward ends.
        # Then the first layer: scattered by 9, gathered by 10; both forwards by 12.
        # In one step: the second scattered by 5, the first by 9, gathered by 10 and 13, forwards by 14.
        (step_of((1, 6, (0,)), (1, 2, (1,)), num_bytes=(2, 6)), 12, 14),
        # Compute hides everything but the first layer's own reduce-scatter and gather.
        (step_of((5, 5, (0,)), (5, 5, (1,)), num_bytes=(2, 2)), 22, 22),
        # A tied tensor, read first and last, is complete only after the whole backward.
        (step_of((1, 2, (0,)), (1, 2, (0,)), num_bytes=(2,)), 8, 8),
        # No compute: the link's own time.
        (step_of((0, 0, (0,)), (0, 0, (1,)), num_bytes=(4, 8)), 12, 12),
    ],
)
def test_dependency_bound_by_hand(step: StepProfile, expected_s: float, expected_one_step_s: float) -> None:
    assert bounds.dependency_bound_s(step, 2, 1.0) == expected_s
    assert bounds.dependency_bound_s(step, 2, 1.0, gathers_wait_for_step=True) == expected_one_step_s


small_steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=3).map(
    lambda layers: step_of(
        *((forward, backward, (index,)) for index, (forward, backward, _) in enumerate(layers)),
        num_bytes=tuple(2 * size for _, _, size in layers),
    )
)


@given(step=small_steps, one_step=st.booleans())
def test_dependency_bound_equals_exhaustive_search(step: StepProfile, one_step: bool) -> None:
    found = bounds.dependency_bound_s(step, 2, 1.0, gathers_wait_for_step=one_step)
    assert found == best_of_all_schedules(step, one_step)


def best_of_all_schedules(step: StepProfile, one_step: bool) -> float:
    """The obvious twin: tries every way to use every second of the link. Two workers at 1 byte/s, whole seconds."""
    sizes = [tensor.num_bytes // 2 for tensor in step.tensors]
    ready_s = [tensor.ready_s for tensor in step.tensors]
    remaining_s = [step.forward_s - tensor.needed_s for tensor in step.tensors]

    @cache
    def best(now_s: int, scatters: tuple[int, ...], gathers: tuple[int, ...]) -> float:
        if not any(gathers):
            return step.compute_s
        ends = [float("inf")]
        idle = True
        for tensor in range(len(sizes)):
            if scatters[tensor] and ready_s[tensor] <= now_s:
                idle = False
                ends.append(best(now_s + 1, minus_one(scatters, tensor), gathers))
            elif gathers[tensor] and not (any(scatters) if one_step else scatters[tensor]):
                idle = False
                left = minus_one(gathers, tensor)
                end_s = 0 if left[tensor] else now_s + 1 + remaining_s[tensor]
                ends.append(max(end_s, best(now_s + 1, scatters, left)))
        return best(now_s + 1, scatters, gathers) if idle else min(ends)

    return best(0, tuple(sizes), tuple(sizes))


def minus_one(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*values[:index], values[index] - 1, *values[index + 1 :])


@pytest.mark.quick("*-resnet50")
@pytest.mark.parametrize("model", workloads.NAMES)
@pytest.mark.parametrize("bytes_per_s", [0.1 * GBIT, GBIT, 10 * GBIT])
def test_bounds_are_ordered(model: str, bytes_per_s: float) -> None:
    step = workloads.load(model).step_profile(slow=4)
    link_s = 2 * bounds.collective_s(step.num_bytes, 4, bytes_per_s)
    any_schedule = bounds.dependency_bound_s(step, 4, bytes_per_s)
    one_step = bounds.dependency_bound_s(step, 4, bytes_per_s, gathers_wait_for_step=True)
    eq7 = bounds.dear_bound_s(step.forward_s, step.backward_s, link_s / 2, link_s / 2)
    assert max(link_s, step.compute_s) <= any_schedule + 1e-9
    assert any_schedule <= one_step + 1e-9
    assert eq7 <= one_step + 1e-9
    assert one_step <= link_s + step.compute_s + 1e-9


@pytest.mark.quick("resnet50", "llama")
@pytest.mark.parametrize("model", workloads.NAMES)
def test_infinite_network_leaves_compute(model: str) -> None:
    workload = workloads.load(model)
    found = bounds.dependency_bound_s(workload.step_profile(slow=3), 4, float("inf"))
    assert found == pytest.approx(3 * workload.compute_s)


def test_resnet50_at_1_gbit_is_bound_by_its_link() -> None:
    found = bounds_of(workloads.load("resnet50"), slow=4, workers=4, link=GBIT, goodput=0.95 * GBIT)
    assert found.dependency == pytest.approx(1.23, abs=0.005)
    assert found.eq7 == pytest.approx(1.23, abs=0.005)
    assert found.dependency_goodput > found.dependency


def test_unread_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor 1 is read by no layer"):
        bounds.dependency_bound_s(step_of((1, 2, (0,)), num_bytes=(4, 4)), 2, 1.0)
