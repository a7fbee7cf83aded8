"""One agreement of many ranks, as the code itself takes it on the fabric, and as formulas say.

The generators are those that run between processes. On the fabric a message takes ``alpha_s``, and whoever receives it
takes ``handling_s`` for it, one after the other; bytes are counted, and cost nothing there, since the fabric knows no
congestion where many ranks send to one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddp_hooks.comm import AlphaBeta, num_rounds, run_on_fabric
from ddp_hooks.coordination.negotiation.cache import ResponseCache
from ddp_hooks.coordination.negotiation.messages import children_of
from ddp_hooks.coordination.negotiation.negotiator import CycleInput, CycleResult, Negotiator
from ddp_hooks.coordination.request import Request, TensorSpec
from recipes.paper.strategies.horovod import Agreement, Horovod

NEGOTIATED = ("coordinator", "hierarchical", "bitvector")
FAN_OUT = 2
CAPACITY = 1024
_OF_PLANNER: dict[str, Agreement] = {"coordinator": "coordinator", "hierarchical": "tree", "bitvector": "bitvector"}


@dataclass(frozen=True)
class Costs:
    """Of messages on the fabric.

    Args:
        alpha_s: seconds from a message's start to its arrival.
        handling_s: seconds that its receiver takes for it.
    """

    alpha_s: float = 5e-6
    handling_s: float = Horovod.message_s


class OnFabric(NamedTuple):
    """What one agreement took: seconds of the last rank, and the most bytes that any rank sent or received."""

    seconds: float
    sent_bytes: int
    received_bytes: int


def sweep(
    variants: Sequence[str], counts: Sequence[int], num_tensors: int, costs: Costs, negotiated_up_to: int
) -> list[dict[str, object]]:
    """Every variant with every number of ranks: on the fabric where that is not too large, and by both formulas."""
    points: list[dict[str, object]] = []
    for variant in variants:
        for ranks in counts:
            found = None
            if variant == "bitvector" or ranks <= negotiated_up_to:
                found = agree_on_fabric(variant, ranks, num_tensors, costs)
            points.append({
                "variant": variant,
                "ranks": ranks,
                "fabric": None if found is None else found._asdict(),
                "formula_s": formula_s(variant, ranks, costs),
                "planner_s": planner_s(variant, ranks, costs),
            })  # fmt: skip
            source = "by formula" if found is None else "on the fabric"
            seconds = points[-1]["formula_s"] if found is None else found.seconds
            print(f"{variant}, {ranks} ranks: {seconds:.6f} s per agreement {source}", file=sys.stderr, flush=True)
    return points


def agree_on_fabric(variant: str, ranks: int, num_tensors: int, costs: Costs) -> OnFabric:
    """One cycle in which all ranks ask for the same tensors, and all of them become ready.

    With a response cache it is one in steady state: all are known. Caches are the same on every rank then, and so are
    their changes, so that one serves all ranks here.
    """
    requests = [_request(f"layers.{index}.weight") for index in range(num_tensors)]
    cache = ResponseCache(CAPACITY if variant == "bitvector" else 0)
    for request in requests:
        cache.put(request)
    fan_out = FAN_OUT if variant == "hierarchical" else None
    negotiators = [Negotiator(rank, range(ranks), CAPACITY, fan_out) for rank in range(ranks)]
    for negotiator in negotiators:
        negotiator.cache = cache
    situation = CycleInput({request.name: request for request in requests})
    outcomes = [CycleResult() for _ in negotiators]
    cycles = [each.cycle(situation, outcome) for each, outcome in zip(negotiators, outcomes, strict=True)]
    traffic = run_on_fabric(cycles, AlphaBeta(costs.alpha_s), costs.handling_s)
    assert all(outcome.ready == requests for outcome in outcomes)
    return OnFabric(
        max(each.clock_s for each in traffic),
        max(each.sent_bytes for each in traffic),
        max(each.received_bytes for each in traffic),
    )


def formula_s(variant: str, ranks: int, costs: Costs) -> float:
    """Seconds of the same agreement: exact, as a test shows, but needs no ranks."""
    one_s, two_s = costs.alpha_s + costs.handling_s, costs.alpha_s + 2 * costs.handling_s
    vector_s = num_rounds(ranks) * one_s
    if variant == "bitvector" or ranks == 1:
        return vector_s
    width = FAN_OUT if variant == "hierarchical" else ranks - 1
    longest_path = max(rank.bit_count() for rank in range(ranks))  # of a binomial tree
    # The first child's subtree is never smaller than the others', so that it is heard last.
    gathered_s, rank, path = 0.0, 0, list[int]()
    while len(children := children_of(rank, ranks, width)):
        path.append(len(children))
        rank = children[0]
    for num_children in reversed(path):
        gathered_s += costs.alpha_s + 2 * num_children * costs.handling_s  # a length and a message of each
    return vector_s + gathered_s + longest_path * two_s


def planner_s(variant: str, ranks: int, costs: Costs) -> float:
    """What the simulator expects, of Horovod as the paper describes it."""
    horovod = Horovod(agreement=_OF_PLANNER[variant], message_s=costs.handling_s, fan_out=FAN_OUT)
    return horovod.agreement_on(ranks, costs.alpha_s)


def _request(name: str) -> Request:
    return Request(name, "all_reduce", (TensorSpec(name, (16,), "torch.float32"),))
