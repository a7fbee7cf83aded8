"""States of all former ranks, in one process, for other numbers of ranks and nodes.

Prevents: residuals or velocities that are paid in the unit of another number of ranks, or are taken over by nobody.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ddp_hooks import TopKConfig
from ddp_hooks.comm import Nodes, Recorder
from ddp_hooks.topk import checkpoint
from ddp_hooks.topk.reduction.groups import Context, GradientGroup, Members

SHAPES = {"weight": (5, 7), "bias": (3,)}
KINDS = ("residual", "velocity")


def rank_of(nodes: Nodes) -> tuple[Context, GradientGroup]:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    lanes: Any = SimpleNamespace(nodes=nodes, world_size=nodes.world_size)
    config, numels = TopKConfig(momentum=0.9), [p.numel() for p in parameters]
    context = Context(config, cast(Any, None), parameters, list(SHAPES), numels, lanes, None, Recorder(False))
    return context, GradientGroup.of(Members((1, 0), False), context)


def saved(context: Context, group: GradientGroup) -> dict[str, Any]:
    nodes = context.lanes.nodes
    return {"rank": nodes.rank, "world_size": nodes.world_size, **checkpoint.kept_by_name([group], context)}


def mean(states: list[dict[str, Any]], kind: str, name: str) -> Tensor:
    return torch.stack([state[kind][name].double() for state in states]).mean(0)


@pytest.mark.parametrize("before", [(1, 1), (2, 1), (3, 1), (4, 2), (6, 3)], ids=str)
@pytest.mark.parametrize("after", [(1, 1), (2, 1), (5, 1), (4, 1), (4, 2), (6, 2)], ids=str)
def test_the_mean_owes_the_same(before: tuple[int, int], after: tuple[int, int]) -> None:
    """The residuals of all ranks, by their number, are what is missing of the mean gradients; velocities alike."""
    states = []
    for rank in range(before[0]):
        context, group = rank_of(Nodes(before[0], rank, before[1]))
        group.residual, group.velocity = torch.randn(2, group.own_numel)
        states.append(saved(context, group))
    found = []
    for rank in range(after[0]):
        nodes = Nodes(after[0], rank, after[1])
        context, group = rank_of(nodes)
        mine = [state for state in states if state["rank"] % nodes.num_nodes == nodes.node]
        checkpoint.restore([group], context, mine, states)
        found.append(saved(context, group))
    for kind in KINDS:
        for name in SHAPES:
            torch.testing.assert_close(mean(found, kind, name), mean(states, kind, name), rtol=0, atol=1e-6)
