"""Residuals and velocities as plain tensors, saved by parameter name, for the same or another number of ranks.

The other entries of a state (order of the groups, memory and choice of algorithms) only matter for the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ddp_hooks.comm import in_order_of, is_dense, shaped_like
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
    """Replace residuals and velocities by the sums of the states ``mine``."""
    for group in groups:
        group.clear()
    group_of = {piece: each for each in groups for piece in each.own_pieces}
    for piece, group in group_of.items():
        name, like = context.names[piece.parameter], context.parameters[piece.parameter]
        if any(name in state["residual"] for state in everyones):  # a group has one on all ranks or on none
            group.ensure_residual()
        for kind in _KINDS:
            found = [state[kind][name] for state in mine if name in state[kind]]
            if found:
                total = found[0].clone()
                for other in found[1:]:
                    total += other
                values = in_order_of(total, like) if is_dense(like) else total.contiguous().view(-1)
                group.keep(kind, piece, values[piece.start : piece.end])


def fingerprint(saved: Mapping[str, Any], own: bool) -> dict[str, Any]:
    """Return the entries that are the same in the states of all ranks, by name."""
    entries = {key: saved[key] for key in _SAME_ON_EVERY_RANK}
    return entries | {"what is loaded": "this rank's own state" if own else "a list of states"}


def find_problem(saved: Sequence[Mapping[str, Any]], own: bool, context: Context) -> str | None:
    """Return the reason why this rank's ``own`` state, or those of all ranks, cannot be loaded, None if they can."""
    nodes = context.lanes.nodes
    if not saved:
        return "there is no state to load"
    problem = next((found for state in saved if (found := _problem_of_content(state, context))), None)
    if problem is not None:
        return problem
    before, ranks = saved[0]["world_size"], [state["rank"] for state in saved]
    if own:
        if before != nodes.world_size:
            return (
                f"the state was saved by one of {before} ranks, and there are {nodes.world_size} now: pass the states "
                f"of all of them, as a list, on every rank"
            )
        size = saved[0].get("node_size", 1)
        if size != nodes.size:
            return (
                f"the state was saved with {size} ranks per node, and there are {nodes.size} now: pass the states of "
                f"all ranks, as a list, on every rank"
            )
        return None if ranks == [nodes.rank] else f"rank {nodes.rank} was given the state of rank {ranks[0]}"
    if sorted(ranks) != list(range(before)):
        return f"the states of all {before} ranks are needed, each once, got those of {sorted(ranks)}"
    if len({state["step"] for state in saved}) > 1:
        return f"the states are of different steps, {sorted({state['step'] for state in saved})}"
    return None


def _problem_of_content(state: Mapping[str, Any], context: Context) -> str | None:
    shapes = {name: p.shape for name, p in zip(context.names, context.parameters, strict=True)}
    missing = {"rank", "world_size", "num_skipped", "memories", *_SAME_ON_EVERY_RANK, *_KINDS} - set(state)
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
            if kind == "residual" and values.numel() < context.config.dense_below_numel:
                return f"{name} is summed in full now, and its residual would be lost: keep dense_below_numel"
    return None
