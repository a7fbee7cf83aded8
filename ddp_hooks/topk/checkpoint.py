"""Residuals and velocities as plain tensors, saved by parameter name, for the same or another number of ranks.

The other entries of a state (order of the groups, memory and choice of algorithms) only matter for the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ddp_hooks.comm import (
    find_problem_of_ranks,
    find_problem_of_shapes,
    in_order_of,
    is_dense,
    shaped_like,
    sum_by_name,
)
from ddp_hooks.topk.reduction.groups import Context, GradientGroup, Kept

_KINDS: tuple[Kept, ...] = ("residual", "velocity")
_SAME_ON_EVERY_RANK = ("step", "order", "chosen", "group_mb", "tuned")


def kept_by_name(groups: Sequence[GradientGroup], context: Context) -> dict[str, dict[str, Tensor]]:
    """Return copies of residuals and velocities, by kind and name, in the shapes of the parameters."""
    result: dict[str, dict[str, Tensor]] = {kind: {} for kind in _KINDS}
    for group in groups:
        for kind, kept in group.kept().items():
            for piece, own in kept.items():
                like, values = context.parameters[piece.parameter], own
                if own.numel() < like.numel():  # zeros where other local ranks have residuals
                    values = own.new_zeros(like.numel())
                    values[piece.start : piece.end] = own
                shaped = shaped_like(like, values) if is_dense(like) else values.view(like.shape).clone()
                result[kind][context.names[piece.parameter]] = shaped
    return result


def restore(
    groups: Sequence[GradientGroup],
    context: Context,
    mine: Sequence[Mapping[str, Any]],
    everyones: Sequence[Mapping[str, Any]],
) -> None:
    """Replace residuals and velocities by the sums of the states ``mine``, in the unit of as many ranks as there are.

    Velocities have the residuals' unit: the mean's momentum is the mean over ranks of what each adds to its residual.
    """
    for group in groups:
        group.clear()
    total = {kind: sum_by_name(mine, kind, context.lanes.world_size) for kind in _KINDS}
    group_of = {piece: each for each in groups for piece in each.own_pieces}
    for piece, group in group_of.items():
        name, like = context.names[piece.parameter], context.parameters[piece.parameter]
        if any(name in state["residual"] for state in everyones):  # a group has one on all ranks or on none
            group.ensure_residual()
        for kind in _KINDS:
            if name in total[kind]:
                values = total[kind][name]
                values = in_order_of(values, like) if is_dense(like) else values.contiguous().view(-1)
                group.keep(kind, piece, values[piece.start : piece.end])


def fingerprint(saved: Mapping[str, Any], own: bool) -> dict[str, Any]:
    """Return the entries that are the same in the states of all ranks, by name."""
    entries = {key: saved[key] for key in _SAME_ON_EVERY_RANK}
    return entries | {"what is loaded": "this rank's own state" if own else "a list of states"}


def find_problem(saved: Sequence[Mapping[str, Any]], own: bool, context: Context) -> str | None:
    """Return the reason why this rank's ``own`` state, or those of all ranks, cannot be loaded, None if they can."""
    nodes = context.lanes.nodes
    problem = next((found for state in saved if (found := _problem_of_content(state, context))), None)
    problem = problem or find_problem_of_ranks(saved, nodes.rank if own else None, nodes.world_size)
    if problem is None and own and (size := saved[0].get("node_size", 1)) != nodes.size:
        return (
            f"the state was saved with {size} ranks per node, and there are {nodes.size} now: pass the states of all "
            f"ranks, as a list, on every rank"
        )
    return problem


def _problem_of_content(state: Mapping[str, Any], context: Context) -> str | None:
    shapes = {name: p.shape for name, p in zip(context.names, context.parameters, strict=True)}
    missing = {"rank", "world_size", "num_skipped", "memories", *_SAME_ON_EVERY_RANK, *_KINDS} - set(state)
    if missing:
        return f"this is no state of TopKState: it lacks {sorted(missing)}"
    if state["order"] is not None and set(state["order"]) != set(shapes):
        differing = sorted(set(state["order"]) ^ set(shapes))
        return f"the state is of other parameters: {differing[0]} is trained only before or only now"
    for kind in _KINDS:
        if problem := find_problem_of_shapes(kind, state[kind], shapes):
            return problem
    for name, values in state["residual"].items():
        if values.numel() < context.config.dense_below_numel:
            return f"{name} is summed in full now, and its residual would be lost: keep dense_below_numel"
    return None
