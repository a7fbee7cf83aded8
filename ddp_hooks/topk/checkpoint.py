"""What a worker keeps, as plain tensors and numbers, for as many workers as there were or for another number.

Residuals and velocities belong to parameters, in their shapes. Everything else only matters for ending in the same
bits: the order of the parameters in groups, what algorithms remember, and which of them were chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import in_order_of, is_dense, shaped_like
from ddp_hooks.topk.groups import GradientGroup, Kept

_KINDS: tuple[Kept, ...] = ("residual", "velocity")


def kept_by_name(
    groups: Sequence[GradientGroup], parameters: Sequence[Tensor], names: Sequence[str]
) -> dict[str, dict[str, Tensor]]:
    """Copies of what is kept, by kind and name, in the shapes of the parameters."""
    result: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
    for group in groups:
        for kind, kept in group.kept().items():
            for index, values in kept.items():
                like = parameters[index]
                shaped = shaped_like(like, values) if is_dense(like) else values.view(like.shape).clone()
                result[kind][names[index]] = shaped
    return result


def restore(
    groups: Sequence[GradientGroup],
    parameters: Sequence[Tensor],
    names: Sequence[str],
    mine: Sequence[Mapping[str, Any]],
    everyones: Sequence[Mapping[str, Any]],
) -> None:
    """Let groups keep the sums of what some workers have saved; nothing is left of what they kept before.

    Args:
        groups, parameters, names: of this worker.
        mine: the states that it takes over.
        everyones: all states: a group that has a residual on one worker has one on all of them.
    """
    group_of = {index: group for group in groups for index in (*group.offsets, *group.dense_offsets)}
    for group in groups:
        group.residual = None
        for vector in (group.velocity, group.dense_velocity):
            if vector is not None:
                vector.zero_()
    for index, (name, like) in enumerate(zip(names, parameters, strict=True)):
        group = group_of[index]
        if any(name in state["residual"] for state in everyones):
            group.opened()
        for kind in _KINDS:
            found = [state[kind][name] for state in mine if name in state[kind]]
            if found:
                total = found[0].clone()
                for other in found[1:]:
                    total += other
                group.keep(kind, index, in_order_of(total, like) if is_dense(like) else total.contiguous().view(-1))


def find_problem(
    saved: Sequence[Mapping[str, Any]],
    own_rank: int | None,
    world_size: int,
    shapes: Mapping[str, torch.Size],
    dense: Collection[str],
) -> str | None:
    """Why these states cannot be loaded, with a remedy; None if they can.

    Args:
        saved: what is to be loaded.
        own_rank: if it is this rank's own state; None: if it is those of all ranks.
        world_size: the number of ranks now.
        shapes: of the parameters, by name.
        dense: names of those that are summed in full now.
    """
    if not saved:
        return "there is no state to load"
    for state in saved:
        missing = {"rank", "world_size", "step", "num_skipped", "order", "chosen", "memories", *_KINDS} - set(state)
        if missing:
            return f"this is no state of TopKState: it lacks {sorted(missing)}"
        if state["order"] is not None and set(state["order"]) != set(shapes):
            differing = sorted(set(state["order"]) ^ set(shapes))
            return f"the state is of other parameters: {differing[0]} is trained only before or only now"
        for kind in _KINDS:
            for name, values in state[kind].items():
                if name not in shapes:
                    return f"the state has a {kind} of {name}, which the model has not"
                if values.shape != shapes[name]:
                    return f"the {kind} of {name} has shape {tuple(values.shape)}, the parameter {tuple(shapes[name])}"
                if kind == "residual" and name in dense:
                    return f"{name} is summed in full now, and its residual would be lost: keep dense_below_numel"
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
