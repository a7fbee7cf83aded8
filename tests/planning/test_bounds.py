"""Bounds that no schedule can pass: by hand, and against every schedule there is."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hooks.planning import StepProfile
from ddp_hooks.planning.step import collective_s, dependency_bound_s
from recipes.benchmarks import workloads
from recipes.benchmarks.workloads import profile_of_layers
from recipes.paper.bounds import dear_bound_s

GBIT = 1e9 / 8  # bytes per second


def step_of(*layers: tuple[float, float, tuple[int, ...]], num_bytes: tuple[int, ...]) -> StepProfile:
    return profile_of_layers(layers, [f"tensor {i}" for i in range(len(num_bytes))], num_bytes)


def test_collective_moves_all_but_its_own_part() -> None:
    assert collective_s(400, workers=4, bytes_per_s=100) == 3.0
    assert collective_s(400, workers=1, bytes_per_s=100) == 0.0


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
    assert dependency_bound_s(step, 2, 1.0) == expected_s
    assert dependency_bound_s(step, 2, 1.0, gathers_wait_for_step=True) == expected_one_step_s


small_steps = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 2)), min_size=1, max_size=3).map(
    lambda layers: step_of(
        *((forward, backward, (index,)) for index, (forward, backward, _) in enumerate(layers)),
        num_bytes=tuple(2 * size for _, _, size in layers),
    )
)


@given(step=small_steps, one_step=st.booleans())
def test_dependency_bound_equals_exhaustive_search(step: StepProfile, one_step: bool) -> None:
    found = dependency_bound_s(step, 2, 1.0, gathers_wait_for_step=one_step)
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
    link_s = 2 * collective_s(step.num_bytes, 4, bytes_per_s)
    any_schedule = dependency_bound_s(step, 4, bytes_per_s)
    one_step = dependency_bound_s(step, 4, bytes_per_s, gathers_wait_for_step=True)
    eq7 = dear_bound_s(step.forward_s, step.backward_s, link_s / 2, link_s / 2)
    assert max(link_s, step.compute_s) <= any_schedule + 1e-9
    assert any_schedule <= one_step + 1e-9
    assert eq7 <= one_step + 1e-9
    assert one_step <= link_s + step.compute_s + 1e-9


@pytest.mark.quick("resnet50", "llama")
@pytest.mark.parametrize("model", workloads.NAMES)
def test_infinite_network_leaves_compute(model: str) -> None:
    workload = workloads.load(model)
    found = dependency_bound_s(workload.step_profile(slow=3), 4, float("inf"))
    assert found == pytest.approx(3 * workload.compute_s)


def test_unread_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor 1 is read by no layer"):
        dependency_bound_s(step_of((1, 2, (0,)), num_bytes=(4, 4)), 2, 1.0)
