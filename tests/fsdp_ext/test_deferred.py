"""When deferred reduce-scatters are delivered, with work that is done when the test says so.

Prevents: gradients that look like gradients before they have come; deliveries that nobody makes after a backward that
failed; more memory kept than was allowed.
"""

from __future__ import annotations

import pytest
import torch

from ddp_hooks.comm import LaneError, Recorder, Stall
from fsdp_ext.deferred import PendingReductions
from tests.support.fsdp_ext.deferred import Reduction, backward, pending


def test_delivered_when_the_backward_ends() -> None:
    waiting, first, second, seen = pending(), Reduction(1), Reduction(2), list[bool]()
    backward(
        lambda: waiting.defer(first.delivery),
        lambda: waiting.defer(second.delivery),
        lambda: seen.append(first.missing and second.missing and len(waiting) == 2),
    )
    assert seen == [True] and first.delivered and second.delivered and len(waiting) == 0


def test_what_has_come_is_delivered_at_the_next_one() -> None:
    waiting, first, second, seen = pending(), Reduction(1), Reduction(2), list[bool]()
    backward(
        lambda: waiting.defer(first.delivery),
        first.wait,
        lambda: waiting.make_room(16),
        lambda: waiting.defer(second.delivery),
        lambda: seen.append(first.delivered and second.missing and len(waiting) == 1),
    )
    assert seen == [True] and second.delivered


@pytest.mark.parametrize(("limit_bytes", "kept"), [(None, 3), (48, 3), (47, 2), (16, 1), (1, 1)])
def test_the_oldest_is_waited_for_when_too_much_is_kept(limit_bytes: int | None, kept: int) -> None:
    waiting, reductions, seen = pending(limit_bytes), [Reduction(i) for i in (1, 2, 3)], list[bool]()

    def defer(each: Reduction) -> None:
        waiting.make_room(each.delivery.nbytes)
        waiting.defer(each.delivery)

    def look() -> None:
        seen.extend(each.missing for each in reductions)

    backward(*(lambda each=each: defer(each) for each in reductions), look)
    assert seen == [False] * (3 - kept) + [True] * kept
    assert all(each.delivered for each in reductions)


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_sums_are_divided_when_they_have_come(fails: bool) -> None:
    waiting, reduction = pending(), Reduction(6)
    parameter = torch.nn.Parameter(torch.zeros(4))

    def defer() -> None:
        waiting.defer(reduction.delivery._replace(parameters=(parameter,), divisor=4.0))
        parameter.grad = reduction.output.view(4)

    if fails:
        with pytest.raises(ZeroDivisionError):
            backward(defer, fail)
        waiting.drop()
    else:
        backward(defer)
    assert parameter.grad is not None and parameter.grad.tolist() == [1.5] * 4


class Lost(Reduction):
    """One that another rank never came to."""

    def wait(self) -> None:
        raise LaneError("on purpose")


@pytest.mark.parametrize("kind", [Reduction, Lost])
def test_what_a_backward_that_fails_has_reduced(kind: type[Reduction]) -> None:
    waiting, first, second = pending(), kind(1), Reduction(2)
    parameter = torch.nn.Parameter(torch.zeros(4))

    def defer() -> None:
        waiting.defer(first.delivery._replace(parameters=(parameter,)))
        parameter.grad = first.output.view(4)

    with pytest.raises(ZeroDivisionError):
        backward(defer, fail)
    assert first.missing and len(waiting) == 1
    backward(lambda: waiting.flush_owner("second"), lambda: waiting.defer(second.delivery))
    assert second.delivered and len(waiting) == 0
    if kind is Lost:
        assert parameter.grad is None
    else:
        assert parameter.grad is not None and parameter.grad.tolist() == [1, 1, 1, 1]


def test_a_reduction_that_fails_when_the_backward_ends() -> None:
    waiting, lost = pending(), Lost(1)
    parameter, earlier = torch.nn.Parameter(torch.zeros(4)), torch.full((4,), 3.0)

    def defer() -> None:
        waiting.defer(lost.delivery._replace(saved={parameter: earlier}))
        parameter.grad = lost.output.view(4)

    with pytest.raises(LaneError, match="on purpose"):
        backward(defer)
    waiting.drop()
    assert parameter.grad is not None and parameter.grad.tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("kind", "zeroed", "expected"),
    [
        (Reduction, False, [2, 3, 4, 5]),
        (Reduction, True, [0, 0, 0, 0]),
        (Lost, False, [0, 1, 2, 3]),
        (Lost, True, [0, 0, 0, 0]),
    ],
)
def test_gradients_of_before_a_backward_that_fails(kind: type[Reduction], zeroed: bool, expected: list[float]) -> None:
    waiting, reduction = pending(), kind(2)
    parameter, earlier = torch.nn.Parameter(torch.zeros(4)), torch.arange(4.0)

    def defer() -> None:
        waiting.defer(reduction.delivery._replace(saved={parameter: earlier}))
        parameter.grad = reduction.output.view(4)

    with pytest.raises(ZeroDivisionError):
        backward(defer, fail)
    if zeroed:
        assert parameter.grad is not None
        parameter.grad.zero_()
    waiting.drop()
    assert parameter.grad is not None and len(waiting) == 0
    assert parameter.grad.tolist() == expected


def test_two_reductions_of_one_module_add_up() -> None:
    waiting, first, second = pending(), Reduction(1), Reduction(2)
    parameter, earlier = torch.nn.Parameter(torch.zeros(4)), torch.arange(4.0)
    parameter.grad = earlier

    def defer(reduction: Reduction) -> None:
        waiting.flush_owner("module")
        assert parameter.grad is not None
        waiting.defer(reduction.delivery._replace(owner="module", saved={parameter: parameter.grad}))
        parameter.grad = reduction.output.view(4)

    backward(lambda: defer(first), lambda: defer(second))
    assert parameter.grad is earlier and earlier.tolist() == [3, 4, 5, 6]


def test_who_changes_a_gradient_too_early_hears_of_it() -> None:
    waiting, reduction = pending(), Reduction(2)
    with pytest.raises(RuntimeError, match=r"a gradient of reduction 2 was changed inside of the backward"):
        backward(lambda: waiting.defer(reduction.delivery), lambda: reduction.output.view(2, 2).clamp_(-1, 1))


def test_backwards_inside_of_each_other_deliver_their_own() -> None:
    waiting, inner, outer, seen = pending(), Reduction(1), Reduction(2), list[bool]()
    backward(
        lambda: backward(lambda: waiting.defer(inner.delivery)),
        lambda: seen.append(inner.delivered),
        lambda: waiting.defer(outer.delivery),
    )
    assert seen == [True] and outer.delivered


def test_one_that_has_come_waits_until_gradients_are_made_of_it() -> None:
    waiting, reduction, seen = pending(), Reduction(1), list[bool]()
    reduction.done = True
    backward(lambda: waiting.defer(reduction.delivery), lambda: seen.append(reduction.missing and len(waiting) == 1))
    assert seen == [True] and reduction.delivered


@pytest.mark.parametrize("end", ["as FSDP2", "zeroed", "replaced"])
def test_gradients_that_were_there_are_added_to(end: str) -> None:
    waiting, reduction = pending(), Reduction(2)
    parameter, earlier, replacement = torch.nn.Parameter(torch.zeros(4)), torch.arange(4.0), torch.full((4,), 9.0)

    def defer() -> None:
        waiting.defer(reduction.delivery._replace(saved={parameter: earlier}))
        parameter.grad = {"as FSDP2": reduction.output.view(4), "zeroed": None, "replaced": replacement}[end]

    backward(defer)
    assert parameter.grad is {"as FSDP2": earlier, "zeroed": None, "replaced": replacement}[end]
    assert earlier.tolist() == ([2, 3, 4, 5] if end == "as FSDP2" else [0, 1, 2, 3])
    assert replacement.tolist() == [9, 9, 9, 9]


def test_waits_are_counted() -> None:
    stall, recorder = Stall(), Recorder(enabled=True)
    waiting = PendingReductions(None, stall, recorder)
    backward(lambda: waiting.defer(Reduction(1).delivery))
    assert stall.seconds > 0 and [span.name for span in recorder.snapshot()] == ["reduction 1"]


def test_only_inside_of_a_backward() -> None:
    with pytest.raises(RuntimeError, match="backward"):
        pending().defer(Reduction(1).delivery)
