"""States that every rank saves for itself: which of them may be loaded, and how several become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def find_problem_of_ranks(saved: Sequence[Mapping[str, Any]], own_rank: int | None, world_size: int) -> str | None:
    """Return the reason why states with a rank, a world size and a step cannot be loaded; None if they can.

    With ``own_rank`` there is one state, which goes on here; without, they are those of all former ranks.
    """
    if not saved:
        return "there is no state to load"
    before, ranks = saved[0]["world_size"], [state["rank"] for state in saved]
    if own_rank is not None:
        if before != world_size:
            return (
                f"the state was saved by one of {before} ranks, and there are {world_size} now: pass the states of all "
                f"of them, as a list, on every rank"
            )
        return None if ranks == [own_rank] else f"rank {own_rank} was given the state of rank {ranks[0]}"
    if sorted(ranks) != list(range(before)):
        return f"the states of all {before} ranks are needed, each once, got those of {sorted(ranks)}"
    if len({state["step"] for state in saved}) > 1:
        return f"the states are of different steps, {sorted({state['step'] for state in saved})}"
    return None


def find_problem_of_shapes(kind: str, values: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> str | None:
    """Return the first of ``values`` that the model's parameters, ``shapes`` by name, have no place for."""
    for name, each in values.items():
        if name not in shapes:
            return f"the state has a {kind} of {name}, which the model has not"
        if each.shape != shapes[name]:
            return f"the {kind} of {name} has shape {tuple(each.shape)}, the parameter {tuple(shapes[name])}"
    return None


def sum_by_name(states: Sequence[Mapping[str, Any]], kind: str, world_size: int) -> dict[str, Tensor]:
    """Return the sums of ``state[kind]`` by name, which some of the states may lack, for ``world_size`` ranks.

    Sums become means by division by the number of ranks. So sums of P ranks are multiplied by ``world_size / P``, and
    the mean stays equal. Tensors that need no change are no copies.
    """
    total: dict[str, Tensor] = {}
    for state in states:
        for name, values in state[kind].items():
            total[name] = total[name] + values if name in total else values
    factor = world_size / states[0]["world_size"] if states else 1.0
    return total if factor == 1.0 else {name: values * factor for name, values in total.items()}
